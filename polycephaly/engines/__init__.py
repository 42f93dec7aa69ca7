"""The engines that run drones: forks of this process, Ray actors, or pools in other processes."""

from .._compat import check_platform

check_platform()
