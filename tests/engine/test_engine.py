"""Promises of the engine: one text whatever decodes it and whoever stands beside it, and answers that end where they should."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hispec_ray import LLM, FinishReason, RequestError, SamplingParams
from hispec_ray.core.plan import StepResult
from hispec_ray.engine.engine import Engine
from hispec_ray.request import GenerationRequest, QueueFullError, TokenDelta
from hispec_ray.shard.executor import ShardsLostError
from hispec_ray.shard.inline import InlineExecutor

HIERARCHIES: list[tuple[Any, ...]] = [
    ("single", 4, None, 3),
    ("single", 7, None, 1),
    ("hispec", 1, 2, 2, 4),
    ("hispec", 2, 4, 4, 6),
    ("hispec", 4, 6, 1, 2),
    ("hispec", 5, 7, 3, 5),
    ("hispec", 6, 6, 2, 3),
    ("hispec", 8, 8, 2, 4),
]
DEFAULT_HIERARCHIES: list[tuple[Any, ...]] = [
    ("single", 20, None, 2),
    ("single", 4, None, 4),
    ("hispec", 3, 7, 2, 4),
    ("hispec", 15, 20, 3, 6),
    ("hispec", 25, 28, 4, 4),
    ("hispec", 28, 29, 2, 5),
]
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.8])


def prompts_of_mixed_lengths(count: int = 16) -> list[list[int]]:
    rng = random.Random(3)
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 40, 5, 70, 8, 3, 100, 48, 12)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in lengths[:count]]


def params_of(count: int, temperature: float, max_tokens: int = 40) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=index, max_tokens=max_tokens - index % 3, ignore_eos=True) for index in range(count)
    ]


def ids(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    done = llm.generate(list(prompts), list(params))
    assert_clean(llm.engine)
    return [completion.choices[0].token_ids for completion in done]


def assert_clean(engine: Engine) -> None:
    assert not engine.has_work
    assert engine.pool.used == 0
    assert engine._answers == {}
    engine.scheduler.check_integrity()


@pytest.fixture(scope="module")
def plain(tiny_llm: Any) -> Any:
    """What plain decoding writes for each prompt alone, by dtype, temperature and length."""
    known: dict[tuple[str, float, int], list[list[int]]] = {}

    def get(dtype: str, temperature: float, max_tokens: int = 40) -> list[list[int]]:
        key = dtype, temperature, max_tokens
        if key not in known:
            llm = tiny_llm(dtype, "plain", prefix_caching=False)
            prompts = prompts_of_mixed_lengths()
            pairs = zip(prompts, params_of(len(prompts), temperature, max_tokens), strict=True)
            known[key] = [ids(llm, [prompt], [params])[0] for prompt, params in pairs]
        return known[key]

    return get


@TEMPERATURES
@DTYPES
@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=str)
def test_same_text_whatever_the_hierarchy(hierarchy: Sequence[Any], dtype: str, temperature: float, plain: Any, tiny_llm: Any) -> None:
    """Alone, and in a batch of 16 with mixed lengths."""
    prompts, params = prompts_of_mixed_lengths(), params_of(16, temperature)
    expected = plain(dtype, temperature)
    assert len({tuple(text) for text in expected}) == 16
    llm = tiny_llm(dtype, *hierarchy)
    assert ids(llm, prompts, params) == expected
    figures = llm.engine.counts
    if hierarchy[1] == 8:
        assert all(level.accepted == level.seen for level in figures)
    else:
        assert 0 < figures[-1].accepted < figures[-1].seen
        assert all(level.accepted > 0 for level in figures[1:])
    for index in (0, 6, 10):
        assert ids(llm, [prompts[index]], [params[index]]) == [expected[index]]


@DTYPES
@pytest.mark.parametrize("hierarchy", [("plain",), *HIERARCHIES[1:6:2]], ids=str)
def test_same_text_with_so_few_blocks_that_requests_are_preempted(hierarchy: Sequence[Any], dtype: str, plain: Any, tiny_llm: Any) -> None:
    llm = tiny_llm(dtype, *hierarchy, blocks=12, max_batch_rows=50)
    for temperature in (0.0, 0.8):
        before = llm.engine.scheduler.preemptions
        assert ids(llm, prompts_of_mixed_lengths(), params_of(16, temperature)) == plain(dtype, temperature)
        assert llm.engine.scheduler.preemptions > before


@DTYPES
@TEMPERATURES
@pytest.mark.parametrize("hierarchy", [("plain",), *HIERARCHIES[:6:2]], ids=str)
def test_same_text_with_the_prefix_cache_hit_and_missed(
    hierarchy: Sequence[Any], dtype: str, temperature: float, plain: Any, tiny_llm: Any
) -> None:
    prompts, params = prompts_of_mixed_lengths(), params_of(16, temperature)
    llm = tiny_llm(dtype, *hierarchy, blocks=400)
    for cached in (False, True):
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            llm.engine.add(GenerationRequest(f"{index}", tuple(prompt), one))
        sequences = [answer.sequence for answer in llm.engine._answers.values()]
        texts: dict[str, list[int]] = {f"{index}": [] for index in range(16)}
        while llm.engine.has_work:
            for delta in llm.engine.step():
                texts[delta.request_id] += delta.token_ids
        assert list(texts.values()) == plain(dtype, temperature)
        assert_clean(llm.engine)
        spared = [sequence.cached for sequence in sequences]
        assert spared == [(len(prompt) - 1) // 16 * 16 if cached else 0 for prompt in prompts]


@DTYPES
@pytest.mark.parametrize("blocks", [12, 400], ids=["preempted", "cached"])
@pytest.mark.parametrize("hierarchy", [("single", 4, None, 3), ("hispec", 2, 4, 4, 6)], ids=str)
def test_same_text_with_exits_that_have_layers_of_their_own(
    hierarchy: Sequence[Any], blocks: int, dtype: str, block_heads: Path, plain: Any, tiny_llm: Any
) -> None:
    """With branches, and with so few blocks that requests are preempted, or so many that prompts are found in the cache."""
    prompts, params = prompts_of_mixed_lengths(), params_of(16, 0.8)
    llm = tiny_llm(dtype, *hierarchy, heads=block_heads, branches=2, blocks=blocks, max_batch_rows=50)
    for _ in range(2):
        assert ids(llm, prompts, params) == plain(dtype, 0.8)
    assert (llm.engine.scheduler.preemptions > 0) == (blocks == 12)
    assert 0 < llm.engine.counts[-1].accepted < llm.engine.counts[-1].seen


@pytest.mark.parametrize("branches", [0, 2])
def test_exits_with_layers_of_their_own_guess_the_same_beside_others_and_after_a_cached_prompt(
    branches: int, block_heads: Path, tiny_llm: Any
) -> None:
    """The levels that chose each token first tell what the exits read: nothing else would show keys that their layers miss."""
    # where one token of a prompt is left to read, it is read while guessing already: then the rounds are others
    prompts = [prompt for prompt in prompts_of_mixed_lengths() if len(prompt) % 16 != 1]
    params = params_of(len(prompts), 0.8)
    shape = {"heads": block_heads, "branches": branches, "blocks": 400}
    alone = tiny_llm("bfloat16", "hispec", 2, 4, 4, 6, **shape, prefix_caching=False)
    expected = [alone.generate([prompt], [one])[0].choices[0].levels for prompt, one in zip(prompts, params, strict=True)]
    together = tiny_llm("bfloat16", "hispec", 2, 4, 4, 6, **shape)
    for _ in range(2):
        assert [done.choices[0].levels for done in together.generate(prompts, params)] == expected
    assert together.engine.scheduler.cached_rows > 0


@pytest.mark.parametrize(("count", "found"), [(24, 80), (26, 80), (27, 96), (40, 96)])
def test_an_answer_is_found_by_the_conversation_that_goes_on(count: int, found: int, plain: Any, tiny_llm: Any) -> None:
    """What was run is found, up to the last whole block; the last token, whose row was never run, is not, even where it fills a block."""
    llm = tiny_llm("bfloat16", "hispec", 5, 7, 3, 5)
    prompt = prompts_of_mixed_lengths()[10]
    assert len(prompt) == 70
    answer = ids(llm, [prompt], [replace(params_of(1, 0.8)[0], max_tokens=count, seed=10)])[0]
    assert answer == plain("bfloat16", 0.8)[10][:count] + answer[39:]
    longer, again = [*prompt, *answer, 9, 8, 7], params_of(1, 0.8)
    fresh = tiny_llm("bfloat16", "plain", prefix_caching=False)
    expected = ids(fresh, [longer], again)
    llm.engine.add(GenerationRequest("again", tuple(longer), again[0]))
    sequence = next(iter(llm.engine._answers.values())).sequence
    assert [token for delta in drain(llm.engine)["again"] for token in delta.token_ids] == expected[0]
    assert sequence.cached == found


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_same_text_whatever_the_chunks_of_the_prompt(rows: int, plain: Any, tiny_llm: Any) -> None:
    llm = tiny_llm("bfloat16", "hispec", 4, 6, max_batch_rows=rows, block_size=32)
    assert ids(llm, prompts_of_mixed_lengths(), params_of(16, 0.8)) == plain("bfloat16", 0.8)


def test_same_text_whatever_the_number_of_threads(plain: Any, tiny_llm: Any) -> None:
    llm = tiny_llm("bfloat16", "hispec", 4, 6, threads=2)
    assert ids(llm, prompts_of_mixed_lengths(4), params_of(4, 0.8)) == plain("bfloat16", 0.8)[:4]


def test_same_text_of_the_torch_kernels(tiny_llm: Any) -> None:
    """Kernels of their own, so numbers of their own; but among themselves the promise holds as well."""
    prompts, params = prompts_of_mixed_lengths(5), params_of(5, 0.8, 16)
    for dtype in ("float32", "bfloat16"):
        texts = [ids(tiny_llm(dtype, *method, kernels="torch"), prompts, params) for method in (("plain",), ("hispec", 5, 7, 3, 5))]
        assert texts[0] == texts[1]


@DTYPES
def test_same_text_of_the_default_model(dtype: str, default_llm: Any) -> None:
    texts = [
        "The capital of France is",
        "1, 2, 3, 4, 5,",
        "def fibonacci(n):\n    ",
    ]
    length = 24 if dtype == "bfloat16" else 16  # twice the time in fp32
    params = [SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=length, ignore_eos=True) for index in range(3)]
    reference = default_llm(dtype, "plain")
    prompts = [reference.encode(text) for text in texts]
    expected = ids(reference, prompts, params)
    assert ids(reference, prompts[1:2], params[1:2]) == expected[1:2]
    for hierarchy in DEFAULT_HIERARCHIES[1::2] if dtype == "float32" else DEFAULT_HIERARCHIES[::2]:
        llm = default_llm(dtype, *hierarchy)
        assert ids(llm, prompts, params) == expected, hierarchy
        assert llm.engine.counts[-1].accepted < llm.engine.counts[-1].seen
    assert llm.engine.counts[-1].accepted > 5


CASES = [  # the OpenAI client cases: stop strings, caps, the end token, split characters: prompt, parameters, text, end, tokens
    ("1, 2, 3, 4, 5,", {"max_tokens": 32, "stop": ("8, 9",)}, " 6, 7, ", "stop", 11),
    ("1, 2, 3, 4, 5,", {"max_tokens": 32, "stop": ("8, 7",)}, " 6, 7, 8, 9, 10, 11, 12, 13, 14,", "length", 32),
    ("1, 2, 3, 4, 5,", {"max_tokens": 11, "stop": ("8, 9",)}, " 6, 7, ", "stop", 11),
    ("1, 2, 3, 4, 5,", {"max_tokens": 10, "stop": ("8, 9",)}, " 6, 7, 8, ", "length", 10),
    ("1, 2, 3, 4, 5,", {"max_tokens": 12, "stop": ("8, 9",)}, " 6, 7, ", "stop", 11),
    ([{"role": "user", "content": "What is 2+2? Answer with one number."}], {"max_tokens": 40}, "The answer is 4.", "stop", 7),
    ("Emoji: 🎉🎉🎉🎉🎉🎉", {"max_tokens": 12}, "🎉🎉🎉🎉", "length", 12),
    ("Emoji: 🎉🎉🎉🎉🎉🎉", {"max_tokens": 13}, "🎉🎉🎉🎉\ufffd", "length", 13),
    ("漢字漢字漢字漢字漢字", {"max_tokens": 16}, "漢字漢字漢字漢字", "length", 16),
    ("Emoji: 🎉🎉🎉🎉🎉🎉", {"max_tokens": 32, "stop": ("🎉🎉",)}, "", "stop", 6),
]


@pytest.mark.parametrize(
    "speculation",
    [
        ("plain",),
        ("hispec", 28, 29, 4, 6),
        ("hispec", 4, 8, 4, 4),
        pytest.param(("hispec", 28, 29, 1, 4), marks=pytest.mark.slow),
        pytest.param(("hispec", 28, 29, 8, 8), marks=pytest.mark.slow),
        pytest.param(("single", 29, None, 8), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stop_strings_ends_and_characters_inside_accepted_runs(speculation: Sequence[Any], default_llm: Any) -> None:
    llm: LLM = default_llm("float32", *speculation)
    engine = llm.engine
    for index, (prompt, params, *_) in enumerate(CASES):
        encoded = llm.encode(prompt) if isinstance(prompt, str) else llm.encode_chat(prompt)
        engine.add(GenerationRequest(f"{index}", tuple(encoded), SamplingParams(temperature=0, seed=0, **params)))
    deltas: dict[str, list[TokenDelta]] = {f"{index}": [] for index in range(len(CASES))}
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    runs = 0
    for (prompt, params, text, end, count), got in zip(CASES, deltas.values(), strict=True):
        assert "".join(delta.text for delta in got) == text, (prompt, params)
        assert [delta.finish_reason for delta in got] == [None] * (len(got) - 1) + [FinishReason(end)]
        tokens = [token for delta in got for token in delta.token_ids]
        assert len(tokens) == count
        assert all(len(delta.levels) == len(delta.token_ids) for delta in got)
        assert not any(token in engine._eos for token in tokens[:-1])
        for delta in got[:-1]:
            assert "\ufffd" not in delta.text
            for stop in params.get("stop", ()):
                assert stop[0] not in delta.text or text.count(stop[0])
        runs += any(len(delta.token_ids) > 1 for delta in got)
    assert (runs > 0) == (speculation != ("plain",))
    assert_clean(engine)


@pytest.fixture
def engine(tiny_llm: Any) -> Engine:
    llm: LLM = tiny_llm("float32", "hispec", 5, 7, 4, 6, blocks=30, max_queued=4, max_sequences=3)
    return llm.engine


def request(id: str, prompt: Sequence[int] = (5, 6, 7), **params: Any) -> GenerationRequest:
    return GenerationRequest(id, tuple(prompt), SamplingParams(**{"temperature": 0.8, "seed": 1, "ignore_eos": True, **params}))


def drain(engine: Engine) -> dict[str, list[TokenDelta]]:
    found: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


@pytest.mark.parametrize("cap", [1, 2, 3, 7, 20])
def test_no_more_tokens_than_the_cap(cap: int, engine: Engine) -> None:
    engine.add(request("a", max_tokens=cap))
    engine.add(request("b", max_tokens=30))
    found = drain(engine)
    tokens = {name: [token for delta in deltas for token in delta.token_ids] for name, deltas in found.items()}
    assert len(tokens["a"]) == cap
    assert tokens["a"] == tokens["b"][:cap]
    assert found["a"][-1].finish_reason is FinishReason.LENGTH
    assert engine.generated == cap + 30


def test_a_prompt_is_measured_before_its_ids_are_looked_at(engine: Engine) -> None:
    with pytest.raises(RequestError, match="maximum context length") as refused:
        engine.check(request("a", prompt=(300,) * 100_000))
    assert refused.value.code == "context_length_exceeded"
    for bad in (-1, 300):
        with pytest.raises(RequestError, match=f"token id {bad}; ids must be from 0 to 299"):
            engine.check(request("a", prompt=(5, bad, 6)))


class Losing(InlineExecutor):
    """Shards that are lost whenever a plan brings one of these tokens."""

    def __init__(self, like: InlineExecutor, bad: set[int]) -> None:
        self.__dict__ = like.__dict__
        self.bad, self.rebuilt = bad, 0

    def collect(self) -> StepResult:
        if any(self.bad & set(sequence.tokens) for sequence in self._plans[0].sequences):
            self._plans.clear()
            raise ShardsLostError("a shard is lost: for the test")
        return super().collect()

    def rebuild(self) -> None:
        self.rebuilt += 1


def test_a_request_that_kills_the_shards_whenever_it_is_run_is_the_end(tiny_llm: Any) -> None:
    """Others get on in between, and so does its own first chunk: the losses are not in a row."""
    engine: Engine = tiny_llm("float32", "hispec", 5, 7, 4, 6, blocks=60, max_batch_rows=16).engine
    executor = engine.executor = Losing(engine.executor, {250})
    engine.add(request("good", max_tokens=100))
    engine.add(request("bad", prompt=(*range(3, 33), 250), max_tokens=3))
    with pytest.raises(ShardsLostError, match="request bad was run each of the last 3 times"):
        drain(engine)
    assert executor.rebuilt == 2


def test_losses_that_a_request_gets_over_are_no_end(tiny_llm: Any) -> None:
    engine: Engine = tiny_llm("float32", "hispec", 5, 7, 4, 6, blocks=60).engine
    engine.add(request("a", max_tokens=40))
    whole = [token for delta in drain(engine)["a"] for token in delta.token_ids]
    executor = engine.executor = Losing(engine.executor, set())
    engine.add(request("a", max_tokens=40))
    found: list[int] = []
    for _ in range(6):  # lost in every other step, however often
        found += [token for delta in engine.step() for token in delta.token_ids]
        executor.bad = set(range(300))
        assert engine.step() == []
        executor.bad = set()
    found += [token for delta in drain(engine)["a"] for token in delta.token_ids]
    assert (found, engine.rebuilds, executor.rebuilt) == (whole, 6, 6)
    assert_clean(engine)


def test_no_tokens_at_all_is_an_answer(engine: Engine) -> None:
    engine.add(request("none", max_tokens=0))
    engine.add(request("some", max_tokens=3))
    first = engine.step()
    assert first[0] == TokenDelta("none", finish_reason=FinishReason.LENGTH)
    assert "none" not in drain(engine)
    engine.add(request("gone", max_tokens=0))
    engine.abort("gone")
    assert engine.step() == []
    assert_clean(engine)


def test_an_end_token_ends_the_answer_unless_it_is_ignored(engine: Engine) -> None:
    engine.add(request("on", max_tokens=40))
    whole = [token for delta in drain(engine)["on"] for token in delta.token_ids]
    # in an accepted run, neither its first token nor its last
    place = next(at for at in range(5, 40) if whole[at] not in whole[:at])
    engine._eos = frozenset({whole[place]})
    engine.add(request("off", max_tokens=40, ignore_eos=False))
    engine.add(request("on", max_tokens=40))
    found = drain(engine)
    assert [token for delta in found["on"] for token in delta.token_ids] == whole
    assert [token for delta in found["off"] for token in delta.token_ids] == whole[: place + 1]
    assert found["off"][-1].finish_reason is FinishReason.STOP
    assert_clean(engine)


def test_an_answer_ends_with_the_context(tiny_folder: Any) -> None:
    settings = {"model": {"path": str(tiny_folder), "max_model_len": 40, "threads": 1}, "cache": {"blocks": 50}}
    engine = LLM(settings).engine
    engine.add(request("a", range(3, 33)))
    engine.add(request("b", range(3, 42)))
    found = drain(engine)
    assert [sum(len(delta.token_ids) for delta in found[name]) for name in "ab"] == [10, 1]
    for length, params, field in (
        (40, {}, "prompt"),
        (41, {}, "prompt"),
        (30, {"max_tokens": 11}, "max_tokens"),
        (39, {"max_tokens": 2}, "max_tokens"),
    ):
        with pytest.raises(RequestError, match="maximum context length is 40 tokens") as raised:
            engine.add(request("c", [5] * length, **params))
        assert (raised.value.field, raised.value.code) == (field, "context_length_exceeded")
    assert_clean(engine)


def test_an_answer_without_a_cap_ends_with_the_cache(tiny_llm: Any) -> None:
    engine = tiny_llm("float32", "hispec", blocks=3).engine
    engine.add(request("a", [5] * 30))
    assert sum(len(delta.token_ids) for delta in drain(engine)["a"]) == 3 * 16 + 1 - 30
    with pytest.raises(RequestError, match="the cache has 3") as raised:
        engine.add(request("b", [5] * 30, max_tokens=20))
    assert raised.value.field == "max_tokens"
    assert_clean(engine)


@pytest.mark.parametrize(
    ("prompt", "words"), [((), "empty"), ((5, 300), "token id 300; ids must be from 0 to 299"), ((-1,), "token id -1")]
)
def test_a_bad_prompt_is_refused_and_harms_nobody(prompt: Sequence[int], words: str, engine: Engine) -> None:
    engine.add(request("good", max_tokens=20))
    engine.step()
    with pytest.raises(RequestError, match=words) as raised:
        engine.add(request("bad", prompt))
    assert raised.value.field == "prompt"
    disturbed = drain(engine)["good"]
    engine.add(request("good", max_tokens=20))
    whole = [token for delta in drain(engine)["good"] for token in delta.token_ids]
    assert [token for delta in disturbed for token in delta.token_ids] == whole[-sum(len(delta.token_ids) for delta in disturbed) :]
    assert_clean(engine)


def test_a_full_queue_refuses_and_loses_nothing(engine: Engine) -> None:
    for index in range(4):
        engine.add(request(f"{index}", max_tokens=5))
    with pytest.raises(QueueFullError):
        engine.add(request("late", max_tokens=5))
    assert sorted(drain(engine)) == ["0", "1", "2", "3"]
    assert_clean(engine)


def test_a_request_needs_a_seed_and_is_one_choice(engine: Engine) -> None:
    for params in ({"seed": None}, {"n": 2}):
        with pytest.raises(ValueError, match=r"request 'a' has seed .* and n "):
            engine.add(request("a", **params))
    assert_clean(engine)


def test_an_aborted_request_frees_its_blocks_at_once(engine: Engine) -> None:
    engine.add(request("stays", max_tokens=25))
    alone = drain(engine)["stays"]
    engine.add(request("stays", max_tokens=25))
    engine.add(request("goes", [9] * 60, max_tokens=100))
    first = [delta for _ in range(2) for delta in engine.step()]
    used = engine.pool.used
    engine.abort("goes")
    engine.abort("never came")
    assert engine.pool.used <= used - 4
    engine.scheduler.check_integrity()
    rest = drain(engine)
    assert list(rest) == ["stays"]
    kept = [token for delta in [*first, *rest["stays"]] if delta.request_id == "stays" for token in delta.token_ids]
    assert kept == [token for delta in alone for token in delta.token_ids]
    assert_clean(engine)


def stopped(engine: Engine, tokens: Sequence[int], stop: str) -> bool:
    """Whether the stop string is complete after these tokens, fed one by one; unfinished characters count at the answer's end only."""
    stream = engine.detokenizer.stream((5, 6, 7), (stop,))
    for token in tokens:
        stream.push(token)
    if len(tokens) == 30:
        stream.finish()
    return stream.stopped


def test_stop_strings_of_a_random_model_end_where_the_text_says(engine: Engine) -> None:
    """Every two-character piece of a text as its stop string: the answer ends before it and pays for the token that completed it."""
    engine.add(request("whole", max_tokens=30))
    whole = drain(engine)["whole"]
    tokens = [token for delta in whole for token in delta.token_ids]
    text = "".join(delta.text for delta in whole)
    for at in range(0, len(text) - 2, 3):
        stop = text[at : at + 2]
        engine.add(request("cut", max_tokens=30, stop=(stop,)))
        cut = drain(engine)["cut"]
        assert "".join(delta.text for delta in cut) == text[: text.index(stop)]
        needed = next(count for count in range(1, 31) if stopped(engine, tokens[:count], stop))
        assert [token for delta in cut for token in delta.token_ids] == tokens[:needed]
        assert sum(len(delta.levels) for delta in cut) == needed
        assert cut[-1].finish_reason is FinishReason.STOP
    assert_clean(engine)
