"""The step loop: schedule, run, judge the new tokens, hand out text."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from hispec_ray.config import Settings
from hispec_ray.core.block_pool import BlockPool
from hispec_ray.core.plan import LevelCounts, SequenceResult, Timings
from hispec_ray.core.scheduler import Scheduler
from hispec_ray.core.sequence import Sequence
from hispec_ray.engine.detokenizer import Detokenizer, TextStream
from hispec_ray.engine.prompts import read_template
from hispec_ray.model.weights import ModelSource, open_model
from hispec_ray.request import FinishReason, GenerationRequest, RequestError, TokenDelta, TokenLogprob
from hispec_ray.shard.executor import Executor, ShardsLostError
from hispec_ray.shard.inline import InlineExecutor
from hispec_ray.shard.shard import Shard

logger = logging.getLogger(__name__)

MOST_LOSSES = 3
"""Losses of the shards without a step in between, or with one request in flight each time and no token of it in between, after which the
engine gives up.
"""


def _executor(settings: Settings, source: ModelSource, like: Any) -> Executor:
    if settings.parallel is None:
        return InlineExecutor(settings, source, like)
    if like:
        raise ValueError("engines share weights only where the model is in their own process; parallel is set")
    from hispec_ray.shard.ray_group import RayExecutor  # noqa: PLC0415  (ray: not wanted where there is one process)

    return RayExecutor(settings, source)


@dataclass(slots=True)
class _Answer:
    """What the engine keeps of a request that is not finished. losses: of the shards while it was in flight, since its last token."""

    request: GenerationRequest
    sequence: Sequence
    text: TextStream
    losses: int = 0


class Engine:
    """Many requests at once over one model. Not thread-safe; `AsyncEngine` gives it a thread of its own.

    counts: per level, what it has done since the start; generated: tokens handed out since the start; timings: of the last round.
    Raises ValueError when the settings do not fit the model or the machine.
    """

    def __init__(self, settings: Settings, like: Engine | None = None) -> None:
        """Load a model, or share the weights of an engine that is `like` this one but for speculation, scheduling and the cache's size."""
        self.settings = settings
        self.source: ModelSource = like.source if like else open_model(settings.model.path, weights=not settings.parallel)
        architecture = self.source.architecture
        wanted = settings.model.max_model_len
        if wanted and wanted > architecture.attention_limit:
            raise ValueError(f"model.max_model_len is {wanted}; for {self.source.name} it must be from 1 to {architecture.attention_limit}")
        self.max_model_len = wanted or architecture.attention_limit
        self.vocabulary = architecture.vocabulary
        self.tokenizer = self.source.tokenizer()
        if settings.model.chat_template is not None:
            self.tokenizer.chat_template = read_template(settings.model.chat_template)
        self.executor: Executor = _executor(settings, self.source, like.executor if like else None)
        self.levels = self.executor.sources
        self.pool = BlockPool(self.executor.blocks, settings.cache.block_size, settings.cache.prefix_caching)
        limits = settings.scheduler
        window, speculation = self.executor.window, settings.speculation
        branches = speculation.branches if window and (speculation.branch_below or speculation.drafter != "exit") else 0
        branches = branches or int(window > 0 and self.executor.lanes > 1)  # else a block to guess ahead into
        self.scheduler = Scheduler(self.pool, limits.max_sequences, limits.max_batch_rows, limits.max_queued, window, branches)
        self.rebuilds = 0  # times that shards were lost
        self._losses = 0  # in a row
        self._flying = 0  # rounds that have begun
        self.counts = [LevelCounts() for _ in self.levels]
        self.generated = 0
        self.timings = Timings()
        self.detokenizer = Detokenizer(self.tokenizer)
        self._eos = frozenset(architecture.eos_token_ids)
        self._answers: dict[int, _Answer] = {}
        self._empty: list[str] = []  # requests that nothing is to be run for, to be answered at the next step
        self._live: set[str] = set()  # ids of the requests that are in the engine
        self._ids = 0

    @property
    def shard(self) -> Shard:
        """The shard in this process. Raises ValueError where the model is in others (`parallel`)."""
        if not isinstance(self.executor, InlineExecutor):
            raise ValueError("parallel is set: the model is in processes of its own")
        return self.executor.shard

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError when the prompt is empty, has ids outside the vocabulary, or does not fit the context with max_tokens.

        Also when the request's grammar cannot be compiled: that takes a while the first time, on whatever thread this is.
        """
        prompt, wanted = request.prompt_ids, request.params.max_tokens
        if not prompt:
            raise RequestError("the prompt is empty; it must have at least one token", "prompt")
        if len(prompt) + max(1, wanted or 0) > self.max_model_len:
            asked = f"{len(prompt)} in the prompt" + (f" and {wanted} in the answer" if wanted else " and at least 1 in the answer")
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens, but {asked} were asked for; "
                "shorten the prompt or lower max_tokens",
                "prompt" if len(prompt) >= self.max_model_len else "max_tokens",
                "context_length_exceeded",
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < self.vocabulary:
                raise RequestError(f"the prompt has token id {token}; ids must be from 0 to {self.vocabulary - 1}", "prompt")
        params = request.params
        for name, ids in (("logit_bias", [id for id, _ in params.biases]), ("stop_token_ids", params.stop_token_ids)):
            if ids and max(ids) >= self.vocabulary:
                raise RequestError(f"{name} has token id {max(ids)}; ids must be from 0 to {self.vocabulary - 1}", name)
        if params.grammar is not None:
            self.check_grammar(params.grammar)

    def check_grammar(self, grammar: str) -> None:
        """Raise RequestError when a grammar cannot be compiled. From any thread; takes a while the first time."""
        try:
            self.executor.grammars.check(grammar)
        except ValueError as error:
            raise RequestError(f"the grammar cannot be followed: {' '.join(str(error).split())}", "grammar") from error

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises RequestError (see `check`, or when the cache could never hold it) and QueueFullError.

        Raises ValueError when its id is that of a request in the engine, or it has no seed.
        """
        self.check(request)
        if request.id in self._live:
            raise ValueError(f"request {request.id!r} is in the engine already; each needs an id of its own")
        if request.params.seed is None or request.params.n != 1:
            raise ValueError(f"request {request.id!r} has seed {request.params.seed} and n {request.params.n}; see request.choices_of")
        prompt, params = request.prompt_ids, request.params
        if params.max_tokens == 0 and (params.prompt_logprobs is None or len(prompt) == 1):
            self._empty.append(request.id)
            self._live.add(request.id)
            return
        limit = self.max_model_len if params.max_tokens is None else len(prompt) + max(1, params.max_tokens)
        if params.max_tokens is None:  # "as much as fits": the pool is a bound like the context
            limit = min(limit, max(len(prompt) + 1, self.pool.blocks * self.pool.block_size + 1))
        self._ids += 1
        ends = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self._eos)))
        shape = params.shape(len(prompt), ends)
        sequence = Sequence(
            self._ids,
            request.id,
            [*prompt, *request.written],
            limit,
            params.temperature,
            request.params.seed,
            shape,
            params.logprobs,
            None if request.written else params.prompt_logprobs,  # they come before the first token
            params.speculate,
            ends,
        )
        answer = _Answer(request, sequence, self._text(request)[0])
        self.scheduler.add(sequence)
        self._live.add(request.id)
        self._answers[self._ids] = answer

    def _text(self, request: GenerationRequest) -> tuple[TextStream, str]:
        """Return the stream of an answer's text behind what is written of it, and what that has shown."""
        stream = self.detokenizer.stream(request.prompt_ids, request.params.stop, request.params.min_tokens)
        return stream, stream.push_all(request.written)[1]

    def written(self, request: GenerationRequest) -> TokenDelta:
        """Return what was said of an answer's written tokens when they came; log-probabilities and levels are unknown. On any thread."""
        told = request.params.prompt_logprobs is not None
        unknown = TokenLogprob(0.0, ())
        return TokenDelta(
            request.id,
            self._text(request)[1],
            list(request.written),
            ["full"] * len(request.written),
            logprobs=[unknown] * len(request.written) if request.params.logprobs is not None else [],
            prompt_logprobs=[unknown] * (len(request.prompt_ids) - 1) if told else [],
        )

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks at once; unknown ids are ignored."""
        for sequence in self.scheduler.abort(request_id):
            del self._answers[sequence.id]
        if request_id in self._empty:
            self._empty.remove(request_id)
        self._live.discard(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._empty) or self.scheduler.has_work

    def step(self) -> list[TokenDelta]:
        """Run one round and return what it added, one delta for each request that has something new.

        Where the shards are lost they are started anew, and every running request is replayed from its tokens: nobody sees it but by the
        time that it takes. After MOST_LOSSES in a row, and where the executor raises something else, so does this.
        """
        deltas = [TokenDelta(request_id, finish_reason=FinishReason.LENGTH) for request_id in self._empty]
        self._live.difference_update(self._empty)
        self._empty.clear()
        try:
            while self._flying < self.executor.lanes and (plan := self.scheduler.schedule(self.executor.lanes)):
                self.executor.submit(plan)
                self._flying += 1
            if not self._flying:
                return deltas
            if self._flying < self.executor.lanes:
                self.executor.look_ahead()
            result = self.executor.collect()
            self._flying -= 1
            self._losses = 0
        except ShardsLostError as error:
            self._rebuild(error)
            return deltas
        except BaseException:
            self._flying = 0
            self.executor.forget()
            self.scheduler.forget_plan()
            raise
        for counts, done in zip(self.counts, result.levels, strict=True):
            counts.add(done)
        self.timings = result.timings
        for sequence in result.sequences:
            if sequence.id not in self._answers:  # aborted in flight
                self.scheduler.update(sequence.id, (), True)
                continue
            if sequence.tokens:
                deltas.append(self._judge(sequence))
                continue
            self.scheduler.update(sequence.id, (), False)
            if sequence.prompt_logprobs:
                deltas.append(TokenDelta(self._answers[sequence.id].request.id, prompt_logprobs=sequence.prompt_logprobs))
        return deltas

    def _rebuild(self, error: ShardsLostError) -> None:
        """Start the shards anew. Raises ShardsLostError where they were lost too often: in a row, or whenever some request is run."""
        self._flying = 0
        there = [self._answers[id] for id in self.scheduler.in_flight if id in self._answers]
        for answer in there:
            answer.losses += 1
        suspect = max(there, key=lambda answer: answer.losses, default=None)
        self.scheduler.start_over()
        while True:
            self._losses += 1
            self.rebuilds += 1
            logger.error("%s (loss %d in a row of at most %d)", error, self._losses, MOST_LOSSES)
            if self._losses >= MOST_LOSSES:
                raise error
            if suspect and suspect.losses >= MOST_LOSSES:
                raise ShardsLostError(f"{error}; request {suspect.request.id} was run each of the last {MOST_LOSSES} times") from error
            try:
                return self.executor.rebuild()
            except ShardsLostError as again:
                error = again

    def check_shards(self) -> None:
        """Start the shards anew where one has died while there was nothing to do. Raises as `step`."""
        try:
            self.executor.check()
            self._losses = 0
        except ShardsLostError as error:
            self._rebuild(error)

    def close(self) -> None:
        """End the shards, where they are processes of their own. Afterwards nothing else is called."""
        self.executor.close()

    def _judge(self, result: SequenceResult) -> TokenDelta:
        """Take the committed tokens as plain decoding would have, one by one: up to the one that ends the answer."""
        answer = self._answers[result.id]
        sequence, stream = answer.sequence, answer.text
        room = sequence.limit - len(sequence.tokens) if answer.request.params.max_tokens != 0 else 0
        within = result.tokens[: result.failed][:room]
        end = next((index for index, token in enumerate(within) if token in sequence.ends), None)
        kept, text = stream.push_all(within[:end])
        stopped_by: str | int | None = None
        reason: FinishReason | None = None
        if stream.stopped is not None:
            reason = FinishReason.STOP
        elif end is not None:
            reason, stopped_by = FinishReason.STOP, within[end]
            kept += 1
        elif kept == room:
            reason = FinishReason.LENGTH
        if reason is None and result.failed is not None:
            reason = FinishReason.ERROR
        if reason is not None:
            text += stream.finish()
            if stream.stopped is not None:  # a stop string may end in a character that only the end completes
                reason, stopped_by = FinishReason.STOP, stream.stopped
            del self._answers[result.id]
            self._live.remove(answer.request.id)
        tokens = result.tokens[:kept]
        answer.losses = 0
        self.generated += kept
        self.scheduler.update(result.id, tokens, reason is not None)
        levels = [self.levels[level] for level in result.levels[:kept]]
        told = result.prompt_logprobs
        return TokenDelta(answer.request.id, text, tokens, levels, reason, result.logprobs[:kept], told, stopped_by)
