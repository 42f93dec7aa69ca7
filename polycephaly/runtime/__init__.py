"""The lowest layer: the event loop, timers, signals, forks and facts that the kernel reports."""
