"""Demos: things to watch, each with a checked result. `polycephaly demo` runs them."""
