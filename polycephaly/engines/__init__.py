"""The engines that run drones: forks of this process, Ray actors, or pools in other processes."""
