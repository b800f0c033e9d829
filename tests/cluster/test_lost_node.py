"""A node is lost while a model that is spread over three serves eight streams over HTTP: no stream loses a token."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray.util import placement_group_table

from cluster.local import LocalCluster, local_cluster

ROOT = Path(__file__).parents[2]
STREAMS = 8
TOKENS = 300
LIMIT_S = 180


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    cluster: LocalCluster


@pytest.fixture(scope="module")
def served(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The large model's deployment with the tiny model in two stages, on three nodes that have room for one of them each."""
    deployment = yaml.safe_load((ROOT / "deployments" / "hispec-70b.yaml").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        deployment["http_options"]["port"] = port = free.getsockname()[1]
    application = deployment["applications"][0]
    application["args"] |= {
        "model": {"path": str(tiny_folder), "served_name": "tiny", "dtype": "float32", "threads": 1},
        "parallel": {"stages": [{"layers": 4}, {"layers": 4}], "shared_memory": False},
        "speculation": {"method": "hispec", "exits": {"draft": 1, "check": 3}},
        "cache": {"blocks": 300},
        "server": {"stream_interval_ms": 20, "stream_events_per_s": 1000},
    }
    application["deployments"][0]["ray_actor_options"]["num_cpus"] = 0
    file = tmp_path_factory.mktemp("deployment") / "tiny.yaml"
    file.write_text(yaml.safe_dump(deployment))
    with local_cluster([{"CPU": 1}] * 3) as cluster:
        subprocess.run(
            [Path(sys.executable).with_name("serve"), "run", "--non-blocking", "--address", cluster.address, file],
            cwd=ROOT,
            env={**os.environ, "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")},
            check=True,
            timeout=LIMIT_S,
        )
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: is_well(url))
            yield Served(url, cluster)
        finally:
            ray.shutdown()


def is_well(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < end, f"not reached in {LIMIT_S} s"
        time.sleep(0.05)


class Streams:
    """Eight that run at once, and what has come of each so far: its text and why it ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.texts = [""] * STREAMS
        self.ends: list[str | None] = [None] * STREAMS
        self.tokens = [0] * STREAMS

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Run them to their ends. meanwhile: called when each has begun and none has ended."""
        with ThreadPoolExecutor(STREAMS) as pool:
            running = [pool.submit(self._stream, number) for number in range(STREAMS)]
            wait_for(lambda: all(self.texts) or any(one.done() for one in running))
            meanwhile()
            for one in running:
                one.result()

    def _stream(self, number: int) -> None:
        body = {
            "model": "tiny", "prompt": f"the {number} quick brown fox", "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
            "temperature": 0.8 if number % 2 else 0, "seed": number, "stream_options": {"include_usage": True},
        }  # fmt: skip
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
            assert answer.status_code == 200, answer.read()
            *_, last = self._lines(answer, number)
        assert last == "data: [DONE]"

    def _lines(self, answer: httpx.Response, number: int) -> Iterator[str]:
        for line in answer.iter_lines():
            if not line:
                continue
            yield line
            event: dict[str, Any] = json.loads(line.removeprefix("data: ")) if "[DONE]" not in line else {}
            assert "error" not in event, event
            for choice in event.get("choices", ()):
                self.texts[number] += choice["text"]
                self.ends[number] = choice["finish_reason"]
            if event.get("usage"):
                self.tokens[number] = event["usage"]["completion_tokens"]


def places() -> list[str]:
    """The names of the nodes that the stages are on."""
    (group,) = (group for group in placement_group_table().values() if group["state"] == "CREATED")
    names = {node["NodeID"]: str(node["NodeName"]) for node in ray.nodes()}
    return [names[node] for node in group["bundles_to_node_id"].values()]


@pytest.mark.slow
def test_no_stream_loses_a_token_with_a_node(served: Served) -> None:
    undisturbed = Streams(served.url)
    undisturbed.run()
    assert undisturbed.ends == ["length"] * STREAMS
    before = places()
    assert len(set(before)) == 2, "the stages are on different nodes"
    victim = next(name for name in before if name != served.cluster.nodes[0].name)

    def kill() -> None:
        assert disturbed.ends == [None] * STREAMS, "all are in the middle"
        served.cluster.kill(victim)

    disturbed = Streams(served.url)
    disturbed.run(kill)
    assert disturbed.texts == undisturbed.texts
    assert disturbed.ends == undisturbed.ends
    assert disturbed.tokens == undisturbed.tokens == [TOKENS] * STREAMS
    health = httpx.get(f"{served.url}/health").json()
    assert (health["running"], health["waiting"], health["kv_usage"]) == (0, 0, 0)
    left = {node.name for node in served.cluster.nodes} - {victim}
    assert set(places()) == left, "started anew on what is left"
