"""A coordinator's process is killed in the middle of streams: another replica goes on, and no client sees it but by the time it takes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from benchmarks import server as servers
from benchmarks.server import Server
from serving.live import MODEL, events_in, wait_for

STREAMS = 8
TOKENS = 160
LIMIT_S = 240


@pytest.fixture(scope="module")
def two_replicas() -> Iterator[Server]:
    content = servers.deployment()
    (application,) = content["applications"]
    application["args"]["model"] |= {"threads": 1, "max_model_len": 1024}
    application["args"]["cache"] = {"blocks": 256}
    application["args"]["server"] = {"stream_interval_ms": 20, "stream_events_per_s": 1000}
    (coordinator,) = (one for one in application["deployments"] if one["name"] == "Coordinator")
    del coordinator["autoscaling_config"]
    coordinator |= {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0}}
    with servers.running(content) as running:
        yield running


def coordinators(server: Server) -> list[psutil.Process]:
    everybody = psutil.Process(server.pid).children(recursive=True)
    return [process for process in everybody if "ServeReplica:hispec:Coordinator" in " ".join(process.cmdline())]


def stream(url: str, number: int, heard: Callable[[str], None]) -> tuple[str, list[str]]:
    """The text of a stream and why it ended. heard: told each event's text as it comes."""
    body: dict[str, Any] = {"model": MODEL, "prompt": f"{number}. Once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream": True, "seed": number, "temperature": 0.8 * (number % 2)}
    text, ends = "", []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        for event in events_in(answer.iter_lines()):
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["text"]
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                heard(text)
    return text, ends


def run(url: str, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[str, list[str]]]:
    """Run all streams; `meanwhile` is called when each has begun."""
    begun: set[int] = set()
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(stream, url, number, lambda _, number=number: begun.add(number)) for number in range(STREAMS)]
        wait_for(lambda: len(begun) == STREAMS or any(one.done() for one in running), LIMIT_S, lambda: begun)
        meanwhile()
        return [one.result() for one in running]


@pytest.mark.slow
def test_streams_survive_a_dead_coordinator(two_replicas: Server) -> None:
    wait_for(lambda: len(coordinators(two_replicas)) == 2, LIMIT_S, lambda: coordinators(two_replicas))
    undisturbed = run(two_replicas.url)
    assert [ends for _, ends in undisturbed] == [["length"]] * STREAMS
    victims = coordinators(two_replicas)

    def kill() -> None:
        os.kill(victims[0].pid, signal.SIGKILL)

    assert run(two_replicas.url, kill) == undisturbed
    wait_for(lambda: len(coordinators(two_replicas)) == 2, LIMIT_S, lambda: coordinators(two_replicas))
    assert victims[0].pid not in {one.pid for one in coordinators(two_replicas)}
    assert run(two_replicas.url) == undisturbed
