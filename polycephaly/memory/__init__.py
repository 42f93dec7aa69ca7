"""Shared memory: its allocation, and references to memory that another process has lent."""
