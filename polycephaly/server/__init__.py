"""A pool served to other processes, and drones of other processes that join it."""
