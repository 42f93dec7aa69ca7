"""The remote engine: a pool in another process, used as one of this process is."""
