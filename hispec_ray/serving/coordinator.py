"""The deployment that holds the engine: turns jobs into sequences of token ids and sends back what each step adds."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Protocol

from hispec_ray.config import Settings
from hispec_ray.engine.prompts import PromptEncoder
from hispec_ray.request import EngineDeadError, GenerationRequest, QueueFullError, RequestError, TokenDelta, choices_of
from hispec_ray.serving.answers import NOT_READY, SERVER_FAILURE, Delta, Failure, Item, Started
from hispec_ray.serving.protocol import Job

logger = logging.getLogger("ray.serve")


class StreamingEngine(Protocol):
    """What is asked of an engine; `engine.AsyncEngine` is one."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def max_model_len(self) -> int: ...

    def generate(self, requests: Sequence[GenerationRequest], interval: float) -> AsyncIterator[list[TokenDelta]]: ...

    def stats(self) -> dict[str, float]: ...

    def check_health(self) -> None: ...

    def close(self) -> None: ...


def load_engine(settings: Settings) -> StreamingEngine:
    """Raises ValueError where the settings do not fit the model or the machine."""
    from hispec_ray.engine.async_engine import AsyncEngine  # noqa: PLC0415  (torch: not wanted in the ingress and the builder)

    return AsyncEngine.from_settings(settings)


class Coordinator:
    """Answers jobs from one engine. What goes wrong with a job is sent as a Failure, never raised across processes."""

    def __init__(self, settings: Settings, load: Callable[[Settings], StreamingEngine] = load_engine) -> None:
        self._engine: StreamingEngine | None = None
        engine = self._engine = load(settings)
        self._encoder = PromptEncoder(engine.tokenizer, engine.max_model_len)
        self._interval = settings.server.stream_interval_ms / 1000
        self._most = settings.scheduler.max_queued
        # A long prompt takes a while to encode, and the event loop must not wait for it.
        self._tokenizing = ThreadPoolExecutor(1, "hispec-tokenizer")

    @property
    def engine(self) -> StreamingEngine:
        if self._engine is None:
            raise EngineDeadError("the engine has been closed")
        return self._engine

    async def generate(self, job: Job) -> AsyncGenerator[Item]:
        """Send Started once the first tokens are there, then deltas until every choice has ended; at any point a Failure, as the last.

        Where the job is no stream, the first tokens are sent with the first end.
        Choices are numbered prompt by prompt. Leaving the iterator early frees what the job holds within a step.
        """
        try:
            self._check_size(job)
            self.engine.check_health()
            prompts = await asyncio.get_running_loop().run_in_executor(self._tokenizing, self.tokenize, job)
            requests = _requests(job, prompts)
            index = {request.id: number for number, request in enumerate(requests)}
            started = False
            async with aclosing(self.engine.generate(requests, self._interval if job.stream else math.inf)) as steps:  # type: ignore[type-var]
                async for deltas in steps:
                    if not started:
                        started = True
                        yield Started([len(prompt) for prompt in prompts])
                    yield _merged(index, deltas)
        except RequestError as error:
            yield Failure(400, error.message, param=error.field, code=error.code)
        except QueueFullError as error:
            yield Failure(429, f"The server is busy: {error}", code="rate_limit_exceeded", headers={"Retry-After": "1"})
        except EngineDeadError as error:
            logger.error("job %s ended: %s", job.id, error)
            yield NOT_READY
        except Exception:
            logger.exception("job %s failed", job.id)
            yield SERVER_FAILURE

    def _check_size(self, job: Job) -> None:
        """Raise RequestError for a job that not even an empty queue could take: coming back later would not help."""
        prompts = 1 if job.messages else len(job.prompts)
        sequences = prompts * job.params.n
        if sequences > self._most:
            raise RequestError(
                f"{prompts} prompt{'s' if prompts > 1 else ''} with n {job.params.n} make {sequences} sequences; "
                f"at most {self._most} may wait at once",
                "prompt" if prompts > self._most else "n",
            )

    def tokenize(self, job: Job) -> list[list[int]]:
        """Return the token ids of each prompt; a chat is one. Raises RequestError, see `PromptEncoder`."""
        if job.messages:
            return [self._encoder.chat(job.messages)]
        return [self._encoder.text(prompt) if isinstance(prompt, str) else list(prompt) for prompt in job.prompts]

    async def health(self) -> dict[str, float]:
        """Return the engine's figures. Raises where it is dead."""
        self.engine.check_health()
        return self.engine.stats()

    def check_health(self) -> None:
        """Ray Serve calls this now and then, and replaces a coordinator that raises."""
        self.engine.check_health()

    def close(self) -> None:
        """Stop the engine; what runs ends with a Failure."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._tokenizing.shutdown(wait=False)
            engine.close()

    def __del__(self) -> None:
        self.close()  # Ray Serve's way to end a deployment


def _requests(job: Job, prompts: Sequence[Sequence[int]]) -> list[GenerationRequest]:
    """One sequence for each choice of each prompt. Prompts of one job share their seeds, as if each had been sent alone."""
    pairs = itertools.product(map(tuple, prompts), choices_of(job.params))
    return [GenerationRequest(f"{job.id}-{number}", prompt, params) for number, (prompt, params) in enumerate(pairs)]


def _merged(index: Mapping[str, int], deltas: Sequence[TokenDelta]) -> list[Delta]:
    """One delta for each choice that has any."""
    merged: dict[int, Delta] = {}
    for delta in deltas:
        choice = index[delta.request_id]
        _, text, tokens, _ = merged.get(choice, (choice, "", 0, None))
        reason = None if delta.finish_reason is None else delta.finish_reason.value
        merged[choice] = (choice, text + delta.text, tokens + len(delta.token_ids), reason)
    return list(merged.values())
