"""The deployment that holds the engine: turns jobs into sequences of token ids and sends back what each step adds."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hispec_ray.config import Settings
from hispec_ray.engine.prompts import PromptEncoder
from hispec_ray.engine.tools import ToolFormat, ToolUse, format_of, grammar_for
from hispec_ray.request import EngineDeadError, FinishReason, GenerationRequest, QueueFullError, RequestError, TokenDelta, choices_of
from hispec_ray.serving.answers import NOT_READY, SERVER_FAILURE, TOO_COMPLEX, Delta, Failure, Item, Started
from hispec_ray.serving.choices import ChoiceWriter, Speller
from hispec_ray.serving.jobs import Job, TokenizeJob
from hispec_ray.serving.rhythm import Rhythm

logger = logging.getLogger("ray.serve")


class StreamingEngine(Protocol):
    """What is asked of an engine; `engine.AsyncEngine` is one."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def max_model_len(self) -> int: ...

    def byte_tokenizer(self) -> Any: ...

    def check_grammar(self, grammar: str) -> None: ...

    def generate(self, requests: Sequence[GenerationRequest], pause: Callable[[], float]) -> AsyncIterator[list[TokenDelta]]: ...

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
        self._method = settings.speculation.method
        self._rhythm = Rhythm(settings.server.stream_interval_ms / 1000, settings.server.stream_events_per_s)
        self._most = settings.scheduler.max_queued
        self._speller: Speller | None = None
        # A long prompt takes a while to encode, a grammar to compile, and the event loop must not wait for it.
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
            prepared = await asyncio.get_running_loop().run_in_executor(self._tokenizing, self.prepare, job)
            started = False
            pause = self._rhythm.pause if job.stream else lambda: math.inf
            steps = self.engine.generate(prepared.requests, pause)
            with self._rhythm.stream() if job.stream else nullcontext():
                async with aclosing(steps):  # type: ignore[type-var]
                    async for deltas in steps:
                        if any(delta.finish_reason is FinishReason.ERROR for delta in deltas):
                            yield TOO_COMPLEX
                            return
                        if not started:
                            started = True
                            yield Started([len(prompt) for prompt in prepared.prompts])
                        for delta in deltas:
                            prepared.writers[delta.request_id].add(delta)
                        if taken := prepared.take(deltas):
                            yield taken
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

    def prepare(self, job: Job) -> _Prepared:
        """Encode a job's prompts and compile its grammar. Raises RequestError where one cannot be."""
        if job.method not in (None, "plain", self._method):
            raise RequestError(
                f"hispec.method is {job.method!r}; this server has {self._method!r}, and 'plain' for a request", "hispec.method"
            )
        calls: tuple[ToolFormat, ToolUse] | None = None
        params = job.params
        if job.tools:
            calls = (format_of(self.engine.tokenizer.chat_template), job.tools)
            params = replace(params, grammar=grammar_for(job.tools, calls[0], self._special))
        prompts = self.tokenize(job)
        if params.grammar is not None:
            self.engine.check_grammar(params.grammar)
        speller = self._spelling() if params.logprobs is not None else None
        requests: list[GenerationRequest] = []
        writers: dict[str, ChoiceWriter] = {}
        # Prompts of one job share their seeds, as if each had been sent alone.
        for number, (place, choice) in enumerate(itertools.product(range(len(prompts)), choices_of(params))):
            request = GenerationRequest(f"{job.id}-{number}", tuple(prompts[place]), choice)
            requests.append(request)
            echoed = request.prompt_ids if job.echo and speller else ()
            text = self._text(job.prompts[place]) if job.echo else ""
            writers[request.id] = ChoiceWriter(number, echoed, text, speller, calls, job.trace)
        return _Prepared(prompts, requests, writers)

    def tokenize(self, job: Job) -> list[list[int]]:
        """Return the token ids of each prompt; a chat is one. Raises RequestError, see `PromptEncoder`."""
        if job.messages:
            return [self._encoder.chat(job.messages, [tool.given for tool in job.tools.tools] if job.tools else ())]
        return [self._encoder.text(prompt) if isinstance(prompt, str) else list(prompt) for prompt in job.prompts]

    def _text(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self._encoder.decode(prompt)

    def _special(self, text: str) -> bool:
        tokenizer = self.engine.tokenizer
        id = tokenizer.convert_tokens_to_ids(text)
        # A text that is no token may have the unknown token's id, which is a special one.
        return id is not None and tokenizer.convert_ids_to_tokens([id]) == [text] and self._spelling().special(id)

    def _spelling(self) -> Speller:
        if self._speller is None:
            self._speller = Speller(self.engine.byte_tokenizer())
        return self._speller

    async def spell(self, asked: TokenizeJob) -> dict[str, Any] | Failure:
        """Answer /tokenize: the ids of a text or a conversation."""
        return await self._off_loop(self._spell, asked)

    async def read(self, ids: Sequence[int]) -> dict[str, Any] | Failure:
        """Answer /detokenize: the text of ids, special tokens included."""
        return await self._off_loop(self._read, ids)

    async def _off_loop(self, work: Callable[[Any], dict[str, Any]], asked: Any) -> dict[str, Any] | Failure:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, asked)
        except RequestError as error:
            return Failure(400, error.message, param=error.field, code=error.code)
        except Exception:
            logger.exception("a request for tokens failed")
            return SERVER_FAILURE

    def _spell(self, asked: TokenizeJob) -> dict[str, Any]:
        if asked.messages is None:
            ids = self._encoder.text(asked.prompt or "", special=asked.add_special_tokens)
        else:
            ids = self._encoder.chat(asked.messages, generation_prompt=asked.add_generation_prompt)
        strings = {"token_strs": self.engine.tokenizer.convert_ids_to_tokens(ids)} if asked.return_token_strs else {}
        return {"count": len(ids), "max_model_len": self.engine.max_model_len, "tokens": ids, **strings}

    def _read(self, ids: Sequence[int]) -> dict[str, Any]:
        for id in ids:
            if not 0 <= id < self._encoder.ids:
                raise RequestError(f"tokens has id {id}; ids must be from 0 to {self._encoder.ids - 1}", "tokens")
        return {"prompt": self._encoder.decode(ids, special=True)}

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


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A job for the engine: its prompts, a request for each choice of each, in order, and who writes what comes of them."""

    prompts: list[list[int]]
    requests: list[GenerationRequest]
    writers: dict[str, ChoiceWriter]

    def take(self, deltas: Sequence[TokenDelta]) -> list[Delta]:
        """Return what has gathered in the choices that the deltas are of."""
        taken = (self.writers[id].take() for id in dict.fromkeys(delta.request_id for delta in deltas))
        return [delta for delta in taken if delta is not None]
