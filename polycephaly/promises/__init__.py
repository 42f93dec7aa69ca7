"""Promises, and combinations of them."""
