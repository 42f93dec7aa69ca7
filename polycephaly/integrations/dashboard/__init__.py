"""The live page of a pool: see `Pool.dashboard`."""

from .dashboard import Dashboard

__all__ = ["Dashboard"]
