"""The Ray engine: drones are Ray actors, on any node of a cluster.

    Pool(8, engine="ray") ──> Dispatcher ──> RayEngine ──> RayHandle ── actor calls ──> DroneActor
                                                 ^                                         └─ a DroneExecutor
                                                 └─ Switch (an actor): orders ──────> its control thread
                                                         news, output, heartbeats <── its control thread

Placement, resources, restarts and transport of objects are Ray's. Ours are the messages
(wire/messages.py), many calls in one, and what runs in a drone (drone/executor.py): the same as on
one machine.

This module imports Ray only when a pool asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...pool.engine import Machine

__all__ = ["reach"]


def reach(options: dict[str, Any]) -> Machine:
    """The cluster that `options` name. Raises `ImportError` without Ray, and as `Cluster` does."""
    try:
        import ray  # noqa: F401
    except ImportError as missing:
        raise ImportError("engine='ray' needs Ray: pip install 'polycephaly[ray]'") from missing
    from .cluster import Cluster

    return Cluster(options)
