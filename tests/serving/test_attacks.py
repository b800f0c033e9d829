"""Whoever means harm, or is only broken: bad requests are refused in OpenAI's words and disturb nobody, and who goes away holds nothing."""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from serving.bad_requests import Request, bad_requests
from serving.live import COUNTING, MODEL, ask, pieces, stream, wait_for

NOBODY = {"running": 0, "waiting": 0, "kv_usage": 0}
LONGEST_MESSAGE = 1000  # characters
ANSWER_S = 120.0
GONE_S = 2.0
"""After this long nothing is left of a client that went away, beyond the steps of the engine that it takes to see it."""
STEPS = 2
"""The one that runs and the one that was planned; both have as many sequences as may run."""
CLIENTS = 20
"""That go away together."""


@dataclass(frozen=True)
class Reply:
    status: int
    content_type: str
    body: bytes


def send(url: str, request: Request) -> Reply:
    """Raises OSError or HTTPException where the connection breaks before the whole reply is there."""
    with connected(url) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was read: the reply is there still
            connection.sendall(request.wire())
        response = HTTPResponse(connection, method=request.method)
        response.begin()
        return Reply(response.status, response.headers.get("content-type", ""), response.read())


def connected(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=ANSWER_S)


def load(url: str) -> dict[str, float]:
    figures = httpx.get(f"{url}/health", timeout=10).json()
    return {name: figures[name] for name in NOBODY}


def check(request: Request, reply: Reply) -> None:
    """The reply is a right answer, or a refusal in OpenAI's form."""
    if reply.status == 200:
        if reply.content_type.startswith("text/event-stream"):
            *events, done, rest = reply.body.decode().split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            assert all("error" not in json.loads(event.removeprefix("data: ")) for event in events)
        else:
            assert reply.content_type == "application/json"
            assert "error" not in json.loads(reply.body)
        return
    assert 400 <= reply.status < 500, reply
    if request.raw:
        return  # the proxy's own words
    assert reply.content_type == "application/json", reply
    if request.method == "HEAD":
        assert reply.body == b""
        return
    body = json.loads(reply.body)
    assert body.keys() == {"error"}, body
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str), error
    assert isinstance(error["type"], str), error
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code")), error
    assert 0 < len(error["message"]) < LONGEST_MESSAGE, error


def bystander(place: int) -> dict[str, Any]:
    """One of eight streams: every other one is greedy, the last four decode plainly."""
    prompts = [COUNTING, "Once upon a time", "The capital of France is", "def add(a, b):"]
    fields = {"prompt": prompts[place % 4], "temperature": 0.9 * (place % 2), "seed": place, "max_tokens": 24, "ignore_eos": True}
    return fields | ({"hispec": {"method": "plain"}} if place >= 4 else {})


@contextlib.contextmanager
def undisturbed_streams(url: str) -> Iterator[None]:
    """Meanwhile eight streams run, again and again; each text must be that of a quiet run."""
    streams = [bystander(place) for place in range(8)]
    over = threading.Event()

    def text(fields: dict[str, Any]) -> str:
        return "".join(pieces(stream(url, **fields)))

    def texts(fields: dict[str, Any]) -> list[str]:
        found = [text(fields)]
        while not over.is_set():
            found.append(text(fields))
        return found

    with ThreadPoolExecutor(len(streams)) as readers:
        quiet = list(readers.map(text, streams))
        assert len(set(quiet)) > 4
        running = [readers.submit(texts, fields) for fields in streams]
        try:
            wait_for(lambda: load(url)["running"] == len(streams), ANSWER_S, lambda: load(url))
            yield
        finally:
            over.set()
        for expected, found in zip(quiet, running, strict=True):
            assert set(found.result()) == {expected}


