"""What a coordinator sends for a job: tokens in, deltas out, failures as data."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from hispec_ray.config import Settings
from hispec_ray.request import MAX_SEED, EngineDeadError, GenerationRequest, SamplingParams, TokenDelta, choice_seed
from hispec_ray.serving.coordinator import Coordinator
from hispec_ray.serving.failures import NOT_READY
from hispec_ray.serving.rhythm import Rhythm
from hispec_ray.serving.wire import Delta, Failure, Item, Job, Started
from serving.fake_engine import CONTEXT, FakeEngine


def coordinator(engine: FakeEngine) -> Coordinator:
    return Coordinator(Settings(), load=lambda settings: engine)


def items(engine: FakeEngine, job: Job) -> list[Item]:
    async def collect() -> list[Item]:
        return [item async for item in coordinator(engine).generate(job)]

    return asyncio.run(collect())


def job(*prompts: Any, messages: Any = (), **params: Any) -> Job:
    return Job("job", SamplingParams(**params), prompts, messages)


def test_a_job_starts_with_the_prompts_lengths_and_goes_on_with_what_each_step_adds() -> None:
    engine = FakeEngine()
    assert items(engine, job("Hi!")) == [
        Started([3]),
        [Delta(0, "Hello", 5)],
        [Delta(0, ", ", 2)],
        [Delta(0, "world", 5, "stop")],
    ]
    assert engine.requests[0].prompt_ids == (72, 105, 33)


def test_all_that_is_sent_is_small_plain_data() -> None:
    for item in (Started([3]), [Delta(0, "Hello", 5)], Failure(429, "busy", headers={"Retry-After": "1"})):
        assert pickle.loads(pickle.dumps(item)) == item


def test_choices_are_numbered_prompt_by_prompt_each_with_its_seed() -> None:
    engine = FakeEngine()
    started, *steps = items(engine, job("a", [7, 8], n=3, seed=5))
    assert isinstance(steps[0], list)
    assert started == Started([1, 2])
    assert [delta[0] for delta in steps[0]] == [0, 1, 2, 3, 4, 5]
    assert [request.prompt_ids for request in engine.requests] == [(97,)] * 3 + [(7, 8)] * 3
    assert [request.params.seed for request in engine.requests] == [choice_seed(5, i) for i in (0, 1, 2)] * 2
    assert len({request.id for request in engine.requests}) == 6


def test_a_seed_is_drawn_where_none_is_given() -> None:
    engines = FakeEngine(), FakeEngine()
    for engine in engines:
        items(engine, job("a"))
    first, second = (engine.requests[0].params.seed for engine in engines)
    assert first is not None
    assert 0 <= first <= MAX_SEED
    assert first != second


def test_a_chat_goes_through_the_template() -> None:
    engine = FakeEngine()
    assert items(engine, job(messages=[{"role": "user", "content": "Hey"}]))[0] == Started([3])
    assert engine.tokenizer.chats == [[{"role": "user", "content": "Hey"}]]


@pytest.mark.parametrize(
    ("asked", "param", "code", "message"),
    [
        (job([1000]), "prompt", None, "token id"),
        (job(""), "prompt", None, "empty"),
        (job("x" * CONTEXT), "prompt", "context_length_exceeded", f"maximum context length is {CONTEXT} tokens"),
        (job("x", max_tokens=CONTEXT), "max_tokens", "context_length_exceeded", f"maximum context length is {CONTEXT} tokens"),
        (job(messages=[{"role": "assistant", "content": "Hi"}]), "messages", None, "Conversation roles must alternate"),
    ],
)
def test_what_cannot_be_answered_is_a_failure_that_names_its_field(asked: Job, param: str, code: str | None, message: str) -> None:
    (failure,) = items(FakeEngine(), asked)
    assert isinstance(failure, Failure)
    assert (failure.status, failure.param, failure.code) == (400, param, code)
    assert message in failure.message


def test_a_model_without_a_chat_template_says_so() -> None:
    engine = FakeEngine()
    engine.tokenizer.chat_template = None
    (failure,) = items(engine, job(messages=[{"role": "user", "content": "Hey"}]))
    assert isinstance(failure, Failure)
    assert failure.status == 400
    assert "no chat template" in failure.message


def test_a_full_queue_asks_to_come_back() -> None:
    engine = FakeEngine()
    engine.full = True
    (failure,) = items(engine, job("a"))
    assert isinstance(failure, Failure)
    assert (failure.status, failure.headers) == (429, {"Retry-After": "1"})


@pytest.mark.parametrize(
    ("death", "status", "headers"), [(RuntimeError("a secret"), 500, {}), (EngineDeadError("a secret"), 503, {"Retry-After": "10"})]
)
@pytest.mark.parametrize("dies_after", [0, 1])
def test_an_engine_that_fails_ends_the_job_without_telling_why(
    dies_after: int, death: Exception, status: int, headers: dict[str, str]
) -> None:
    engine = FakeEngine()
    engine.dies_after, engine.death = dies_after, death
    failure = items(engine, job("a"))[-1]
    assert isinstance(failure, Failure)
    assert (failure.status, failure.headers) == (status, headers)
    assert "secret" not in failure.message


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_job_that_is_left_is_aborted(how: str) -> None:
    engine = FakeEngine()

    async def leave() -> None:
        engine.gate = asyncio.Event()
        stream = coordinator(engine).generate(job("a", n=2))
        await anext(stream)
        await anext(stream)
        assert len(engine.running) == 2
        if how == "close":
            await stream.aclose()
        else:
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert engine.aborted == {"job-0", "job-1"}

    asyncio.run(leave())


def test_health_is_the_engines() -> None:
    engine = FakeEngine()
    serving = coordinator(engine)
    assert asyncio.run(serving.health())["running"] == 0
    serving.check_health()
    serving.close()
    assert engine.closed
    with pytest.raises(EngineDeadError, match="closed"):
        serving.check_health()

    async def late() -> list[Item]:
        return [item async for item in serving.generate(job([7]))]

    assert asyncio.run(late()) == [NOT_READY]


def test_a_stream_gathers_tokens_between_events_and_a_whole_answer_until_its_end() -> None:
    streaming, whole = FakeEngine(), FakeEngine()
    items(streaming, job("a"))
    items(whole, replace(job("a"), stream=False))
    assert (streaming.wholes, whole.wholes) == ([False], [True])
    assert streaming.pauses == [Settings().server.stream_interval_ms / 1000] * 3


def test_what_gathered_for_a_choice_is_one_delta() -> None:
    class Gathering(FakeEngine):
        async def generate(
            self, requests: Sequence[GenerationRequest], pause: Callable[[], float], whole: bool
        ) -> AsyncIterator[list[TokenDelta]]:
            gathered = [delta async for deltas in super().generate(requests, pause, whole) for delta in deltas]
            yield gathered

    assert items(Gathering(), job("a", n=2))[1:] == [[Delta(0, "Hello, world", 12, "stop"), Delta(1, "Hello, world", 12, "stop")]]


def test_a_job_that_could_never_wait_is_refused_for_good() -> None:
    settings = Settings.model_validate({"scheduler": {"max_queued": 3}})

    async def collect(job: Job, full: bool = True) -> list[Item]:
        engine = FakeEngine()
        engine.full = full
        return [item async for item in Coordinator(settings, load=lambda settings: engine).generate(job)]

    chat = [{"role": "user", "content": "Hey"}]
    for asked, param, message in (
        (job("a", "b", n=2), "n", "2 prompts with n 2 make 4 sequences; at most 3"),
        (job("a", "b", "c", "d"), "prompt", "4 prompts with n 1 make 4 sequences; at most 3"),
        (job("a", "b", "c", "d", n=2), "prompt", "4 prompts with n 2 make 8 sequences; at most 3"),
        (job(messages=chat, n=4), "n", "1 prompt with n 4 make 4 sequences; at most 3"),
    ):
        (refusal,) = asyncio.run(collect(asked))
        assert isinstance(refusal, Failure)
        assert (refusal.status, refusal.param) == (400, param)
        assert message in refusal.message
    (full,) = asyncio.run(collect(job("a", n=3)))
    assert isinstance(full, Failure)
    assert full.status == 429
    assert isinstance(asyncio.run(collect(job("a", n=3), full=False))[0], Started)


def test_many_streams_share_the_events_of_a_second() -> None:
    rhythm = Rhythm(0.05, events_per_s=100)
    with ExitStack() as streams:
        for _ in range(5):
            streams.enter_context(rhythm.stream())
        assert rhythm.pause() == 0.05
        for _ in range(11):
            streams.enter_context(rhythm.stream())
        assert rhythm.pause() == 0.16
    assert rhythm.pause() == 0.05
    unbound = Rhythm(0, events_per_s=100)
    assert unbound.pause() == 0
    with unbound.stream():
        assert unbound.pause() == 0.01, "the bound holds whatever the interval"


def test_streams_that_wait_for_their_turn_do_not_slow_those_that_run() -> None:
    class Queueing(FakeEngine):
        """A prompt that begins with w waits for the turn, and behind its first tokens until all such have theirs."""

        turn, everybody, begun = asyncio.Event(), asyncio.Event(), 0

        async def generate(
            self, requests: Sequence[GenerationRequest], pause: Callable[[], float], whole: bool
        ) -> AsyncIterator[list[TokenDelta]]:
            waits = requests[0].prompt_ids[0] == ord("w")
            if waits:
                await self.turn.wait()
            async for deltas in super().generate(requests, pause, whole):
                yield deltas
                self.begun += waits
                if self.begun == 20:
                    self.everybody.set()
                if waits:
                    await self.everybody.wait()

    engine = Queueing()
    settings = Settings.model_validate({"server": {"stream_interval_ms": 0, "stream_events_per_s": 100}})
    serving = Coordinator(settings, load=lambda settings: engine)

    async def ask(id: int, prompt: str) -> int:
        return len([item async for item in serving.generate(replace(job(prompt), id=str(id)))])

    async def together() -> None:
        waiting = [asyncio.create_task(ask(id, "wait")) for id in range(20)]
        assert await ask(20, "run") == 4
        assert engine.pauses == [0.01] * 3
        engine.turn.set()
        assert await asyncio.gather(*waiting) == [4] * 20
        assert max(engine.pauses) == 0.2, "those that run share the events of a second"

    asyncio.run(together())


def test_a_prompt_of_ids_is_measured_before_anything_is_done_with_it() -> None:
    engine = FakeEngine()
    asked = replace(job([1] * 2_000_000, n=128), echo=True)
    (failure,) = items(engine, asked)
    assert isinstance(failure, Failure)
    assert (failure.status, failure.param, failure.code) == (400, "prompt", "context_length_exceeded")
    assert f"maximum context length is {CONTEXT} tokens, but prompt has 2000000" in failure.message
    assert (engine.requests, engine.tokenizer.decoded) == ([], 0)
    refused = asyncio.run(coordinator(engine).detokenize([1] * 2_000_000))
    assert isinstance(refused, Failure)
    assert (refused.status, refused.param, refused.code) == (400, "tokens", "context_length_exceeded")
    assert engine.tokenizer.decoded == 0


def test_the_choices_of_a_prompt_share_its_tokens_and_its_text() -> None:
    engine = FakeEngine()
    items(engine, replace(job([7, 8], [9], n=50), echo=True))
    assert len({id(request.prompt_ids) for request in engine.requests}) == 2
    assert engine.tokenizer.decoded == 2
