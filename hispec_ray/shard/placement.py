"""Where a group's processes go in a Ray cluster: one placement group, a stage on one node where it fits. And what its nodes have."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hispec_ray.shard.machine import Machine, this_machine

T = TypeVar("T")
Resources = Mapping[str, float]
_LOOK_S = 2.0
_REACH_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: the bundle of the placement group that it takes its resources from, and a node that has room for that.

    Ray may choose another node with the same room.
    """

    bundle: int
    node: int


def bundles_of(ranks: Sequence[int], each: Resources, nodes: Sequence[Resources]) -> tuple[list[dict[str, float]], list[list[Place]]]:
    """Return the bundles to reserve, and each rank's place by stage and rank.

    ranks: of each stage; each: what a rank takes; nodes: what the cluster's nodes have in all. A stage is one bundle, and so on one node,
    where a node has that much; else each of its ranks is one.
    Raises ValueError, with the numbers, where the nodes together cannot hold them.
    """
    left = [dict(node) for node in nodes]
    homes: dict[int, tuple[bool, list[int | None]]] = {}  # by stage: whether its ranks are bundles of their own, and their nodes
    for stage in sorted(range(len(ranks)), key=lambda stage: -ranks[stage]):  # those that are hardest to place first
        count = ranks[stage]
        node = _take(left, {name: amount * count for name, amount in each.items()})
        homes[stage] = (node is None, [_take(left, each) for _ in range(count)] if node is None else [node] * count)
    bundles: list[dict[str, float]] = []
    places: list[list[Place]] = []
    for stage, count in enumerate(ranks):
        apart, on = homes[stage]
        together = {name: amount * count for name, amount in each.items()}
        if None in on:
            there = "; ".join(_said({name: node.get(name, 0) for name in each}) for node in nodes) or "nothing"
            raise ValueError(
                f"parallel.stages.{stage}.tp is {count} and each rank takes {_said(each)}; stages of {', '.join(map(str, ranks))} ranks "
                f"do not fit into this cluster, whose nodes have {there}"
            )
        first = len(bundles)
        bundles += [dict(each) for _ in range(count)] if apart else [together]
        places.append([Place(first + rank if apart else first, at) for rank, at in enumerate(on) if at is not None])
    return bundles, places


def _take(nodes: list[dict[str, float]], wanted: Resources) -> int | None:
    """Take resources from the fullest node that has them, the first of equals, and return its number; None where none has."""
    able = [number for number, node in enumerate(nodes) if all(node.get(name, 0) >= amount for name, amount in wanted.items())]
    if not able:
        return None
    number = min(able, key=lambda number: [nodes[number][name] for name in reversed(list(wanted))])  # GPUs count before CPUs
    for name, amount in wanted.items():
        nodes[number][name] -= amount
    return number


def _said(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def reserve(
    ranks: Sequence[int], each: Resources, patience_s: float, *, may_grow: bool = False
) -> tuple[PlacementGroup, list[list[Place]]]:
    """Reserve room for every rank in the cluster that this process is part of.

    may_grow: whether to wait for nodes too, where those that live have not enough.
    Raises ValueError as `bundles_of`, and where what would be enough is not free within `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            bundles, places = bundles_of(ranks, each, _living())
            break
        except ValueError:
            if not may_grow or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)
    # Ray wants names that nobody in the namespace has: not the group that is being torn down, nor another replica's.
    group = placement_group(bundles, strategy="PACK", name=f"hispec-{uuid.uuid4().hex}")
    try:
        while not group.wait(_LOOK_S):
            bundles_of(ranks, each, _living())  # a node may have died: then waiting is in vain, or other bundles are wanted
            if time.monotonic() > deadline:
                free = _said({name: ray.available_resources().get(name, 0) for name in each})
                raise ValueError(
                    f"the cluster has the room for {sum(ranks)} ranks of {_said(each)} each, not free within {patience_s:g} s; free: {free}"
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return group, places


def _living() -> list[Resources]:
    """What the nodes that are alive have in all, but for what this process holds itself for as long as it lives."""
    context = ray.get_runtime_context()
    mine = context.get_assigned_resources() if context.worker.mode == ray.WORKER_MODE else {}
    home = context.get_node_id()
    return [_without(node["Resources"], mine if node["NodeID"] == home else {}) for node in ray.nodes() if node["Alive"]]


def _without(node: Resources, taken: Resources) -> Resources:
    return {name: amount - taken.get(name, 0) for name, amount in node.items()}


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Be part of the cluster at this address (auto: the one that runs here). Raises ValueError where there is none."""
    if ray.is_initialized():
        yield
        return
    host = re.fullmatch(r"\[?([^/\s]+?)\]?:(\d{1,5})", address)
    try:
        if host:  # Ray itself would try for a quarter of an hour
            socket.create_connection((host[1], int(host[2])), _REACH_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
    except (OSError, OverflowError, RuntimeError, ValueError, RayError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"address is {address!r}: no Ray cluster answers there ({why})") from error
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster. name: its address, with a number where several share one; resources: what Ray has of it in all, CPU and GPU
    among them; alive: as Ray sees it.
    """

    id: str
    name: str
    resources: Resources
    alive: bool


def nodes() -> list[Node]:
    """Return the nodes of the cluster that this process is part of, those that are alive first, then by name."""
    found = sorted(ray.nodes(), key=lambda one: (not one["Alive"], one["NodeManagerAddress"], one["NodeID"]))
    met: Counter[str] = Counter()
    result = []
    for one in found:
        address = one["NodeManagerAddress"]
        met[address] += 1
        name = f"{address} #{met[address]}" if met[address] > 1 else address
        result.append(Node(one["NodeID"], name, one["Resources"], one["Alive"]))
    return result


def machines_of(patience_s: float) -> list[Machine]:
    """Return what the nodes of the cluster have that are alive: the CPUs and GPUs that Ray may use, and what of their memory is free."""
    found = [node for node in nodes() if node.alive]
    said = on_each(found, this_machine, patience_s)
    return [_machine(node, one) for node, one in zip(found, said, strict=True)]


def _machine(node: Node, found: Machine | str) -> Machine:
    cpus, cards = int(node.resources.get("CPU", 0)), int(node.resources.get("GPU", 0))
    if isinstance(found, str):
        return Machine(node.name, cpus, 0, problem=found)
    there, lost = ([gpu for gpu in found.gpus if gpu.lost == is_lost] for is_lost in (False, True))  # Ray counts none that is
    return Machine(node.name, cpus, found.memory_bytes, (*there[:cards], *lost))


def on_each(nodes: Sequence[Node], ask: Callable[[], T], patience_s: float) -> list[T | str]:
    """Return what a function of this package says on each node, or in a line why nothing came of it within `patience_s`.

    It takes none of the node's CPUs or GPUs, so it runs beside what serves there.
    """
    remote = ray.remote(num_cpus=0, max_retries=0)(ask)
    calls = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)).remote() if node.alive else None
        for node in nodes
    ]
    ray.wait([call for call in calls if call is not None], num_returns=sum(call is not None for call in calls), timeout=patience_s)
    return ["it has left the cluster" if call is None else _answer(call, patience_s) for call in calls]


def _answer(call: Any, patience_s: float) -> Any:
    try:
        return ray.get(call, timeout=0)
    except GetTimeoutError:
        ray.cancel(call, force=True)
        return f"no answer within {patience_s:g} s"
    except RayError as error:
        return " ".join(str(getattr(error, "cause", None) or error).split())[:300]
