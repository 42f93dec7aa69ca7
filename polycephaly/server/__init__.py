"""A pool served to other processes, and hosts that join it with their drones."""

from .._compat import check_platform

check_platform()
