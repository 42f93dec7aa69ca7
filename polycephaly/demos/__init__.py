"""Demos, each with a checked result. `polycephaly demo` runs them."""
