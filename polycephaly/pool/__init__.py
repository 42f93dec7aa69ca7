"""A pool, its drones, its tasks, and all that it decides."""
