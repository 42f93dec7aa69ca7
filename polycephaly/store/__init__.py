"""Handles of values that are elsewhere: shared values, kept values, pores; and files of results."""

from .._compat import check_platform

check_platform()
