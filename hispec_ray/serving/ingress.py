"""The HTTP side: OpenAI's routes over a coordinator. Knows no engine, no tokenizer and no model but its name."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Protocol

from fastapi import FastAPI, Request
from ray import serve
from ray.exceptions import NodeDiedError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hispec_ray.request import MAX_SEED
from hispec_ray.serving.answers import error, usage
from hispec_ray.serving.failures import NO_KEY, NOBODY_ANSWERS, NOT_READY, SERVER_FAILURE, RequestFailed
from hispec_ray.serving.keys import Keys
from hispec_ray.serving.protocol import Checked, read_chat, read_completion, read_detokenize, read_tokenize, unknown_model
from hispec_ray.serving.wire import Delta, Failure, Item, Job, Started, TokenizeJob, joined

logger = logging.getLogger("ray.serve")

WAITS_S = (0.2, 1.0, 3.0)
"""Before a job is sent to another coordinator, after each death: Serve takes a moment to notice one."""
HEALTH_TIMEOUT_S = 5.0
"""How long a coordinator may take to say that it is well."""
REPLICA_GONE = (RayActorError, NodeDiedError, ReplicaUnavailableError, DeploymentUnavailableError, BackPressureError)
"""What Ray raises where a replica has died, is being replaced or cannot be reached: the same request may be answered later."""


class JobRunner(Protocol):
    """A coordinator as the ingress sees it. All is called on the event loop.

    What is wrong with a request, or with the engine, comes as a Failure. What is wrong with the coordinator itself may be raised.
    """

    def generate(self, job: Job) -> AsyncGenerator[Item]:
        """Send Started, then deltas until every choice has ended; at any point a Failure, as the last. Leaving early cancels the job."""

    async def tokenize_only(self, asked: TokenizeJob) -> dict[str, Any] | Failure:
        """Return the body that answers /tokenize."""

    async def detokenize(self, ids: Sequence[int]) -> dict[str, Any] | Failure:
        """Return the body that answers /detokenize."""

    async def health(self) -> dict[str, float]:
        """Return the engine's gauges. Raises where no engine is well."""


class RemoteCoordinator:
    """The coordinator's replicas behind their Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._unary = handle
        self._stream = handle.options(stream=True)

    async def generate(self, job: Job) -> AsyncGenerator[Item]:
        """Leaving the iterator early cancels the job.

        Where the replica dies, another goes on behind the tokens that have come: with the same seed it goes on as this one would have.
        After more deaths than there are waits (it may be the job that kills) the last item is a Failure that says to come back.
        """
        seed = secrets.randbelow(MAX_SEED) if job.params.seed is None else job.params.seed
        job = replace(job, params=replace(job.params, seed=seed), resumable=job.stream)
        started, deaths = False, 0
        written: dict[int, tuple[int, ...]] = {}
        ended: set[int] = set()
        while True:
            if started:
                job = replace(job, written=written, ended=frozenset(ended))
            # an id of its own each time: the replica may be there still, and busy with what it was asked first
            items = self._stream.generate.remote(replace(job, id=f"{job.id}.{deaths}") if deaths else job)
            handing_on = False
            try:
                async for item in items:
                    if isinstance(item, list):
                        for delta in item:
                            written[delta.number] = written.get(delta.number, ()) + delta.ids
                            if delta.reason is not None:
                                ended.add(delta.number)
                    elif isinstance(item, Started):
                        if started:
                            continue
                        started = True
                    handing_on = True  # the client may leave here
                    yield item
                    handing_on = False
                return
            except REPLICA_GONE as problem:
                logger.warning("job %s lost its coordinator: %r", job.id, problem)
                items.cancel()
                if isinstance(problem, BackPressureError) or deaths == len(WAITS_S):
                    yield NOT_READY
                    return
            finally:
                if handing_on:
                    items.cancel()
            await asyncio.sleep(WAITS_S[deaths])
            deaths += 1

    async def tokenize_only(self, asked: TokenizeJob) -> dict[str, Any] | Failure:
        return await self._ask(self._unary.tokenize_only, asked)

    async def detokenize(self, ids: Sequence[int]) -> dict[str, Any] | Failure:
        return await self._ask(self._unary.detokenize, ids)

    async def _ask(self, method: DeploymentHandle, asked: Any) -> dict[str, Any] | Failure:
        try:
            answer: dict[str, Any] | Failure = await method.remote(asked)
        except REPLICA_GONE as problem:
            logger.warning("a request for tokens lost its coordinator: %r", problem)
            return NOT_READY
        return answer

    async def health(self) -> dict[str, float]:
        figures: dict[str, float] = await self._unary.health.remote()
        return figures


@serve.ingress()
class Ingress:
    """The deployment: builds its ASGI app in the replica, over the coordinator's handle."""

    def __init__(self, coordinator: DeploymentHandle, model: str, max_body_bytes: int, keys: Keys | None) -> None:
        self._app = create_app(RemoteCoordinator(coordinator), model, max_body_bytes, keys)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


