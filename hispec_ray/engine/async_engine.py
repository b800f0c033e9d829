"""The engine on a thread of its own, for callers that live in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from hispec_ray.config import Settings
from hispec_ray.engine.engine import Engine
from hispec_ray.request import EngineDeadError, GenerationRequest, TokenDelta

_IDLE_S = 2.0
"""How often to look after the shards while there is nothing to run."""


class _Mailbox:
    """Deltas on their way from the engine's thread to one caller's event loop, which is woken only when it waits for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._deltas: list[TokenDelta] = []
        self._error: BaseException | None = None
        self._ended = False  # something ended since the last take: no reason to wait for more
        self._waiter: asyncio.Future[None] | None = None
        self._wanted = False  # what the waiter waits for: anything, or only an end

    def put(self, deltas: list[TokenDelta], error: BaseException | None = None) -> None:
        """From the engine's thread. A caller whose loop is closed is gone and misses nothing."""
        with self._lock:
            self._deltas += deltas
            self._error = self._error or error
            self._ended = self._ended or error is not None or any(delta.finish_reason is not None for delta in deltas)
            waiter = self._waiter
            if waiter is None or not (self._wanted or self._ended):
                return
            self._waiter = None
        try:
            self._loop.call_soon_threadsafe(_wake, waiter)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def take(self, delay: float = 0.0, whole: bool = False) -> list[TokenDelta]:
        """Return what has arrived, waiting until something has; raises the error that was delivered.

        Lets `delay` seconds pass first for more to gather, unless an end arrives; where `whole`, waits for an end, however long.
        """
        if delay or whole:
            await self._wait(False, None if whole else delay)
        await self._wait(True, None)
        with self._lock:
            if self._error is not None and not self._deltas:
                raise self._error
            deltas, self._deltas = self._deltas, []
            self._ended = self._error is not None  # it is still to be raised
        return deltas

    async def _wait(self, anything: bool, timeout: float | None) -> None:
        """Wait for an end, or for anything at all, at most `timeout` seconds."""
        with self._lock:
            if self._ended or (anything and self._deltas):
                return
            waiter = self._waiter = self._loop.create_future()
            self._wanted = anything
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiter, timeout)
        finally:
            with self._lock:
                self._waiter = None


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class AsyncEngine:
    """Streams answers from an engine that steps on its own thread; the event loop never waits for a step.

    Requests from any number of tasks and loops share the engine's batch.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self.byte_tokenizer = engine.source.byte_tokenizer
        self.silent = engine.detokenizer.silent
        self.written = engine.written
        self.check_grammar = engine.check_grammar
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._callers: set[_Mailbox] = set()
        """Everybody who waits, also those whose requests have not entered yet."""
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="hispec-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_settings(cls, settings: Settings) -> AsyncEngine:
        """Load the model (seconds). Raises ValueError when the settings do not fit it."""
        return cls(Engine(settings))

    async def generate(
        self, requests: Sequence[GenerationRequest], pause: Callable[[], float] = lambda: 0.0, whole: bool = False
    ) -> AsyncIterator[list[TokenDelta]]:
        """Run requests together and yield the deltas that belong to them as steps bring them, until each has its finish_reason.

        pause: asked after each yield for the seconds until the next, in which deltas gather; the first comes at once and so does an end.
        whole: only ends matter, and nothing comes before one.
        All enter or none. Leaving the iterator early aborts what is unfinished; its blocks are free within a step.
        Raises RequestError or QueueFullError before the first yield, EngineDeadError when the engine has died.
        """
        self.check_health()
        mailbox = _Mailbox()
        unfinished = {request.id for request in requests}
        delay = 0.0
        self._callers.add(mailbox)
        self._commands.put(lambda: self._enter(requests, mailbox))
        try:
            self.check_health()  # again: an engine that ended in between told its callers before this one was among them
            while unfinished:
                deltas = await mailbox.take(delay, whole)
                unfinished -= {delta.request_id for delta in deltas if delta.finish_reason is not None}
                if deltas:
                    yield deltas
                    delay = pause()
        finally:
            self._callers.discard(mailbox)
            if unfinished:
                self._commands.put(lambda: self._leave(unfinished, mailbox))

    def stats(self) -> dict[str, float]:
        """Return gauges and counters: sequences running and waiting, share of the cache in use, tokens, work per level."""
        engine = self.engine
        figures: dict[str, float] = {
            "running": engine.scheduler.running,
            "waiting": engine.scheduler.waiting,
            "preemptions": engine.scheduler.preemptions,
            "kv_blocks_used": engine.pool.used,
            "kv_usage": engine.pool.usage,
            "generated_tokens": engine.generated,
            "shard_rebuilds": engine.rebuilds,
        }
        for name, counts in zip(engine.levels, engine.counts, strict=True):
            for figure in ("passes", "rows", "seen", "accepted", "own"):
                figures[f"{name}_{figure}"] = getattr(counts, figure)
        return figures

    def check_health(self) -> None:
        """Raise EngineDeadError when the engine's thread has ended."""
        if self._error is not None or self._closed:
            raise self._end()

    def _end(self) -> EngineDeadError:
        if self._error is None:
            return EngineDeadError("the engine has been closed")
        return EngineDeadError(f"the engine has stopped: {type(self._error).__name__}: {self._error}")

    def close(self) -> None:
        """Stop after the step that runs now; callers that still wait get EngineDeadError."""
        self._closed = True
        self._commands.put(None)
        self._thread.join()

    def _enter(self, requests: Sequence[GenerationRequest], mailbox: _Mailbox) -> None:
        entered: list[str] = []
        try:
            for request in requests:
                self.engine.add(request)
                entered.append(request.id)
        except Exception as error:  # the caller's to handle, whatever it is
            for request_id in entered:
                self.engine.abort(request_id)
            mailbox.put([], error)
            return
        self._mailboxes.update((request.id, mailbox) for request in requests)

    def _leave(self, request_ids: set[str], mailbox: _Mailbox) -> None:
        for request_id in request_ids:
            if self._mailboxes.get(request_id) is mailbox:
                del self._mailboxes[request_id]
                self.engine.abort(request_id)

    def _serve(self) -> None:
        try:
            while self._obey():
                self._dispatch(self.engine.step())
        except BaseException as error:
            self._error = error
            raise
        finally:
            self.engine.close()
            for mailbox in list(self._callers):
                mailbox.put([], self._end())

    def _obey(self) -> bool:
        """Carry out what callers asked for since the last step; wait when there is nothing to run. False when it is time to stop."""
        while True:
            busy = self.engine.has_work
            try:
                command = self._commands.get(block=not busy, timeout=_IDLE_S)
            except queue.Empty:
                if busy:
                    return True
                self.engine.check_shards()
                continue
            if command is None:
                return False
            command()

    def _dispatch(self, deltas: list[TokenDelta]) -> None:
        batches: dict[int, tuple[_Mailbox, list[TokenDelta]]] = {}
        for delta in deltas:
            mailbox = self._mailboxes[delta.request_id] if delta.finish_reason is None else self._mailboxes.pop(delta.request_id)
            batches.setdefault(id(mailbox), (mailbox, []))[1].append(delta)
        for mailbox, batch in batches.values():
            mailbox.put(batch)
