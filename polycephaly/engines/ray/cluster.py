"""The Ray cluster of a pool, and the resources that each drone asks of the cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import ray
import ray.util.client
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...pool.machine import RAY_OPTIONS
from .engine import RayEngine, group_strategy

if TYPE_CHECKING:
    from ...pool.dispatcher import Dispatcher

CONNECT_TIMEOUT_SECONDS = 8.0
_RESOURCE_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources that Ray takes as options of their own, and refuses among `resources`."""
_LOCAL_ADDRESSES = ("auto", "local")
_UNITS_PER_RESOURCE = 10_000  # Ray's smallest units in one of each resource
_NO_RAY_CLIENT = (
    "through Ray Client a pool cannot receive messages of its drones; run the controller process "
    "on a machine of the cluster, with address='auto' or the HOST:PORT of its head"
)


class Cluster:
    """A cluster as a place for drones; see `pool.machine.Machine`.

    Parameters
    ----------
    options
        `address`, and options that are given to Ray with each drone. An `address` is "local" (start
        a cluster on this machine), "auto" (a cluster that runs already), or the "HOST:PORT" of the
        cluster's head. If None, the cluster is the one that this process is connected to, else that
        of `RAY_ADDRESS`, else "local". (Ray itself, with None, would prefer any cluster that runs
        on this machine, even another user's.)

    Raises
    ------
    TypeError
        If an option is unknown, or is not a mapping as required.
    ValueError
        If an amount or the address is invalid, or if this process is connected to another cluster.
    ConnectionError
        If the cluster cannot be reached.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        unknown = sorted(set(options) - set(RAY_OPTIONS))
        if unknown:
            raise TypeError(
                f"unexpected {', '.join(unknown)}: the Ray engine has {', '.join(RAY_OPTIONS)}"
            )
        options = dict(options)
        self.address: str | None = options.pop("address", None)
        for name in ("resources", "runtime_env", "label_selector"):
            if options.get(name) is not None and not isinstance(options[name], Mapping):
                raise TypeError(f"{name} is a mapping, not {options[name]!r}")
        amounts = {name: options.get(name) for name in ("num_cpus", "num_gpus", "memory")}
        for name, amount in (options.get("resources") or {}).items():
            amounts[f"resources[{name!r}]"] = amount
        for name, amount in amounts.items():
            is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
            if amount is not None and not (is_number and 0 <= amount < inf):
                raise ValueError(f"{name} is a number from 0 on, not {amount!r}")
        self.placement = _normalize_resources(
            {name: value for name, value in options.items() if value is not None}
        )
        self._connect()

    def _connect(self) -> None:
        if ray.util.client.ray.is_connected():
            raise ValueError(
                f"this process is connected by Ray Client (ray.init('ray://...')): {_NO_RAY_CLIENT}"
            )
        if ray.is_initialized():
            connected = ray.get_runtime_context().gcs_address
            if self.address not in (None, *_LOCAL_ADDRESSES, connected):
                raise ValueError(
                    f"address={self.address!r}: this process is connected to the Ray cluster at "
                    f"{connected}"
                )
            return
        address = str(self.address or os.environ.get("RAY_ADDRESS") or "local")
        if address.startswith("ray://"):
            raise ValueError(f"address={address!r}: {_NO_RAY_CLIENT}")
        if address not in _LOCAL_ADDRESSES:
            _check_reachable(address)
        try:
            ray.init(
                address=address, log_to_driver=False,
                include_dashboard=False if address == "local" else None, logging_level="warning",
            )  # fmt: skip
        except (ConnectionError, RuntimeError, SystemExit) as error:
            local = address in _LOCAL_ADDRESSES
            place = f"this machine (address={address!r})" if local else address
            raise ConnectionError(f"no Ray cluster can be reached at {place}: {error}") from error

    # -- resources ---------------------------------------------------------------------------------

    def default_size(self) -> int:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    def check(self, size: int, running: int = 0) -> None:
        """Raise an error if `size` drones can never fit into the cluster or the placement group.

        Counts all resources that the nodes have, even those that are in use now.
        """
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if not nodes:
            raise ConnectionError("no node of the Ray cluster is alive")
        selector = self.placement.get("label_selector") or {}
        fitting = [
            node["Resources"] for node in nodes if _matches(node.get("Labels", {}), selector)
        ]
        if not fitting:
            labels = "; ".join(
                ", ".join(f"{name}={value}" for name, value in node["Labels"].items())
                for node in nodes
            )
            raise ValueError(
                f"no node of the Ray cluster has label_selector={selector!r}; the nodes' labels: "
                f"{labels}"
            )
        places, part, whole, have = fitting, "a node", "the Ray cluster", "whose nodes have"
        strategy = group_strategy(self.placement)
        if strategy is not None:
            places = _usable_bundles(strategy)
            part, whole, have = "a bundle", "the placement group", "which has"
        required = self._required_resources()
        if not required:
            return
        fits = sum(
            min(
                _count_fitting(name, place.get(name, 0), amount)
                for name, amount in required.items()
            )
            for place in places
        )
        if fits >= size:
            return
        requested = ", ".join(f"{amount:,.12g} {name}" for name, amount in required.items())
        amounts = [
            [f"{place[name]:,.12g} {name}" for name in sorted(place) if name[:5] != "node:"]
            for place in places
        ]
        available = "; ".join(", ".join(each) or "nothing" for each in amounts)
        if fits:
            raise ValueError(
                f"{size} drones of {requested} each do not fit into {whole}, {have}: {available}"
            )
        raise ValueError(
            f"no drone of {requested} fits into {part} of {whole}, {have}: {available}"
        )

    def _required_resources(self) -> dict[str, float]:
        required = {name: self.placement.get(option) for name, option in _RESOURCE_OPTIONS.items()}
        required.update(self.placement.get("resources", {}))
        accelerator = self.placement.get("accelerator_type")
        if accelerator is not None:
            required[f"accelerator_type:{accelerator}"] = 0.001  # as Ray itself encodes the option
        return {name: amount for name, amount in required.items() if amount}

    def open(self, dispatcher: Dispatcher) -> RayEngine:
        return RayEngine(dispatcher, self.placement)


def _normalize_resources(placement: dict[str, Any]) -> dict[str, Any]:
    """Replace ``resources={"GPU": 1}`` by ``num_gpus=1``, and the like.

    Raises `ValueError` if both are given and differ.
    """
    resources = dict(placement.get("resources", {}))
    for name in _RESOURCE_OPTIONS.keys() & resources.keys():
        option, amount = _RESOURCE_OPTIONS[name], resources.pop(name)
        if placement.setdefault(option, amount) != amount:
            both = f"{option}={placement[option]!r} and resources={{{name!r}: {amount!r}}}"
            raise ValueError(f"{both} are the same option: give one of them")
    if "resources" in placement:
        placement["resources"] = resources
    return placement


def _count_fitting(name: str, available: float, amount: float) -> int:
    """Return for how many drones of `amount` each there is room.

    Ray counts in ten-thousandths. An amount of less than one GPU must come from a single device.
    """
    units = round(available * _UNITS_PER_RESOURCE)
    each = max(1, round(amount * _UNITS_PER_RESOURCE))
    if name == "GPU" and each < _UNITS_PER_RESOURCE:
        return units // _UNITS_PER_RESOURCE * (_UNITS_PER_RESOURCE // each)
    return units // each


def _usable_bundles(strategy: PlacementGroupSchedulingStrategy) -> list[dict[str, float]]:
    """Return the resources of the bundles that drones may use.

    Raises `ValueError` if the group is gone, because Ray would wait for the group.
    """
    group, index = strategy.placement_group, strategy.placement_group_bundle_index
    table = ray.util.placement_group_table(group)
    if not table or table["state"] == "REMOVED":
        raise ValueError(
            f"this cluster has no placement group {group.id.hex()}: the group was removed, or "
            "belongs to another cluster"
        )
    bundles: dict[int, dict[str, float]] = table["bundles"]
    if index == -1:
        return list(bundles.values())
    if index not in bundles:
        raise ValueError(
            f"placement group {group.id.hex()} has {len(bundles)} bundles, and none of index "
            f"{index}"
        )
    return [bundles[index]]


def _matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return True if a node's labels match `selector`, by Ray's rules.

    A rule is a value, or several values as "in(a,b)"; a leading "!" means none of these.
    """
    for name, wanted in selector.items():
        value = wanted.removeprefix("!")
        values = value[3:-1].split(",") if value.startswith("in(") else [value]
        if (labels.get(name) in [each.strip() for each in values]) == wanted.startswith("!"):
            return False
    return True


def _check_reachable(address: str) -> None:
    """Check that a server answers at `address`, because Ray itself tries for minutes.

    Raises `ConnectionError`, or `ValueError` if `address` is not "HOST:PORT".
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address is 'auto' or 'HOST:PORT', not {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"no Ray cluster can be reached at {address}: {error}") from error