def create_app(coordinator: JobRunner, model: str, max_body_bytes: int, keys: Keys | None = None) -> FastAPI:
    """Return the ASGI app.

    model: the id that clients use; max_body_bytes: larger bodies answer 413; keys: those with which one may ask, None for everybody.
    """
    app = FastAPI(title="hispec_ray", version=version("hispec-ray"), openapi_url=None, redirect_slashes=False)
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "hispec_ray"}

    async def answer(request: Request, read: Callable[[bytes, str], Checked]) -> Response:
        return await respond(coordinator, read(await _body(request, max_body_bytes), model))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await answer(request, read_completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(request, read_chat)

    @app.get("/v1/models")
    async def models() -> Response:
        """List the models: the one that is served."""
        return _json(200, {"object": "list", "data": [card]})

    @app.get("/v1/models/{id:path}")
    async def one_model(id: str) -> Response:
        """Describe a model."""
        if id != model:
            raise RequestFailed(unknown_model(id, model))
        return _json(200, card)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Tell the token ids of a text or a conversation."""
        return _answered(await coordinator.tokenize_only(read_tokenize(await _body(request, max_body_bytes), model)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Tell the text of token ids."""
        return _answered(await coordinator.detokenize(read_detokenize(await _body(request, max_body_bytes), model)))

    @app.get("/version")
    async def tell_version() -> Response:
        """Tell this server's version."""
        return _json(200, {"version": app.version})

    @app.get("/health")
    async def health() -> Response:
        """200 where a coordinator answers, with its figures."""
        try:
            figures = await asyncio.wait_for(coordinator.health(), HEALTH_TIMEOUT_S)
        except Exception as problem:
            logger.warning("no coordinator is well: %r", problem)
            raise RequestFailed(NOBODY_ANSWERS) from None
        return _json(200, {"status": "ok", **{name: figures[name] for name in ("running", "waiting", "kv_usage")}})

    @functools.cache
    def described() -> dict[str, Any]:
        from hispec_ray.serving import document  # noqa: PLC0415  (openai: not wanted before)

        return document.write(app, model, keys is not None)

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> Response:  # not async: the first time takes a second or two, for which there are threads
        """Tell what each route takes and answers."""
        return _json(200, described())

    if keys is not None:
        app.add_middleware(KeyCheck, keys=keys)
    app.add_exception_handler(RequestFailed, _on_failure)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_exception)
    return app


async def respond(coordinator: JobRunner, checked: Checked) -> Response:
    """Run a job and answer it, whole or as a stream; the first item decides the status. Raises RequestFailed."""
    items = coordinator.generate(checked.job)
    try:
        started = await anext(items)
        if isinstance(started, Failure):
            raise checked.failed(started)
        if not isinstance(started, Started):
            raise TypeError(f"a coordinator began with {type(started).__name__}")
    except BaseException:
        await items.aclose()
        raise
    if checked.job.stream:
        return EventStream(_events(checked, started, items), items)
    async with aclosing(items):
        return await _whole(checked, started, items)


