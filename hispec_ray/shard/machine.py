"""The machines that a group of shards may run on: found here, or described in a few characters."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hispec_ray.shard.gpus import Gpu, faults, gpus, in_link_order

DESCRIPTION = "NODESxGPUSxMEMORY with the memory of each GPU, 2x4x80GiB, or NODESxCPUScpuxMEMORY with that of each node, 3x2cpux16GiB"
"""How a cluster is described; several kinds of nodes stand side by side with a + between them."""
_NUMBER = r"[0-9]{1,9}"
_KIND = re.compile(
    rf"(?P<nodes>{_NUMBER})x(?P<devices>{_NUMBER})(?P<cpu>cpu)?x(?P<memory>{_NUMBER}(\.{_NUMBER})?)(?P<unit>[MGT]i?B)", re.IGNORECASE
)
_UNITS = {"mib": 2**20, "gib": 2**30, "tib": 2**40, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_CGROUP = Path("/sys/fs/cgroup")
_MOST_NODES, _MOST_DEVICES = 1000, 64


@dataclass(frozen=True, slots=True)
class Machine:
    """A node.

    cpus: cores that processes may use, None where that is not known, and then one for each GPU. memory_bytes: of the machine's own memory,
        what is free. problem: why nothing is known of it, where it could not be asked.
    """

    name: str
    cpus: int | None
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""

    def resources(self) -> dict[str, float]:
        """Return what Ray counts: CPU and GPU."""
        cards = sum(not gpu.lost for gpu in self.gpus)
        return {"CPU": cards if self.cpus is None else self.cpus, "GPU": cards}

    def usable_gpus(self) -> list[Gpu]:
        """Return the GPUs that answer, neighbours linked well: see `in_link_order`."""
        by_index = {gpu.index: gpu for gpu in self.gpus if not gpu.lost}
        return [by_index[index] for index in in_link_order(list(by_index.values()))]

    def faults(self) -> list[str]:
        """Return what is wrong with its GPUs."""
        return [fault for gpu in self.gpus if (fault := faults(gpu))]


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    return Machine(socket.gethostname(), len(os.sched_getaffinity(0)), free_memory(), tuple(gpus()))


def free_memory(proc: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the bytes that processes here may still take: what the kernel calls available, or less where their container ends sooner."""
    lines = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        # what is read of files counts as used, and goes when it is needed
        files = _fields(cgroup / "memory.stat").get("inactive_file", 0)
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used + files))


def _fields(path: Path) -> Mapping[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}


def in_gib(size: float) -> str:
    """Say bytes in GiB, below one in MiB."""
    return f"{size / 2**20:,.0f} MiB" if abs(size) < 2**30 else f"{size / 2**30:,.1f} GiB"


def described(text: str) -> list[Machine]:
    """Return the nodes that a description like 2x4x80GiB means; see DESCRIPTION. Raises ValueError."""
    machines: list[Machine] = []
    for kind in text.replace(" ", "").split("+"):
        found = _KIND.fullmatch(kind)
        if not found:
            raise ValueError(f"cluster is {text!r}; it must be {DESCRIPTION}, of several kinds with + between them")
        nodes, devices = int(found["nodes"]), int(found["devices"])
        memory = int(float(found["memory"]) * _UNITS[found["unit"].lower()])
        if not (1 <= nodes <= _MOST_NODES and 1 <= devices <= _MOST_DEVICES and memory):
            raise ValueError(f"cluster is {text!r}; it must have 1 to {_MOST_NODES} nodes of 1 to {_MOST_DEVICES} devices, and memory")
        for _ in range(nodes):
            name = f"node {len(machines) + 1}"
            if found["cpu"]:
                machines.append(Machine(name, devices, memory))
            else:
                cards = tuple(Gpu(index, "", "", memory, memory) for index in range(devices))
                machines.append(Machine(name, None, 0, cards))
    return machines
