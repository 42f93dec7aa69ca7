"""Handles of values that are elsewhere: shared values, kept values, pores."""
