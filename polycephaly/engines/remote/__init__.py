"""The remote engine: a pool that another process serves, used like a local pool."""
