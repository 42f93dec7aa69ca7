"""Messages between processes, and how they are pickled and sent."""
