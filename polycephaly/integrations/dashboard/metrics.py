"""The state of a pool in the text format of Prometheus.

See https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS = {
    "tasks_done": "Calls that were answered, by a value or an error.",
    "tasks_failed": "Calls that failed, were too late or were lost with a drone, by attempts.",
    "tasks_cancelled": "Calls that were cancelled.",
}
_GAUGES = {
    "queued": "Tasks that are ready and not yet sent to a drone.",
    "waiting": "Tasks that wait for inputs, resources or another attempt.",
    "in_flight": "Tasks that were sent and not answered.",
    "running": "Tasks that run.",
    "size": "Number of drones that the pool should have.",
    "clients": "Clients of a served pool.",
    "shared_memory": "Bytes of shared memory.",
    "shared_memory_limit": "Most bytes of shared memory that the pool may use.",
}
_OF_DRONES = {
    "memory": ("drone_memory_bytes", "Bytes that a drone holds for itself."),
    "processor": ("drone_processor_seconds_total", "Processor time of a drone."),
}

Sample = tuple[dict[str, Any], Any]


def metrics_of(status: dict[str, Any]) -> str:
    """Return the metrics in `status`, the dict of `Pool.status`, without unknown values."""
    lines: list[str] = []
    pool = {"pool": status["name"]}

    def add(name: str, kind: str, text: str, samples: Iterable[Sample]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines.append(f"# HELP polycephaly_{name} {text}")
            lines.append(f"# TYPE polycephaly_{name} {kind}")
            lines.extend(f"polycephaly_{name}{_labels(pool | own)} {value}" for own, value in known)

    add("up", "gauge", "1 if the pool takes tasks.", [({}, int(status["state"] == "open"))])
    for key, text in _COUNTERS.items():
        add(f"{key}_total", "counter", text, [({}, status[key])])
    for key, text in _GAUGES.items():
        add(f"{key}_bytes" if "memory" in key else key, "gauge", text, [({}, status[key])])
    for key, text in {"size": "How much there is.", "free": "How much no task holds."}.items():
        of_each = [({"resource": name}, each[key]) for name, each in status["resources"].items()]
        add(f"resource_{key}", "gauge", text, of_each)
    states = Counter(drone["state"].partition(":")[0] for drone in status["drones"])
    by_state = [({"state": state}, count) for state, count in states.items()]
    add("drones", "gauge", "Drones by their state.", by_state)
    for key, (name, text) in _OF_DRONES.items():
        of_drones = [({"drone": drone["name"]}, drone.get(key)) for drone in status["drones"]]
        add(name, "counter" if name.endswith("total") else "gauge", text, of_drones)
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, Any]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(each))}"' for name, each in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
