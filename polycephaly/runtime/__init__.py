"""The lowest layer: timers, signals, forks, and facts that the kernel reports."""
