"""Promises of the async engine: many callers, one batch, nobody kept waiting for an engine that is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hispec_ray import LLM, FinishReason, RequestError, SamplingParams
from hispec_ray.core.plan import StepResult
from hispec_ray.engine.async_engine import AsyncEngine, EngineDeadError
from hispec_ray.request import GenerationRequest, QueueFullError, TokenDelta

PATIENCE = 30  # seconds after which a caller counts as forgotten; no test waits for it unless it fails


class Gate:
    """Stands before an executor: lets one plan through at a time, when told to, or fails instead."""

    def __init__(self, llm: LLM) -> None:
        self._collect = llm.engine.executor.collect
        self.error: Exception | None = None
        self.arrived, self._open = threading.Semaphore(0), threading.Semaphore(0)
        llm.engine.executor.collect = self  # type: ignore[method-assign, assignment]

    def __call__(self) -> StepResult:
        self.arrived.release()
        assert self._open.acquire(timeout=PATIENCE)
        if self.error is not None:
            raise self.error
        return self._collect()

    def open(self, steps: int = 1) -> None:
        self._open.release(steps)

    async def reached(self) -> None:
        """Wait until the engine's thread stands at the gate: in the middle of a step."""
        assert await asyncio.to_thread(self.arrived.acquire, timeout=PATIENCE)


def request(id: str, *prompt: int, **params: Any) -> GenerationRequest:
    values = {"temperature": 0.8, "seed": 1, "max_tokens": 20, "ignore_eos": True, **params}
    return GenerationRequest(id, prompt or (5, 6), SamplingParams(**values))


@pytest.fixture
def llm(tiny_llm: Any) -> LLM:
    made: LLM = tiny_llm("float32", "hispec", 5, 7, 3, 5, blocks=80, max_queued=20)
    return made


@pytest.fixture
def engine(llm: LLM) -> Iterator[AsyncEngine]:
    made = AsyncEngine(llm.engine)
    yield made
    made.close()


@pytest.fixture
def gate(llm: LLM) -> Iterator[Gate]:
    made = Gate(llm)
    yield made
    made.open(10_000)


async def collect(engine: AsyncEngine, *requests: GenerationRequest) -> dict[str, list[TokenDelta]]:
    found: dict[str, list[TokenDelta]] = {request.id: [] for request in requests}
    async for deltas in engine.generate(requests):
        assert deltas
        for delta in deltas:
            found[delta.request_id].append(delta)
    return found


async def expect(error: type[Exception], engine: AsyncEngine, *requests: GenerationRequest) -> Exception:
    with pytest.raises(error) as raised:
        await collect(engine, *requests)
    return raised.value


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def assert_clean(engine: AsyncEngine) -> None:
    """Once its thread is gone: nothing runs, waits, or is held."""
    engine.close()
    assert engine.stats()["kv_blocks_used"] == engine.stats()["running"] == engine.stats()["waiting"] == 0
    assert engine._mailboxes == {}
    engine.engine.scheduler.check_integrity()


def test_many_tasks_get_their_own_answers(engine: AsyncEngine, tiny_llm: Any) -> None:
    async def all_at_once() -> list[dict[str, list[TokenDelta]]]:
        pairs = [(request(f"{i}a", 5 + i, 9, seed=i), request(f"{i}b", 8, 9, 5 + i, seed=i, max_tokens=7 + i)) for i in range(8)]
        return await asyncio.gather(*(collect(engine, *pair) for pair in pairs))

    plain = tiny_llm("float32", "plain")
    for index, found in enumerate(run(all_at_once())):
        for name, prompt, count in ((f"{index}a", [5 + index, 9], 20), (f"{index}b", [8, 9, 5 + index], 7 + index)):
            params = SamplingParams(temperature=0.8, seed=index, max_tokens=count, ignore_eos=True)
            choice = plain.generate(prompt, params)[0].choices[0]
            assert [token for delta in found[name] for token in delta.token_ids] == choice.token_ids
            assert "".join(delta.text for delta in found[name]) == choice.text
            assert [delta.finish_reason for delta in found[name]] == [None] * (len(found[name]) - 1) + [FinishReason.LENGTH]
    stats = engine.stats()
    assert stats["generated_tokens"] == sum(20 + 7 + index for index in range(8))
    assert 0 < stats["full_accepted"] < stats["full_seen"]
    assert stats["full_own"] + stats["full_accepted"] >= stats["generated_tokens"]
    assert_clean(engine)


