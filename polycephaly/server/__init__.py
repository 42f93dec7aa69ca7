"""A pool served to other processes, and hosts that join it with their drones."""
