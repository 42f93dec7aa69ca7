"""The local engine: drones are forks of this image, on this machine."""
