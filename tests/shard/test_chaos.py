"""Shards are killed at random under load: every answer is the undisturbed one or an error, none is cut, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from shard.test_ray_group import executor_of, group, leftovers, settings

from hispec_ray import LLM
from hispec_ray.engine.async_engine import AsyncEngine
from hispec_ray.serving.coordinator import Coordinator
from hispec_ray.serving.ingress import create_app

REQUESTS = 200
KILLS = 30
AT_ONCE = 12
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
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def ask_all(engine: AsyncEngine, numbers: range) -> list[Any]:
    coordinator = Coordinator(settings(Path("unused")), load=lambda _: engine)
    transport = httpx.ASGITransport(create_app(coordinator, "tiny", 1 << 20))
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=PATIENCE_S) as client:

        async def ask(number: int) -> Any:
            async with gate:
                return said(await client.post("/v1/completions", json=body(number)))

        return await asyncio.gather(*map(ask, numbers))


@pytest.mark.slow
def test_kills_at_random_under_load(tiny_folder: Path) -> None:
    numbers = range(REQUESTS)
    undisturbed = AsyncEngine(LLM(settings(tiny_folder)).engine)
    expected = asyncio.run(ask_all(undisturbed, numbers))
    undisturbed.close()
    llm = group(tiny_folder, {"tp": 2, "layers": 4}, {"tp": 1, "layers": 4})
    executor, dice, kills = executor_of(llm), random.Random(1), 0
    engine = AsyncEngine(llm.engine)

    def kill() -> None:
        nonlocal kills
        while kills < KILLS:
            time.sleep(dice.uniform(0.05, 1.5))
            members = list(executor._members)
            try:
                pid = ray.get(dice.choice(members).alive.remote(), timeout=5)
            except (ray.exceptions.RayError, IndexError):  # it is being started anew
                continue
            os.kill(pid, signal.SIGKILL)
            kills += 1

    answers: list[Any] = []
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    while killer.is_alive() or not answers:  # the same requests again, until all kills are done
        answers += asyncio.run(ask_all(engine, numbers))
    wrong = [n for n, answer in enumerate(answers) if answer != expected[n % REQUESTS] and answer[0] != "error"]
    errors = sum(answer[0] == "error" for answer in answers if isinstance(answer, tuple))
    print(f"{len(answers)} answers, {kills} kills, {llm.engine.rebuilds} rebuilds, {errors} errors, {len(wrong)} wrong")
    assert not wrong
    assert kills == KILLS
    assert llm.engine.pool.used == 0
    llm.engine.scheduler.check_integrity()
    engine.close()
    assert not leftovers()