async def _whole(checked: Checked, started: Started, items: AsyncIterator[Item]) -> Response:
    deltas: list[list[Delta]] = [[] for _ in range(len(started.prompt_tokens) * checked.job.params.n)]
    async for item in items:
        if not isinstance(item, list):
            raise checked.failed(item if isinstance(item, Failure) else SERVER_FAILURE)
        for delta in item:
            deltas[delta.number].append(delta)
    choices = [joined(parts) for parts in deltas]
    return _json(200, checked.answer.whole(choices, usage(sum(started.prompt_tokens), sum(choice.tokens for choice in choices))))


async def _events(checked: Checked, started: Started, items: AsyncGenerator[Item]) -> AsyncGenerator[bytes]:
    """Yield server-sent events, all that an item brought at once. The status is out: what fails from here on is an event."""
    answer = checked.answer
    completion_tokens = 0
    choices = range(len(started.prompt_tokens) * checked.job.params.n)
    opening = [answer.chunk(piece) for index in choices for piece in answer.opening(index)]
    try:
        async with aclosing(items):
            async for item in items:
                if not isinstance(item, list):
                    raise checked.failed(item if isinstance(item, Failure) else SERVER_FAILURE)
                chunks, opening = opening, []
                for delta in item:
                    completion_tokens += delta.tokens
                    chunks += answer.chunks(delta)
                counts = usage(sum(started.prompt_tokens), completion_tokens)
                so_far = {"usage": counts if checked.continuous_usage else None} if checked.include_usage else {}
                if chunks:
                    yield b"".join([_event(chunk | so_far) for chunk in chunks])
        counts = usage(sum(started.prompt_tokens), completion_tokens)
        yield (_event(answer.usage_chunk(counts)) if checked.include_usage else b"") + b"data: [DONE]\n\n"
    except RequestFailed as failed:
        yield _event(error(failed.failure))
    except Exception:
        logger.exception("stream %s broke off", answer.id)
        yield _event(error(SERVER_FAILURE))


class EventStream(Response):
    """Server-sent events as they come. Ray Serve cancels the call when the client goes away, which closes the events' source."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], source: AsyncGenerator[Any]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._source = source  # what the events are made of: to be closed even where no event was asked for

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class KeyCheck:
    """Lets through only what has a key, and whatever asks for /health, under any route prefix."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _route(scope) == "/health" or self._keys.has(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
        else:
            await _failed(NO_KEY)(scope, receive, send)


def _route(scope: Scope) -> str:
    """Return the path within the application: Ray Serve leaves the route prefix in `path`, and names it in `root_path`."""
    path: str = scope["path"]
    prefix = scope.get("root_path", "").rstrip("/")
    return path[len(prefix) :] if path.startswith(f"{prefix}/") else path


async def _body(request: Request, most: int) -> bytes:
    """Read the body. Raises RequestFailed as soon as it is larger than `most` bytes, or the client has gone before its end."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise RequestFailed(Failure(413, f"the body is larger than {most} bytes, the most that this server reads"))
            parts.append(part)
    except ClientDisconnect:
        raise RequestFailed(Failure(400, "the client went away before the end of the body")) from None
    return b"".join(parts)


def _dumps(content: Any) -> bytes:
    # Half a surrogate pair, which only a client can have brought, goes back as the escape that it came as.
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _dumps(content) + b"\n\n"


def _json(status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(_dumps(content), status, headers, "application/json")


def _answered(answer: dict[str, Any] | Failure) -> Response:
    return _failed(answer) if isinstance(answer, Failure) else _json(200, answer)


def _failed(failure: Failure) -> Response:
    return _json(failure.status, error(failure), dict(failure.headers))


async def _on_failure(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestFailed)
    return _failed(problem.failure)


async def _on_http_exception(request: Request, problem: Exception) -> Response:
    """The routes' own answers: 404 and 405."""
    assert isinstance(problem, HTTPException)
    headers = dict(problem.headers or {})
    # The path as it came: request.url wants the query to be text.
    return _failed(Failure(problem.status_code, f"{problem.detail}: {request.method} {request.scope['path']}", headers=headers))


async def _on_exception(_: Request, problem: Exception) -> Response:
    return _failed(SERVER_FAILURE)  # Starlette raises it again for the log
