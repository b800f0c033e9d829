"""Several Ray nodes on this machine: they find each other, one can be killed alone, and nothing stays."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import ray

from cluster.local import LocalCluster, local_cluster, processes_in

NOTICED_S = 5.0


@contextmanager
def driven(nodes: list[Mapping[str, float]]) -> Iterator[LocalCluster]:
    """A cluster that this process is part of, and of which nothing may be left afterwards."""
    with local_cluster(nodes) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        try:
            yield cluster
        finally:
            ray.shutdown()
    assert not processes_in([node.pid for node in cluster.nodes])
    assert not cluster.nodes[0].folder.parent.exists()


def alive() -> dict[str, bool]:
    return {node["NodeName"]: node["Alive"] for node in ray.nodes()}


@ray.remote(num_cpus=1)
def pid() -> int:
    return os.getpid()


def test_a_node_is_killed_alone_and_nothing_stays() -> None:
    with driven([{"CPU": 1, "home": 1}, {"CPU": 1, "GPU": 4}]) as cluster:
        head, other = cluster.nodes
        here = {node["NodeName"]: node["Resources"] for node in ray.nodes()}
        assert (here["node0"]["CPU"], here["node0"]["home"], here["node1"]["CPU"], here["node1"]["GPU"]) == (1, 1, 1, 4)
        assert ray.get(pid.options(resources={"home": 1}).remote()) in head.pids
        assert ray.get(pid.options(num_gpus=4).remote()) in other.pids
        kept = set(head.pids)
        assert not kept & set(other.pids)
        killed = time.monotonic()
        cluster.kill("node1")
        assert not other.pids
        while alive()["node1"]:
            assert time.monotonic() - killed < NOTICED_S
            time.sleep(0.05)
        assert alive()["node0"]
        assert kept <= set(head.pids)
        assert ray.get(pid.options(resources={"home": 1}).remote()) in head.pids


@pytest.mark.slow
def test_two_clusters_at_once_know_nothing_of_each_other() -> None:
    with local_cluster([{"CPU": 1}]) as first:
        with driven([{"CPU": 1}, {"CPU": 1}]):
            assert set(alive()) == {"node0", "node1"}
        ray.init(address=first.address, log_to_driver=False, logging_level="error")
        try:
            assert alive() == {"node0": True}
            assert ray.get(pid.remote()) in first.nodes[0].pids
        finally:
            ray.shutdown()


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "nodes is empty"),
        ([{"CPU": 1}, {"CPU": 0.5}], "nodes.1.CPU is 0.5; it must be a whole number from 0"),
        ([{"home": -1}], "nodes.0.home is -1; it must be a number from 0"),
    ],
)
def test_what_cannot_be_is_refused(nodes: list[dict[str, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message), local_cluster(nodes):
        pass
