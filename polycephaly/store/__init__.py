"""Handles of values that are elsewhere: shared values, kept values, pores."""

from .._compat import check_platform

check_platform()
