"""Pools and drones: their tasks, and all decisions about which drone runs which task."""

from .._compat import check_platform

check_platform()