def attack(url: str, requests: int) -> Counter[int]:
    """Send bad requests, the same ones each time, and check each reply; return how many had which status."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=requests,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(bad_requests())
    def harm_nobody(request: Request) -> None:
        try:
            reply = send(url, request)
        except (OSError, HTTPException) as problem:
            raise AssertionError(f"the connection broke: {problem!r}") from problem
        statuses[reply.status] += 1
        check(request, reply)

    with undisturbed_streams(url):
        harm_nobody()
    wait_for(lambda: load(url) == NOBODY, GONE_S, lambda: load(url))
    return statuses


def check_mix(statuses: Counter[int]) -> None:
    """Most were refused, yet not all. How many of either are drawn changes with hypothesis and with this source."""
    assert statuses[400] > statuses.total() / 2
    assert statuses[200] > statuses.total() / 25


def test_bad_requests_harm_nobody(server: str) -> None:
    check_mix(attack(server, 60))


@pytest.mark.slow
def test_five_thousand_bad_requests_harm_nobody(server: str) -> None:
    began = time.monotonic()
    statuses = attack(server, 5000)
    print(f"\n{statuses.total()} requests in {time.monotonic() - began:.0f} s, by status: {dict(sorted(statuses.items()))}")
    check_mix(statuses)


@dataclass(frozen=True)
class Leaver:
    """A client that asks and goes away.

    sent: bytes that it sends, all of the request or its beginning. crowd: whether it stays until others wait for their turn.
    seconds, events: it leaves after so long, or so many pieces of its answer, whichever comes first. reset: whether without a word.
    """

    wire: bytes
    sent: int
    crowd: bool
    seconds: float
    events: int
    reset: bool


def leaver(dice: random.Random, crowd: bool) -> Leaver:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 1000, "ignore_eos": True, "n": dice.choice([2, 3]) if crowd else 1}
    fields |= {"stream": dice.random() < 0.5, "temperature": dice.choice([0.0, 0.8]), "seed": dice.randrange(99)}
    said = " ".join(str(dice.randrange(10**4)) for _ in range(1 if crowd else dice.choice([1, 40])))
    path = "/v1/completions" if dice.random() < 0.8 else "/v1/chat/completions"
    fields |= {"prompt": said} if path == "/v1/completions" else {"messages": [{"role": "user", "content": said}]}
    wire = Request(path, json.dumps(fields).encode()).wire()
    sent = len(wire) if crowd or dice.random() < 0.7 else dice.randrange(len(wire))
    seconds = dice.choice([0.0, 0.01, 0.1, 1.0]) * dice.random()
    return Leaver(wire, sent, crowd, seconds, dice.choice([1, 2, 5, 1000]), dice.random() < 0.3)


def leave(url: str, client: Leaver, crowded: threading.Event) -> None:
    with connected(url) as connection:
        connection.sendall(client.wire[: client.sent])
        if client.crowd:
            assert crowded.wait(ANSWER_S)
        end, events = time.monotonic() + client.seconds, 0
        while events < client.events and select.select([connection], [], [], max(0.0, end - time.monotonic()))[0]:
            piece = connection.recv(2**16)
            assert piece, "the server hung up"
            events += piece.count(b"data: ")
        if client.reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def let_leave(url: str, dice: random.Random) -> float:
    """Let twenty ask at once and go away, more than may run; return the seconds after which nothing was left of them."""
    step = full_step(url)
    crowded = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as doors:
        gone = [doors.submit(leave, url, leaver(dice, place >= 8), crowded) for place in range(CLIENTS)]
        try:
            wait_for(lambda: load(url)["waiting"] > 0, ANSWER_S, lambda: load(url))
        finally:
            crowded.set()
    left = time.monotonic()  # the doors are shut: every client has gone
    for client in gone:
        client.result()
    wait_for(lambda: load(url) == NOBODY, GONE_S + STEPS * step, lambda: (load(url), f"a step takes {step} s"))
    took = time.monotonic() - left
    assert ask(url, prompt=COUNTING, max_tokens=4)["choices"][0]["text"] == " 6, "
    return took


def full_step(url: str) -> float:
    """The seconds that the engine takes on this machine, now, for a step of as many sequences as may run."""
    tokens = 4
    began = time.monotonic()
    ask(url, prompt=COUNTING, max_tokens=tokens, n=16, temperature=1.0, seed=1, ignore_eos=True, hispec={"method": "plain"})
    return (time.monotonic() - began) / tokens


def test_who_goes_away_holds_nothing(server: str) -> None:
    let_leave(server, random.Random(1))


@pytest.mark.slow
def test_two_hundred_who_go_away_hold_nothing(server: str) -> None:
    dice = random.Random(2)
    took = [let_leave(server, dice) for _ in range(200 // CLIENTS)]
    print(f"\n{len(took)} times {CLIENTS} clients gone; nothing was left of them after {', '.join(f'{s:.2f}' for s in took)} s")
