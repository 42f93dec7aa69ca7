"""The ground that all else stands on: the event loop, timers, signals, forks, and facts that the
kernel tells."""
