"""Shards are killed at random under load: every answer is the undisturbed one or an error, none is cut, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from shard.test_ray_group import executor_of, group, leftovers, settings

from hispec_ray import LLM
from hispec_ray.engine.async_engine import AsyncEngine
from hispec_ray.request import EngineDeadError
from hispec_ray.serving.coordinator import Coordinator
from hispec_ray.serving.ingress import create_app

REQUESTS = 200
KILLS = 30
AT_ONCE = 12
STAGES = {"tp": 2, "layers": 4}, {"tp": 1, "layers": 4}
PATIENCE_S = 900


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, address="local", logging_level="error")
    yield
    ray.shutdown()


def body(number: int) -> dict[str, Any]:
    """Of all kinds: greedy and drawn, streamed and whole, several choices, log-probabilities, penalties, stops."""
    dice = random.Random(number)
    asked: dict[str, Any] = {"model": "tiny", "prompt": [dice.randrange(3, 290) for _ in range(dice.randrange(2, 60))]}
    asked |= {"max_tokens": dice.randrange(1, 80), "seed": number, "temperature": dice.choice((0, 0.8)), "stream": number % 2 == 0}
    more = ({"n": 3}, {"logprobs": 2}, {"frequency_penalty": 1.0}, {"stop": ["a"]}, {"logprobs": 1, "echo": True}, {"min_tokens": 1}, {})
    return asked | more[number % len(more)]


def said(response: httpx.Response) -> Any:
    """What an answer says, without what is its own each time; the error where it is one. Raises where it is cut."""
    if response.headers["content-type"].startswith("application/json"):
        content = response.json()
        return ("error", content["error"]["message"]) if "error" in content else [choice | {} for choice in content["choices"]]
    events = response.text.removesuffix("\n\n").split("\n\n")
    if "error" in (last := events[-1]):
        return "error", json.loads(last.removeprefix("data: "))["error"]["message"]
    assert last == "data: [DONE]", "a stream is cut"
    texts: dict[int, str] = {}
    for event in events[:-1]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            reason = choice["finish_reason"] or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"] + reason
    return texts


async def ask_all(engine: AsyncEngine, numbers: Sequence[int]) -> dict[int, Any]:
    """What each is answered, by number, until the engine's end: Serve would send the rest to another."""
    coordinator = Coordinator(settings(Path("unused")), load=lambda _: engine)
    transport = httpx.ASGITransport(create_app(coordinator, "tiny", 1 << 20))
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=PATIENCE_S) as client:
        answers: dict[int, Any] = {}

        async def ask(number: int) -> None:
            async with gate:
                with contextlib.suppress(EngineDeadError):
                    engine.check_health()
                    answers[number] = said(await client.post("/v1/completions", json=body(number)))

        await asyncio.gather(*map(ask, numbers))
    return answers


@pytest.mark.slow
def test_kills_at_random_under_load(tiny_folder: Path) -> None:
    numbers = range(REQUESTS)
    undisturbed = AsyncEngine(group(tiny_folder, *STAGES).engine)  # of one process the log-probabilities are rounded elsewhere
    expected = asyncio.run(ask_all(undisturbed, numbers))
    undisturbed.close()
    dice, kills, rebuilds = random.Random(1), 0, 0
    over = threading.Event()

    def kill(llm: LLM) -> None:
        """Mostly once the group has done something, now and then while it is still starting: three such losses in a row are the end."""
        nonlocal kills
        while kills < KILLS and not over.wait(dice.uniform(0.05, 1.5)):
            if llm.engine._losses and dice.random() < 0.98:  # drawn ten times and more while it starts
                continue
            try:
                pid = ray.get(dice.choice(executor_of(llm)._members).alive.remote(), timeout=5)
            except (ray.exceptions.RayError, IndexError):  # it is being started anew
                continue
            os.kill(pid, signal.SIGKILL)
            kills += 1

    answers: list[tuple[int, Any]] = []
    while kills < KILLS:  # the same requests again; after an end in a new engine, which Serve would start
        llm = group(tiny_folder, *STAGES)
        engine = AsyncEngine(llm.engine)
        over.clear()
        killer = threading.Thread(target=kill, args=(llm,), daemon=True)
        killer.start()
        with contextlib.suppress(EngineDeadError):
            while killer.is_alive():
                engine.check_health()
                answered = {number for number, _ in answers}
                answers += asyncio.run(ask_all(engine, [n for n in numbers if n not in answered] or numbers)).items()
        over.set()
        killer.join()
        rebuilds += llm.engine.rebuilds
        with contextlib.suppress(EngineDeadError):
            engine.check_health()
            assert llm.engine.pool.used == 0
            llm.engine.scheduler.check_integrity()
        engine.close()
    errors = [number for number, answer in answers if isinstance(answer, tuple)]
    wrong = [number for number, answer in answers if answer != expected[number] and not isinstance(answer, tuple)]
    print(f"{len(answers)} answers, {kills} kills, {rebuilds} rebuilds, {len(errors)} errors, {len(wrong)} wrong")
    assert not wrong
    assert {number for number, _ in answers} == set(numbers)
    assert len(errors) < len(answers) / 4
    assert not leftovers()
