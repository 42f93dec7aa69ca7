"""The code that runs in a drone."""

from .._compat import check_platform

check_platform()
