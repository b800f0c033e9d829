"""Where a group's processes go in a Ray cluster: one placement group, a stage on one node where it fits."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

Resources = Mapping[str, float]
_LOOK_S = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: the bundle of the placement group that it takes its resources from."""

    bundle: int
    resources: Resources


def bundles_of(ranks: Sequence[int], each: Resources, nodes: Sequence[Resources]) -> tuple[list[dict[str, float]], list[list[Place]]]:
    """Return the bundles to reserve, and each rank's place by stage and rank.

    ranks: of each stage; each: what a rank takes; nodes: what the cluster's nodes have in all. A stage is one bundle, and so on one node,
    where a node has that much; else each of its ranks is one.
    Raises ValueError, with the numbers, where the nodes together cannot hold them.
    """
    left = [dict(node) for node in nodes]
    bundles: list[dict[str, float]] = []
    places: list[list[Place]] = []
    for stage, count in enumerate(ranks):
        together = {name: amount * count for name, amount in each.items()}
        apart = _take(left, together) is None
        if apart and any(_take(left, each) is None for _ in range(count)):
            there = "; ".join(_said({name: node.get(name, 0) for name in each}) for node in nodes) or "nothing"
            raise ValueError(
                f"parallel.stages.{stage}.tp is {count} and each rank takes {_said(each)}; stages of {', '.join(map(str, ranks))} ranks "
                f"do not fit into this cluster, whose nodes have {there}"
            )
        first = len(bundles)
        bundles += [dict(each) for _ in range(count)] if apart else [together]
        places.append([Place(first + rank if apart else first, each) for rank in range(count)])
    return bundles, places


def _take(nodes: list[dict[str, float]], wanted: Resources) -> dict[str, float] | None:
    """Take resources from the first node that has them; None where none has."""
    for node in nodes:
        if all(node.get(name, 0) >= amount for name, amount in wanted.items()):
            for name, amount in wanted.items():
                node[name] -= amount
            return node
    return None


def _said(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def reserve(ranks: Sequence[int], each: Resources, patience_s: float) -> tuple[PlacementGroup, list[list[Place]]]:
    """Reserve room for every rank in the cluster that this process is part of.

    Raises ValueError as `bundles_of`, and where what would be enough is not free within `patience_s`.
    """
    bundles, places = bundles_of(ranks, each, _living())
    # Ray wants names that nobody in the namespace has: not the group that is being torn down, nor another replica's.
    group = placement_group(bundles, strategy="PACK", name=f"hispec-{uuid.uuid4().hex}")
    deadline = time.monotonic() + patience_s
    try:
        while not group.wait(_LOOK_S):
            bundles_of(ranks, each, _living())  # a node may have died: then waiting is in vain
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
    """What the nodes that are alive have in all."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
