"""The HTTP side over a coordinator in the same process: its routes, keys, coordinators that die, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from hispec_ray.config import Settings
from hispec_ray.request import GenerationRequest
from hispec_ray.serving import ingress
from hispec_ray.serving.coordinator import Coordinator
from hispec_ray.serving.ingress import RemoteCoordinator, create_app
from hispec_ray.serving.keys import Keys
from hispec_ray.serving.wire import Delta, Item, Job, Started
from serving.asgi import CHAT, COMPLETION, LIMIT, MODEL, app, assert_error, raw, send
from serving.fake_engine import CONTEXT, FakeEngine


class Broken:
    """A coordinator that raises, before or amid an answer."""

    def __init__(self, *before: Item, death: Exception | None = None) -> None:
        self.before = before
        self.death = death or ConnectionError("a secret of the cluster")

    async def generate(self, job: Job) -> AsyncGenerator[Item]:
        for item in self.before:
            yield item
        raise self.death

    async def tokenize_only(self, asked: Any) -> Any:
        raise self.death

    detokenize = tokenize_only

    async def health(self) -> dict[str, float]:
        raise ConnectionError("a secret of the cluster")


class Items:
    """What a call of a Serve handle gives: its items, and a way to cancel it."""

    def __init__(self, items: AsyncGenerator[Item], job: Job) -> None:
        self.items, self.job, self.cancelled = items, job, False

    def __aiter__(self) -> AsyncGenerator[Item]:
        return self.items

    def cancel(self) -> None:
        self.cancelled = True


class Replica(Broken):
    """Such a coordinator behind what looks like its Serve handle."""

    def options(self, stream: bool) -> Replica:
        return self

    @property
    def generate(self) -> Any:
        generate = super().generate
        return SimpleNamespace(remote=lambda job: Items(generate(job), job))

    @property
    def tokenize_only(self) -> Any:
        return SimpleNamespace(remote=super().tokenize_only)


DEATHS = pytest.mark.parametrize("death", [ActorDiedError(), ActorUnavailableError("a secret of the cluster", None)])


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "WAITS_S", (0.0,) * 3)


class Dying:
    """A Serve handle whose replicas are coordinators that die: each after so many items, the last one never."""

    def __init__(self, engines: Sequence[FakeEngine], items: Sequence[int], death: Exception) -> None:
        self.replicas = [Coordinator(Settings(), load=lambda settings, engine=engine: engine) for engine in engines]
        self.items = [*items, 10**6]
        self.death = death
        self.jobs: list[Job] = []
        self.calls: list[Items] = []

    def options(self, stream: bool) -> Dying:
        return self

    @property
    def generate(self) -> Any:
        return SimpleNamespace(remote=self._call)

    def _call(self, job: Job) -> Items:
        self.calls.append(Items(self._generate(job), job))
        return self.calls[-1]

    async def _generate(self, job: Job) -> AsyncGenerator[Item]:
        number = len(self.jobs)
        self.jobs.append(job)
        count = 0
        async with aclosing(self.replicas[number].generate(job)) as items:
            async for item in items:
                if count == self.items[number]:
                    raise self.death
                count += 1
                yield item


@DEATHS
@pytest.mark.parametrize("items", [[0], [1], [2], [4], [3, 2], [2, 0, 3]])
@pytest.mark.parametrize("body", [{"n": 2}, {"logprobs": 1, "echo": True, "stream_options": {"include_usage": True}}], ids=str)
def test_a_stream_goes_on_where_its_replica_died(death: Exception, items: list[int], body: dict[str, Any], no_waits: None) -> None:
    """The client sees one answer, once: whatever had come, and on how many replicas."""

    def script(request: GenerationRequest) -> list[str]:
        return ["He", "llo", ", ", "wor", "ld", "!"][: 4 + request.params.seed % 3]  # type: ignore[operator]

    def text_of(handle: Any) -> str:
        response = send("POST", "/v1/completions", COMPLETION | body | {"stream": True, "seed": 5}, over=create_app(handle, MODEL, LIMIT))
        return re.sub(r'"(id|created)":[^,]*', "", response.text)

    undisturbed = Coordinator(Settings(), load=lambda settings: FakeEngine(script))
    handle = Dying([FakeEngine(script) for _ in range(len(items) + 1)], items, death)
    assert text_of(RemoteCoordinator(handle)) == text_of(undisturbed)  # type: ignore[arg-type]
    assert len(handle.jobs) == len(items) + 1
    assert all(job.params.seed == 5 for job in handle.jobs)
    assert len({job.id for job in handle.jobs}) == len(handle.jobs), "one that only could not be reached may be busy with the first still"
    assert [call.cancelled for call in handle.calls] == [True] * len(items) + [False]


def test_a_job_without_a_seed_keeps_the_one_that_was_drawn(no_waits: None) -> None:
    handle = Dying([FakeEngine(), FakeEngine()], [2], ActorDiedError())
    over = create_app(RemoteCoordinator(handle), MODEL, LIMIT)  # type: ignore[arg-type]
    assert send("POST", "/v1/completions", COMPLETION | {"stream": True}, over=over).status_code == 200
    one, other = handle.jobs
    assert one.params.seed is not None
    assert one.params == other.params
    assert other.written[0]


@DEATHS
def test_a_replica_that_dies_again_and_again_asks_to_come_back(death: Exception, no_waits: None) -> None:
    def gone(*before: Item) -> Any:
        return create_app(RemoteCoordinator(Replica(*before, death=death)), MODEL, LIMIT)  # type: ignore[arg-type]

    for stream in (False, True):
        response = send("POST", "/v1/completions", COMPLETION | {"stream": stream}, over=gone())
        assert "secret" not in assert_error(response, 503)
        assert response.headers["retry-after"] == "10"
    begun = gone(Started([2]), [Delta(0, "Hello", 5)])
    assert_error(send("POST", "/v1/completions", COMPLETION, over=begun), 503)
    response = send("POST", "/v1/completions", COMPLETION | {"stream": True}, over=begun)
    first, *_, last = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n") if event]
    assert first["choices"][0]["text"] == "Hello"
    assert "not ready" in last["error"]["message"]


def test_a_coordinator_that_is_gone_is_a_server_error() -> None:
    broken = create_app(Broken(), MODEL, LIMIT)
    assert "secret" not in assert_error(send("POST", "/v1/completions", COMPLETION, over=broken), 500)
    assert "secret" not in assert_error(send("GET", "/health", over=broken), 503)


def test_tokens() -> None:
    body = send("POST", "/tokenize", {"model": MODEL, "prompt": "Hi", "return_token_strs": True}).json()
    assert body == {"count": 2, "max_model_len": CONTEXT, "tokens": [72, 105], "token_strs": ["H", "i"]}
    asked = {"model": MODEL, "messages": CHAT["messages"]}
    assert send("POST", "/tokenize", asked).json()["tokens"] == [72, 105]
    assert send("POST", "/detokenize", {"model": MODEL, "tokens": [72, 105]}).json() == {"prompt": "Hi"}
    assert "from 0 to 999" in assert_error(send("POST", "/detokenize", {"model": MODEL, "tokens": [1000]}), 400, "tokens")
    assert_error(send("POST", "/tokenize", {"model": "gpt-4", "prompt": "Hi"}), 404, "model", "model_not_found")
    broken = create_app(RemoteCoordinator(Replica(death=ActorDiedError())), MODEL, LIMIT)  # type: ignore[arg-type]
    assert_error(send("POST", "/tokenize", {"model": MODEL, "prompt": "Hi"}, over=broken), 503)


def test_version() -> None:
    assert send("GET", "/version").json() == {"version": version("hispec-ray")}


def test_keys_let_in_who_has_one() -> None:
    guarded = create_app(Coordinator(Settings(), load=lambda settings: FakeEngine()), MODEL, LIMIT, Keys(["one", "two"]))

    def status(path: str, header: str | None) -> httpx.Response:
        async def request() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://server") as client:
                return await client.get(path, headers={} if header is None else {"Authorization": header})

        return asyncio.run(request())

    for header in ("Bearer one", "bearer two", "Bearer  two "):
        assert status("/v1/models", header).status_code == 200
    for header in (None, "", "Bearer", "Bearer ", "Bearer three", "one", "Basic one", "Bearer one two", "Bearer onetwo"):
        for path in ("/v1/models", "/v1/nothing", "/version", "/openapi.json", "/health/", "//health"):
            response = status(path, header)
            assert_error(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
    assert status("/health", None).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [("/some/prefix/health", 200), ("/some/prefix/version", 401), ("/some/prefix/some/prefix/health", 401), ("/some/prefixes/health", 401)],
)
def test_health_needs_no_key_under_a_route_prefix(path: str, status: int) -> None:
    guarded = create_app(Coordinator(Settings(), load=lambda settings: FakeEngine()), MODEL, LIMIT, Keys(["one"]))
    assert asyncio.run(raw(guarded, path, root_path="/some/prefix"))[0]["status"] == status


def test_models() -> None:
    listed = send("GET", "/v1/models").json()
    assert [card["id"] for card in listed["data"]] == [MODEL]
    assert send("GET", f"/v1/models/{MODEL}").json() == listed["data"][0]
    assert_error(send("GET", "/v1/models/gpt-4"), 404, "model", "model_not_found")


def test_health() -> None:
    assert send("GET", "/health").json() == {"status": "ok", "running": 0, "waiting": 0, "kv_usage": 0.0}
    dead = FakeEngine()
    dead.close()
    response = send("GET", "/health", engine=dead)
    assert_error(response, 503)
    assert response.headers["retry-after"] == "10"


def test_a_client_that_goes_away_within_its_body_is_no_failure_of_the_server() -> None:
    engine = FakeEngine()
    messages = [{"type": "http.request", "body": b'{"model"', "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def collect(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(app(engine)(scope, receive, collect))
    assert sent[0]["status"] == 400
    assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", ["nothing", "something"])
def test_a_client_that_goes_away_frees_its_sequences(stream: bool, after: str) -> None:
    engine = FakeEngine()

    async def leave() -> None:
        engine.gate = asyncio.Event()
        body = json.dumps(COMPLETION | {"stream": stream, "n": 2}).encode()
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def collect(message: Any) -> None:
            sent.append(message)

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        call = asyncio.ensure_future(app(engine)(scope, receive, collect))
        while not (len(sent) > 1 if stream and after == "something" else engine.running):
            await asyncio.sleep(0)
        call.cancel()  # what Ray Serve does when the client has gone
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not engine.running
        assert len(engine.aborted) == 2

    asyncio.run(asyncio.wait_for(leave(), 10))
