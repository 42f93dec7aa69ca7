"""The code that runs in a drone."""
