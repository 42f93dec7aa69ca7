"""Promises, and functions that combine them."""
