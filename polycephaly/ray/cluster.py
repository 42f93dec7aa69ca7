"""Which cluster, and what each drone asks of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import ray
import ray.util.client

if TYPE_CHECKING:
    from ..engine import Engine
    from ..roster import Roster

__all__ = ["Cluster"]

REACHED_WITHIN = 8.0  # seconds
_PLACEMENT = (
    "num_cpus", "num_gpus", "resources", "memory", "accelerator_type", "runtime_env", "scheduling_strategy",
    "label_selector",
)  # fmt: skip
_LOCAL = ("auto", "local")
_NO_CLIENT = (
    "by Ray Client a pool cannot hear its drones; run the controller on a machine of the cluster, "
    "with address='auto' or the HOST:PORT of its head"
)
_SETTINGS = b"\x04"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)


class Cluster:
    """The cluster at `address`: Ray's own meaning (None: the one this process is connected to, else `RAY_ADDRESS`, else
    one that is started here; "auto": one that runs already; "HOST:PORT" of its head). Other options are given to Ray
    with each drone.

    Raises `TypeError` for an option that there is not, `ConnectionError` for a cluster that cannot be reached, and
    `ValueError` for an address that is none or not that of the cluster this process is connected to.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        options = dict(options)
        self.address: str | None = options.pop("address", None)
        unknown = sorted(set(options) - set(_PLACEMENT))
        if unknown:
            raise TypeError(f"unexpected {', '.join(unknown)}: the Ray engine has address, {', '.join(_PLACEMENT)}")
        for name in ("resources", "runtime_env", "label_selector"):
            if options.get(name) is not None and not isinstance(options[name], Mapping):
                raise TypeError(f"{name} is a mapping, not {options[name]!r}")
        amounts = {name: options.get(name) for name in ("num_cpus", "num_gpus", "memory")}
        amounts.update({f"resources[{name!r}]": amount for name, amount in (options.get("resources") or {}).items()})
        for name, amount in amounts.items():
            if amount is None:
                continue
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < inf:
                raise ValueError(f"{name} is a number from 0 on, not {amount!r}")
        self.placement = {name: value for name, value in options.items() if value is not None}
        self._connect()

    def _connect(self) -> None:
        if ray.util.client.ray.is_connected():
            raise ValueError(f"this process is connected by Ray Client (ray.init('ray://...')): {_NO_CLIENT}")
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if self.address not in (None, *_LOCAL, here):
                raise ValueError(f"address={self.address!r}: this process is connected to the Ray cluster at {here}")
            return
        address = self.address or os.environ.get("RAY_ADDRESS")
        if str(address).startswith("ray://"):
            raise ValueError(f"address={address!r}: {_NO_CLIENT}")
        if address not in (None, *_LOCAL):
            _look(str(address))
        try:
            ray.init(
                address=self.address, log_to_driver=False, include_dashboard=None if address else False,
                logging_level="warning",
            )  # fmt: skip
        except (ConnectionError, RuntimeError, SystemExit) as error:
            where = address or "this machine"
            raise ConnectionError(f"no Ray cluster can be reached at {where}: {error}") from error

    # -- what there is ----------------------------------------------------------------------------

    def usual(self) -> int:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    def check(self, size: int) -> None:
        """Is there, on all nodes together, room for so many drones, whoever else may use it now? Raises if not."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if not nodes:
            raise ConnectionError("no node of the Ray cluster is alive")
        selector = self.placement.get("label_selector") or {}
        fitting = [node["Resources"] for node in nodes if _matches(node.get("Labels", {}), selector)]
        if not fitting:
            labels = "; ".join(", ".join(f"{name}={value}" for name, value in node["Labels"].items()) for node in nodes)
            raise ValueError(f"no node of the Ray cluster has label_selector={selector!r}; their labels: {labels}")
        needs = self._needs()
        if not needs:
            return
        fits = sum(min(int(node.get(name, 0) / amount) for name, amount in needs.items()) for node in fitting)
        if fits >= size:
            return
        asked = ", ".join(f"{amount:,.12g} {name}" for name, amount in needs.items())
        known = [[f"{node[name]:,.12g} {name}" for name in sorted(node) if name[:5] != "node:"] for node in fitting]
        there = "; ".join(", ".join(each) or "nothing" for each in known)
        what = f"{size} drones of {asked} each do not fit into" if fits else f"no drone of {asked} fits into a node of"
        raise ValueError(f"{what} the Ray cluster, whose nodes have: {there}")

    def _needs(self) -> dict[str, float]:
        asked = {"CPU": self.placement.get("num_cpus"), "GPU": self.placement.get("num_gpus")}
        asked["memory"] = self.placement.get("memory")
        asked.update(self.placement.get("resources", {}))
        accelerator = self.placement.get("accelerator_type")
        if accelerator is not None:
            asked[f"accelerator_type:{accelerator}"] = 0.001  # so Ray puts it
        return {name: amount for name, amount in asked.items() if amount}

    def open(self, roster: Roster) -> Engine:
        from .engine import RayEngine

        return RayEngine(roster, self.placement)


def _matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """By Ray's rules: a value, or several as "in(a,b)", with "!" for none of these."""
    for name, wanted in selector.items():
        value = wanted.removeprefix("!")
        values = value[3:-1].split(",") if value.startswith("in(") else [value]
        if (labels.get(name) in [each.strip() for each in values]) == wanted.startswith("!"):
            return False
    return True


def _look(address: str) -> None:
    """Is anybody there who speaks as Ray does (gRPC, so HTTP/2)? Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address is 'auto' or 'HOST:PORT', not {address!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_WITHIN / 2) as knock:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            knock.sendall(_PREFACE)
            answer = knock.recv(9)
    except OSError as error:
        raise ConnectionError(f"no Ray cluster can be reached at {address}: {error}") from error
    if answer[3:4] != _SETTINGS:
        raise ConnectionError(f"no Ray cluster can be reached at {address}: who is there speaks another protocol")
