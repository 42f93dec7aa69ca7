"""Pools and drones: their tasks, and all decisions about which drone runs which task."""
