"""A live server for tests: what to ask it, and how to wait for it. The fixture `server` is in conftest.py."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

MODEL = "smollm2-135m-instruct"
COUNTING = "1, 2, 3, 4, 5,"
QUESTION = [{"role": "user", "content": "What is 2+2? Answer with one number."}]


def wait_for(reached: Any, most_s: float, why: Any) -> None:
    end = time.monotonic() + most_s
    while not reached():
        if time.monotonic() > end:
            raise AssertionError(f"not reached in {most_s} seconds: {why()}")
        time.sleep(0.05)


def ask(url: str, path: str = "/v1/completions", **fields: Any) -> Any:
    response = httpx.post(f"{url}{path}", json={"model": MODEL, "temperature": 0} | fields, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def stream(url: str, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    """The stream's events, which must end with one [DONE]."""
    body = {"model": MODEL, "temperature": 0, "stream": True} | fields
    response = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return list(events_in(response.text.split("\n\n")))


def events_in(lines: Iterable[str]) -> Iterator[Any]:
    """The events of what a stream says line by line, as they come; one [DONE] must end them."""
    data = (line.removeprefix("data: ") for line in lines if line)
    for event in data:
        if event == "[DONE]":
            assert next(data, None) is None
            return
        yield json.loads(event)
    raise AssertionError("the stream is cut")


def pieces(events: list[Any]) -> list[str]:
    return [c["text"] if "text" in c else c["delta"].get("content", "") for event in events for c in event["choices"]]


def reasons(events: list[Any]) -> list[str]:
    return [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
