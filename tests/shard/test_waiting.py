"""What a member does while it waits for others: it notices that they hang, and keeps nothing of what it has sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hispec_ray.core.plan import Tentative
from hispec_ray.shard.collectives import Watched
from hispec_ray.shard.line import Line
from hispec_ray.shard.placement import bundles_of


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_a_gpu_that_does_not_get_behind_a_collective_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("hispec_ray.shard.collectives.time.monotonic", lambda: now)
    watched, events = Watched(), [Event() for _ in range(3)]
    assert watched.seconds() == 0
    for event in events:
        watched.queue(event)
        now += 1
    assert watched.seconds() == 3
    events[0].done = True
    assert watched.seconds() == 2, "the next one is the oldest"
    with watched.waiting():
        now += 1
        assert watched.seconds() == 3
        events[1].done = events[2].done = True
        assert watched.seconds() == 1
    assert watched.seconds() == 0


def test_what_was_sent_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        waited = False

        def wait(self) -> None:
            self.waited = True

    sent: list[Work] = []

    def isend(part: torch.Tensor, other: int) -> Any:
        sent.append(Work())
        return sent[-1]

    monkeypatch.setattr(dist, "isend", isend)
    line = Line([1, 1], 0, 0, "cpu")
    for _ in range(10):
        line.send([Tentative([5], [0], [])], torch.zeros(3, 4))
    assert [work.waited for work in sent] == [True] * 16 + [False] * 4, "a note and rows for each of the last two rounds"
    assert line.sent_bytes == 10 * (1024 + 3 * 4 * 4)


def test_a_stage_goes_where_it_fits_whole() -> None:
    each = {"CPU": 1, "GPU": 1}
    nodes = [{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 4}]
    bundles, places = bundles_of([4, 8], each, nodes)
    assert [bundle["GPU"] for bundle in bundles] == [4, 8]
    assert [{place.node for place in on} for on in places] == [{1}, {0}]
    bundles, places = bundles_of([2, 6], each, nodes[:1])
    assert [[place.bundle for place in on] for on in places] == [[0, 0], [1] * 6]
    bundles, places = bundles_of([6, 2], each, [{"CPU": 8, "GPU": 4}] * 2)
    assert [bundle["GPU"] for bundle in bundles] == [1] * 6 + [2]
    assert [place.bundle for place in places[1]] == [6, 6]