def test_callers_of_two_loops_share_the_engine(engine: AsyncEngine) -> None:
    found: dict[str, Any] = {}
    threads = [threading.Thread(target=lambda name=name: found.update(run(collect(engine, request(name))))) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    texts = [[token for delta in found[name] for token in delta.token_ids] for name in ("a", "b")]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 20


def test_leaving_early_frees_the_blocks_within_a_step(engine: AsyncEngine, gate: Gate) -> None:
    async def leave() -> None:
        others = asyncio.create_task(collect(engine, request("stays", max_tokens=40)))
        await gate.reached()
        leaving = engine.generate([request("goes", *range(3, 60), max_tokens=200), request("goes too", max_tokens=200)])
        first = asyncio.ensure_future(anext(leaving))
        await asyncio.sleep(0)  # lets the request reach the engine's queue
        gate.open()
        await gate.reached()  # both are planned now
        gate.open()
        await first
        await gate.reached()
        assert (engine.stats()["running"], engine.stats()["kv_blocks_used"]) == (3, 6)
        await leaving.aclose()
        gate.open()
        await gate.reached()  # one step later
        assert (engine.stats()["running"], engine.stats()["kv_blocks_used"]) == (1, 1)
        gate.open(1000)
        found = await others
        assert sum(len(delta.token_ids) for delta in found["stays"]) == 40

    run(leave())
    assert_clean(engine)


def test_a_cancelled_task_frees_its_blocks_too(engine: AsyncEngine, gate: Gate) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(collect(engine, request("goes", max_tokens=200)))
        await gate.reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open(1000)
        await collect(engine, request("next"))

    run(cancel())
    assert_clean(engine)


def test_all_requests_of_a_call_enter_or_none(engine: AsyncEngine) -> None:
    error = run(expect(RequestError, engine, request("good"), request("bad", 300)))
    assert error.field == "prompt"
    run(collect(engine, request("next")))
    assert_clean(engine)
    assert engine.engine.generated == 20


def test_a_full_queue_is_the_callers_to_know(engine: AsyncEngine, gate: Gate) -> None:
    async def fill() -> None:
        tasks = [asyncio.create_task(collect(engine, request(f"{index}"))) for index in range(30)]
        await gate.reached()
        late = asyncio.create_task(expect(QueueFullError, engine, *(request(f"late {index}") for index in range(21))))
        await asyncio.sleep(0)
        gate.open(1000)
        assert "at most 20" in str(await late)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(one, dict) for one in done) >= 20
        assert all(isinstance(one, dict | QueueFullError) for one in done)

    run(fill())
    assert_clean(engine)


def test_no_tokens_at_all_is_an_answer(engine: AsyncEngine) -> None:
    assert run(collect(engine, request("none", max_tokens=0))) == {"none": [TokenDelta("none", finish_reason=FinishReason.LENGTH)]}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_engine_dies_every_caller_hears_of_it(engine: AsyncEngine, gate: Gate) -> None:
    """Those whose requests run, those who came during the last step, and those who come later."""

    async def die() -> None:
        running = asyncio.create_task(expect(EngineDeadError, engine, request("runs"), request("runs too")))
        await gate.reached()
        waiting = asyncio.create_task(expect(EngineDeadError, engine, request("came in the last step")))
        await asyncio.sleep(0)
        gate.error = RuntimeError("the shard is gone")
        gate.open()
        assert "the shard is gone" in str(await running)
        assert "the shard is gone" in str(await waiting)
        assert "the shard is gone" in str(await expect(EngineDeadError, engine, request("came later")))
        with pytest.raises(EngineDeadError, match="RuntimeError: the shard is gone"):
            engine.check_health()

    engine.check_health()
    run(die())


def test_closing_tells_those_who_wait(engine: AsyncEngine, gate: Gate) -> None:
    async def close() -> None:
        running = asyncio.create_task(expect(EngineDeadError, engine, request("runs", max_tokens=200)))
        await gate.reached()
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        waiting = asyncio.create_task(expect(EngineDeadError, engine, request("came in the last step")))
        await asyncio.sleep(0)
        gate.open(1000)
        await closing
        assert "closed" in str(await running)
        assert "closed" in str(await waiting)
        with pytest.raises(EngineDeadError, match="has been closed"):
            engine.check_health()

    run(close())
    engine.close()  # again, by the fixture as well: it is closed already


def test_tokens_gather_between_two_yields_and_an_end_comes_at_once(engine: AsyncEngine, gate: Gate) -> None:
    async def two_yields() -> tuple[list[TokenDelta], list[TokenDelta]]:
        steps = engine.generate([request("slow", max_tokens=12)], pause=lambda: PATIENCE * 100)
        gate.open()
        first = await anext(steps)
        gate.open(10_000)
        return first, await anext(steps)  # long before the interval has passed

    first, rest = run(two_yields())
    assert len(first) == 1
    assert first[0].finish_reason is None
    assert len(rest) > 1, "the rest took one step: nothing had to gather"
    assert [delta.finish_reason for delta in rest] == [None] * (len(rest) - 1) + [FinishReason.LENGTH]
    assert sum(len(delta.token_ids) for delta in first + rest) == 12


def test_where_only_ends_matter_nothing_comes_before_one(engine: AsyncEngine, gate: Gate) -> None:
    async def ends() -> list[list[TokenDelta]]:
        gate.open(10_000)
        pair = [request("a", max_tokens=4), request("b", 7, 8, max_tokens=19)]
        return [deltas async for deltas in engine.generate(pair, whole=True)]

    yields = run(ends())
    assert len(yields) <= 2
    assert all(any(delta.finish_reason is not None for delta in deltas) for deltas in yields)
    assert sum(len(delta.token_ids) for deltas in yields for delta in deltas) == 4 + 19


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on(engine: AsyncEngine, gate: Gate) -> None:
    async def twice() -> list[TokenDelta]:
        first = asyncio.ensure_future(collect(engine, request("same")))
        await gate.reached()
        second = asyncio.ensure_future(expect(ValueError, engine, request("same")))
        gate.open(10_000)
        assert "'same'" in str(await second)
        return (await first)["same"]

    assert sum(len(delta.token_ids) for delta in run(twice())) == 20
    assert_clean(engine)
