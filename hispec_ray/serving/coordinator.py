"""The deployment that holds the engine: turns jobs into sequences of token ids and sends back what each step adds."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hispec_ray.config import Settings
from hispec_ray.engine.prompts import PromptEncoder
from hispec_ray.engine.tools import TAGS, ToolFormat, ToolUse, format_of, grammar_for
from hispec_ray.request import EngineDeadError, FinishReason, GenerationRequest, QueueFullError, RequestError, TokenDelta, choices_of
from hispec_ray.serving.choices import ChoiceWriter, Speller
from hispec_ray.serving.failures import NOT_READY, SERVER_FAILURE, TOO_COMPLEX
from hispec_ray.serving.rhythm import Rhythm
from hispec_ray.serving.wire import Delta, Failure, Item, Job, Started, TokenizeJob

logger = logging.getLogger("ray.serve")
_NAMEABLE = re.compile(r"<[\w|/.-]+>")  # tokens that a grammar can name


class StreamingEngine(Protocol):
    """What is asked of an engine; `engine.AsyncEngine` is one. `generate` is called on the event loop, the rest on any thread."""

    @property
    def tokenizer(self) -> Any:
        """The model's, of transformers."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""

    def byte_tokenizer(self) -> Any:
        """Return llguidance's tokenizer. Takes a moment the first time."""

    def silent(self, token_id: int) -> bool:
        """Whether a token never has a text in an answer."""

    def written(self, request: GenerationRequest) -> TokenDelta:
        """Return what was said of the tokens that are written of an answer when they came."""

    def check_grammar(self, grammar: str) -> None:
        """Raise RequestError where a grammar cannot be compiled. Takes a while the first time."""

    def generate(self, requests: Sequence[GenerationRequest], pause: Callable[[], float], whole: bool) -> AsyncIterator[list[TokenDelta]]:
        """Run requests together and yield what steps add to them, until each has its finish_reason.

        pause: asked after each yield for the seconds until the next. whole: nothing comes before an end.
        Raises RequestError or QueueFullError before the first yield, and EngineDeadError at any time. Leaving the iterator early frees what
        the requests hold within a step.
        """

    def stats(self) -> dict[str, float]:
        """Return gauges and counters, `running`, `waiting` and `kv_usage` among them. Does not wait for a step."""

    def check_health(self) -> None:
        """Raise EngineDeadError where the engine has ended."""

    def close(self) -> None:
        """End the engine after the step that runs; iterators that are still waited for raise EngineDeadError. Waits for that step."""


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

        Without streaming nothing is sent until a choice has ended.
        Choices are numbered prompt by prompt. Leaving the iterator early frees what the job holds within a step.
        """
        try:
            self._check_size(job)
            self.engine.check_health()
            prepared = await asyncio.get_running_loop().run_in_executor(self._tokenizing, self.prepare, job)
            steps = self.engine.generate(prepared.requests, self._rhythm.pause, not job.stream)
            started = False
            with ExitStack() as running:
                async with aclosing(steps):  # type: ignore[type-var]
                    async for deltas in steps:
                        if any(delta.finish_reason is FinishReason.ERROR for delta in deltas):
                            yield TOO_COMPLEX
                            return
                        if not started:
                            started = True
                            if job.stream:  # from here on it is one of those that share the events of a second
                                running.enter_context(self._rhythm.stream())
                            yield Started([len(prompt) for prompt in prepared.prompts])
                        for delta in deltas:
                            prepared.writers[delta.request_id].add(delta)
                        if taken := prepared.take(deltas):
                            yield taken
        except RequestError as error:
            yield Failure.of(error)
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
            params = replace(params, grammar=grammar_for(job.tools, calls[0], self._special, self._spoken()))
        prompts = self.tokenize(job)
        echoes = [self._text(prompt) for prompt in job.prompts] if job.echo else [""] * len(prompts)
        if params.grammar is not None:
            self.engine.check_grammar(params.grammar)
        speller = self._spelling() if params.logprobs is not None else None
        requests: list[GenerationRequest] = []
        writers: dict[str, ChoiceWriter] = {}
        # Prompts of one job share their seeds, as if each had been sent alone.
        for number, (place, choice) in enumerate(itertools.product(range(len(prompts)), choices_of(params))):
            if number in job.ended:
                continue
            request = GenerationRequest(f"{job.id}-{number}", prompts[place], choice, job.written.get(number, ()))
            requests.append(request)
            echoed = prompts[place] if job.echo and speller else ()
            writer = writers[request.id] = ChoiceWriter(number, echoed, echoes[place], speller, calls, job.trace, job.resumable)
            if request.written:
                writer.add(self.engine.written(request))
                writer.take()  # another coordinator has sent it
        return _Prepared(prompts, requests, writers)

    def tokenize(self, job: Job) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt; a chat is one. Raises RequestError, see `PromptEncoder`."""
        if job.messages:
            return [tuple(self._encoder.chat(job.messages, [tool.given for tool in job.tools.tools] if job.tools else ()))]
        encoder = self._encoder
        return [tuple(encoder.text(prompt)) if isinstance(prompt, str) else encoder.ids(prompt) for prompt in job.prompts]

    def _text(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self._encoder.decode(prompt)

    def _special(self, text: str) -> bool:
        """Whether a text is a token that a grammar can only name, for no text spells it to llguidance."""
        tokenizer = self.engine.tokenizer
        id = tokenizer.convert_tokens_to_ids(text)
        if id is None or tokenizer.convert_ids_to_tokens([id]) != [text]:  # a text that is no token may have the unknown token's id
            return False
        return bool(self.engine.byte_tokenizer().is_special_token(id))

    def _spoken(self) -> list[str]:
        """Return the tokens that a grammar can only name and that have a text nevertheless; those of calls are not among them."""
        added = self.engine.tokenizer.added_tokens_decoder.items()
        texts = [str(token.content) for id, token in added if not self.engine.silent(id)]
        return [text for text in texts if _NAMEABLE.fullmatch(text) and text not in TAGS and self._special(text)]

    def _spelling(self) -> Speller:
        if self._speller is None:
            self._speller = Speller(self.engine.byte_tokenizer(), self.engine.silent)
        return self._speller

    async def tokenize_only(self, asked: TokenizeJob) -> dict[str, Any] | Failure:
        """Answer /tokenize: the ids of a text or a conversation."""
        return await self._off_loop(self._tokenize_only, asked)

    async def detokenize(self, ids: Sequence[int]) -> dict[str, Any] | Failure:
        """Answer /detokenize: the text of ids, special tokens included."""
        return await self._off_loop(self._detokenize, ids)

    async def _off_loop(self, work: Callable[[Any], dict[str, Any]], asked: Any) -> dict[str, Any] | Failure:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, asked)
        except RequestError as error:
            return Failure.of(error)
        except Exception:
            logger.exception("a request for tokens failed")
            return SERVER_FAILURE

    def _tokenize_only(self, asked: TokenizeJob) -> dict[str, Any]:
        if asked.messages is None:
            ids = self._encoder.text(asked.prompt or "", special=asked.add_special_tokens)
        else:
            ids = self._encoder.chat(asked.messages, generation_prompt=asked.add_generation_prompt)
        strings = {"token_strs": self.engine.tokenizer.convert_ids_to_tokens(ids)} if asked.return_token_strs else {}
        return {"count": len(ids), "max_model_len": self.engine.max_model_len, "tokens": ids, **strings}

    def _detokenize(self, ids: Sequence[int]) -> dict[str, Any]:
        for id in self._encoder.ids(ids, "tokens"):
            if not 0 <= id < self._encoder.vocabulary:
                raise RequestError(f"tokens has id {id}; ids must be from 0 to {self._encoder.vocabulary - 1}", "tokens")
        return {"prompt": self._encoder.decode(ids)}

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

    prompts: list[tuple[int, ...]]
    requests: list[GenerationRequest]
    writers: dict[str, ChoiceWriter]

    def take(self, deltas: Sequence[TokenDelta]) -> list[Delta]:
        """Return what has gathered in the choices that the deltas are of."""
        taken = (self.writers[id].take() for id in dict.fromkeys(delta.request_id for delta in deltas))
        return [delta for delta in taken if delta is not None]
