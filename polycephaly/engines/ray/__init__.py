"""The Ray engine: drones are Ray actors, on any node of a cluster.

    Pool(8, engine="ray") ──> Dispatcher ──> RayEngine ──> RayHandle ── actor calls ──> DroneActor
                                                 ^                        with a control thread
                                                 └── Switch (an actor) ── orders ──> control thread
                                                            <── news, output, heartbeats ──┘

Ray does the placement, accounts for resources, and transports objects. This package adds the
messages (wire/messages.py), which batch many calls, and the executor in a drone
(drone/executor.py): both the same as on one machine. See docs/decisions/0011-ray-engine.md.

This module imports Ray only if a pool asks for the Ray engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...pool.machine import Machine

__all__ = ["connect_cluster"]


def connect_cluster(**options: Any) -> Machine:
    """Return the cluster that `options` name.

    Raises `ImportError` if Ray is not installed, and the errors of `Cluster`.
    """
    try:
        import ray  # noqa: F401
    except ImportError as missing:
        raise ImportError("engine='ray' needs Ray: pip install 'ray>=2.40'") from missing
    from .cluster import Cluster

    return Cluster(options)
