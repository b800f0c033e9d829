"""Promises of the offline API: prompts in, answers out in their order, and nothing left behind whatever goes wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from hispec_ray import LLM, FinishReason, RequestError, SamplingParams, grammar
from hispec_ray.core.plan import Rows
from hispec_ray.request import choice_seed


@pytest.fixture
def llm(tiny_llm: Any) -> LLM:
    made: LLM = tiny_llm("float32", "hispec", 5, 7, 3, 5, blocks=60, max_queued=2, max_sequences=4)
    return made


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True, **values})


def assert_clean(llm: LLM) -> None:
    assert not llm.engine.has_work
    assert llm.engine.pool.used == 0
    llm.engine.scheduler.check_integrity()


def test_choices_are_distinct_and_repeatable(llm: LLM) -> None:
    first, again = (llm.generate("the cat", params(n=5))[0] for _ in range(2))
    texts = [tuple(choice.token_ids) for choice in first.choices]
    assert len(set(texts)) == 5
    assert texts == [tuple(choice.token_ids) for choice in again.choices]
    # a choice is the request that has its seed
    for index, text in enumerate(texts):
        assert tuple(llm.generate("the cat", params(seed=choice_seed(7, index)))[0].choices[0].token_ids) == text
    assert_clean(llm)


def test_greedy_choices_are_equal(llm: LLM) -> None:
    choices = llm.generate("the cat", params(n=3, temperature=0.0))[0].choices
    assert len({choice.text for choice in choices}) == 1


def test_without_a_seed_answers_differ(llm: LLM) -> None:
    texts = {tuple(llm.generate("the cat", params(seed=None, temperature=2.0))[0].choices[0].token_ids) for _ in range(3)}
    assert len(texts) == 3


def test_more_prompts_than_places_are_answered_in_their_order(llm: LLM) -> None:
    prompts = [[5 + index, 9] for index in range(15)]
    done = llm.generate(prompts, [params(seed=index, max_tokens=3 + index % 4) for index in range(15)])
    assert [list(one.prompt_ids) for one in done] == prompts
    for index, one in enumerate(done):
        assert one.choices[0].finish_reason is FinishReason.LENGTH
        alone = llm.generate(prompts[index], params(seed=index, max_tokens=3 + index % 4))[0]
        assert alone.choices[0].token_ids == one.choices[0].token_ids
        assert len(one.choices[0].levels) == len(one.choices[0].token_ids) == 3 + index % 4
    assert_clean(llm)


def test_a_bad_prompt_among_good_ones_names_itself_and_nothing_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id 300"):
        llm.generate([[5], [300], [6]], params())
    assert_clean(llm)
    with pytest.raises(RequestError, match="2 entries for 3 prompts") as raised:
        llm.generate([[5], [4], [6]], [params()] * 2)
    assert raised.value.field == "params"
    with pytest.raises(RequestError, match="empty"):
        llm.generate("", params())
    assert llm.generate([5], params())[0].text
    assert llm.generate([], params()) == []


def test_a_step_that_fails_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate([[5], [6]], params())

    def fail(plan: object) -> None:
        raise MemoryError("no room for a pass")

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.shard, "execute", fail)
        with pytest.raises(MemoryError):
            llm.generate([[5], [6], [7], [8], [9], [10], [11]], params())
    assert_clean(llm)
    assert llm.generate([[5], [6]], params()) == expected


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    whole = llm.generate("the hat", params(max_tokens=30))[0].choices[0]
    deltas = list(llm.stream("the hat", params(max_tokens=30)))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert len(deltas) < 30
    assert [delta.finish_reason for delta in deltas[-2:]] == [None, FinishReason.LENGTH]
    assert_clean(llm)


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("the hat", params(max_tokens=100))
    next(stream)
    assert llm.engine.pool.used > 0
    stream.close()  # type: ignore[attr-defined]
    assert_clean(llm)
    with pytest.raises(RequestError, match="a stream has one choice"):
        next(llm.stream("the hat", params(n=2)))


def test_half_a_surrogate_pair_is_refused_by_name(llm: LLM) -> None:
    llm.engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError, match="half of a surrogate pair") as refused:
        llm.generate("a\ud83d", params())
    assert refused.value.field == "prompt"
    with pytest.raises(RequestError, match="half of a surrogate pair") as refused:
        llm.encode_chat([{"role": "user", "content": "\ud83d"}])
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -0.1, "temperature is -0.1; it must be from 0 to 2"),
        ("temperature", 2.1, "from 0 to 2"),
        ("temperature", float("nan"), "temperature is nan"),
        ("seed", -1, "seed is -1"),
        ("seed", 2**63, "it must be from 0 to 9223372036854775807"),
        ("max_tokens", -1, "max_tokens is -1; it must be 0 or more"),
        ("stop", ("a",) * 17, "stop has 17 strings; at most 16"),
        ("stop", ("a", ""), "empty string"),
        ("n", 0, "n is 0; it must be from 1 to 128"),
        ("n", 129, "n is 129"),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as raised:
        params(**{field: value})
    assert raised.value.field == field


def test_a_model_without_a_chat_template_says_so(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no chat template") as raised:
        llm.encode_chat([{"role": "user", "content": "hi"}])
    assert raised.value.field == "messages"


def test_chat_and_completion_give_the_reference_answer(default_llm: Any) -> None:
    llm: LLM = default_llm("float32", "hispec", 28, 29)
    prompt = llm.encode_chat([{"role": "user", "content": "What is 2+2? Answer with one number."}])
    assert len(prompt) == 42
    done = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=40))[0]
    assert (done.text, done.choices[0].finish_reason, len(done.choices[0].token_ids)) == ("The answer is 4.", FinishReason.STOP, 7)


def test_streams_that_take_turns_keep_their_own_deltas(llm: LLM) -> None:
    alone = [llm.generate(prompt, params(seed=3))[0].choices[0].token_ids for prompt in ("the cat", "a dog")]
    streams = [llm.stream(prompt, params(seed=3)) for prompt in ("the cat", "a dog")]
    found: list[list[int]] = [[], []]
    for turn in range(40):
        delta = next(streams[turn % 2], None)
        found[turn % 2] += delta.token_ids if delta is not None else []
        if turn == 3:  # and a whole answer in between
            assert llm.generate("the cat", params(seed=3))[0].choices[0].token_ids == alone[0]
    assert found == alone
    assert_clean(llm)


def test_a_step_that_fails_leaves_other_streams_going(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = llm.generate("the cat", params())[0].choices[0].token_ids
    stream = llm.stream("the cat", params())
    found = next(stream).token_ids

    def fail(plan: Any) -> Any:
        raise OSError("a passing fault")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.shard, "execute", fail)
        with pytest.raises(OSError, match="passing"):
            llm.generate("a dog", params())
    for delta in stream:
        found = found + delta.token_ids
    assert found == alone
    assert_clean(llm)


def test_prompts_that_are_no_ids_or_could_never_fit_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="neither a text nor whole token ids") as refused:
        llm.generate([1.5, 2.0], params())  # type: ignore[list-item]
    assert refused.value.field == "prompt"
    encoded: list[str] = []
    llm._encoder._tokenizer = type("Never", (), {"encode": lambda self, text: encoded.append(text)})()
    with pytest.raises(RequestError, match=r"maximum context length is \d+ tokens") as refused:
        llm.generate("x" * 10_000_000, params())
    assert refused.value.code == "context_length_exceeded"
    assert encoded == []


SHAPED: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.2},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.5},
    "bias": {"logit_bias": {7: 12.0, 177: -100, 1: -100}},
    "stop ids": {"stop_token_ids": tuple(range(0, 300, 4)), "min_tokens": 9},
    "all": {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "presence_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 4},
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", SHAPED)
def test_a_shaped_answer_is_the_same_with_speculation_and_without(name: str, temperature: float, tiny_llm: Any) -> None:
    """In a batch with one that is not shaped, with so few blocks that sequences are preempted; exits near the top and near the bottom."""
    prompts = ["the cat", "a dog and", "one two three"]
    asked = [params(temperature=temperature, seed=5, max_tokens=30, **(SHAPED[name] if i else {})) for i in range(3)]
    answers = []
    for method, draft, check, blocks in (("plain", 1, 2, 60), ("hispec", 5, 7, 60), ("hispec", 1, 2, 7), ("single", 6, 6, 60)):
        llm = tiny_llm("float32", method, draft, check, 3, 5, blocks=blocks)
        answers.append([one.choices[0].token_ids for one in llm.generate(prompts, asked)])
        assert_clean(llm)
    assert all(other == answers[0] for other in answers[1:])
    bare = [one.choices[0].token_ids for one in llm.generate(prompts, [params(temperature=temperature, seed=5, max_tokens=30)] * 3)]
    assert bare[0] == answers[0][0]
    assert bare != answers[0] or (temperature == 0 and name in ("top_p", "top_k", "min_p", "stop ids"))


def test_a_stop_token_ends_the_answer_and_is_not_shown(llm: LLM) -> None:
    (whole,) = llm.generate("the cat", params(temperature=0.0, max_tokens=20))[0].choices
    end = next(i for i, token in enumerate(whole.token_ids) if i > 2 and token not in whole.token_ids[:i])
    (cut,) = llm.generate("the cat", params(temperature=0.0, max_tokens=20, stop_token_ids=(whole.token_ids[end],)))[0].choices
    assert cut.token_ids == whole.token_ids[: end + 1]
    assert cut.finish_reason is FinishReason.STOP
    assert whole.text.startswith(cut.text)
    late = params(temperature=0.0, max_tokens=20, stop_token_ids=(whole.token_ids[end],), min_tokens=end + 2)
    (longer,) = llm.generate("the cat", late)[0].choices
    assert len(longer.token_ids) >= end + 2
    assert whole.token_ids[end] not in longer.token_ids[: end + 2]


def test_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    for values in ({"logit_bias": {300: 1}}, {"stop_token_ids": (300,)}):
        with pytest.raises(RequestError, match="has token id 300; ids must be from 0 to 299"):
            llm.generate("the cat", params(**values))
    assert_clean(llm)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shaped", [{}, {"presence_penalty": 1.5, "top_k": 5}])
def test_logprobs_are_the_models_own_with_speculation_and_without(shaped: dict[str, Any], temperature: float, tiny_llm: Any) -> None:
    """Of the distribution before penalties and filters, at every token of the answer."""
    asked = params(temperature=temperature, seed=5, max_tokens=25, logprobs=3, **shaped)
    answers = []
    for method, draft, check in (("plain", 1, 2), ("hispec", 5, 7), ("hispec", 1, 2)):
        llm = tiny_llm("float32", method, draft, check, 3, 5, blocks=60)
        (choice,) = llm.generate("the cat", asked)[0].choices
        assert len(choice.logprobs) == len(choice.token_ids) == 25
        answers.append(choice)
    for choice in answers[1:]:
        assert choice.token_ids == answers[0].token_ids
        assert choice.logprobs == answers[0].logprobs, "to the bit, on one CPU"
    prompt = llm.encode("the cat")
    decoder = llm.engine.shard.decoder
    tokens = np.array([*prompt, *answers[0].token_ids[:-1]])
    places = np.arange(len(tokens))
    rows = Rows(tokens, places, np.zeros_like(places), np.arange(decoder.blocks)[None], places, places)
    layers = decoder.architecture.layers
    law = decoder.logits(layers, decoder.run(0, layers, decoder.embed(rows), rows)).log_softmax(dim=1)[len(prompt) - 1 :]
    for row, token, told in zip(law, answers[0].token_ids, answers[0].logprobs, strict=True):
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [id for id, _ in told.top] == row.topk(3).indices.tolist()
        assert [value for _, value in told.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_the_prompts_logprobs_are_the_models_own_however_it_is_read(tiny_llm: Any) -> None:
    """In chunks, from the prefix cache, after a preemption, guessed or not; once each, and with the text that comes without them."""
    prompts = [[(7 * i * i + seed) % 290 + 3 for i in range(length)] for seed, length in enumerate((1, 2, 16, 17, 60, 45))]
    asked = params(temperature=0.0, max_tokens=20, prompt_logprobs=2)
    reference = None
    for method, rows, blocks in (("plain", 512, 60), ("hispec", 7, 60), ("single", 1, 60), ("hispec", 50, 11)):
        llm = tiny_llm("float32", method, 5, 7 if method == "hispec" else None, 3, 5, blocks=blocks, max_batch_rows=rows)
        texts = [one.choices[0].token_ids for one in llm.generate(prompts, params(temperature=0.0, max_tokens=20))]
        for _ in range(2):  # the second time every prompt is in the cache
            choices = [one.choices[0] for one in llm.generate(prompts, asked)]
            assert [choice.token_ids for choice in choices] == texts
            found = [choice.prompt_logprobs for choice in choices]
            reference = reference or found
            assert found == reference
            assert_clean(llm)
    assert llm.engine.scheduler.preemptions > 0
    assert reference
    assert [len(told) for told in reference] == [len(prompt) - 1 for prompt in prompts]
    decoder = llm.engine.shard.decoder
    tokens, places = np.array(prompts[4]), np.arange(60)
    rows_ = Rows(tokens, places, np.zeros_like(places), np.arange(decoder.blocks)[None], places, places)
    layers = decoder.architecture.layers
    law = decoder.logits(layers, decoder.run(0, layers, decoder.embed(rows_), rows_)).log_softmax(dim=1)
    for row, token, told in zip(law, prompts[4][1:], reference[4], strict=False):
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [id for id, _ in told.top] == row.topk(2).indices.tolist()


def test_a_prompt_is_told_where_no_token_is_asked_for(llm: LLM) -> None:
    asked = params(max_tokens=0, prompt_logprobs=0)
    for prompt, count in (([5], 0), ([5, 6], 1), (list(range(5, 50)), 44)):
        (choice,) = llm.generate(prompt, asked)[0].choices
        assert (len(choice.prompt_logprobs), choice.token_ids, choice.text) == (count, [], "")
        assert choice.finish_reason is FinishReason.LENGTH
    assert_clean(llm)


ANSWER = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 10**6},
        "b": {"enum": ["x", "yes"]},
        "c": {"type": "array", "maxItems": 3},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
ANSWER["properties"]["c"]["items"] = {"type": "boolean"}  # type: ignore[index]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("more", [{}, {"presence_penalty": 1.0, "top_k": 3, "logit_bias": {34: 5.0}}], ids=["alone", "shaped"])
def test_an_answer_follows_its_grammar_with_speculation_and_without(temperature: float, more: dict[str, Any], tiny_llm: Any) -> None:
    """Beside one that has none, preempted or not; a random model would never write any of it."""
    prompts = ["the cat", "a dog and", "one two three"]
    bound = params(temperature=temperature, seed=5, max_tokens=60, ignore_eos=False, grammar=grammar.json_schema(ANSWER), **more)
    asked = [params(temperature=temperature, seed=5, max_tokens=60), bound, bound]
    answers = []
    for method, draft, check, blocks in (("plain", 1, 2, 60), ("hispec", 5, 7, 60), ("hispec", 1, 2, 9), ("single", 6, None, 60)):
        llm = tiny_llm("float32", method, draft, check, 3, 5, blocks=blocks, branches=2)
        answers.append([one.choices[0].token_ids for one in llm.generate(prompts, asked)])
        assert_clean(llm)
    assert all(other == answers[0] for other in answers[1:])
    for prompt in prompts[1:]:
        (choice,) = llm.generate(prompt, bound)[0].choices
        assert choice.finish_reason is FinishReason.STOP
        said = json.loads(choice.text)
        assert list(said) == ["a", "b", "c"]
        assert said["b"] in ("x", "yes")
        assert choice.stopped_by == choice.token_ids[-1]


def test_an_end_of_the_grammar_is_the_answers(llm: LLM) -> None:
    (choice,) = llm.generate("the cat", params(ignore_eos=False, grammar=grammar.regex("a{3}")))[0].choices
    assert (choice.text, choice.finish_reason) == ("aaa", FinishReason.STOP)
    (choice,) = llm.generate("the cat", params(ignore_eos=False, max_tokens=2, grammar=grammar.regex("ab{30}")))[0].choices
    assert choice.finish_reason is FinishReason.LENGTH
    assert_clean(llm)


def test_a_grammar_that_cannot_be_followed_is_refused_by_name(llm: LLM) -> None:
    for bad in (grammar.json_schema({"type": "nonsense"}), grammar.lark("start: nobody"), grammar.regex("("), "{", ""):
        with pytest.raises(RequestError, match="the grammar cannot be followed") as refused:
            llm.generate("the cat", params(ignore_eos=False, grammar=bad))
        assert refused.value.field == "grammar"
    for values in ({"ignore_eos": True}, {"ignore_eos": False, "min_tokens": 1}):
        with pytest.raises(RequestError, match="where a grammar says how the answer ends"):
            params(grammar=grammar.regex("a"), **values)
    assert_clean(llm)


def bounded(fuel: int) -> LLParserLimits:
    return LLParserLimits(initial_lexer_fuel=2_000_000, step_lexer_fuel=fuel, max_lexer_states=50_000, verbose_errors=False)


def test_a_grammar_beyond_its_limits_ends_its_own_answer_where_plain_decoding_ends_it(
    tiny_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each letter doubles what may come, of guesses too; the guesses that are rejected must not bring the end nearer."""
    growing = grammar.regex("(.*[a-f].{12}|.*[g-r].{13}|.*[s-z].{14})*")
    monkeypatch.setattr("hispec_ray.speculation.grammar._LIMITS", bounded(600))
    monkeypatch.setattr("hispec_ray.speculation.grammar._SCOUTS_LIMITS", bounded(2400))
    plain, guessing = tiny_llm("float32", "plain"), tiny_llm("float32", "hispec", 5, 7, 3, 5)
    asked = [params(seed=seed, temperature=0.9, max_tokens=30, ignore_eos=False, grammar=growing) for seed in range(8)]
    alone = guessing.generate("a dog", params())[0].choices[0].token_ids
    expected = [plain.generate("the cat", one)[0].choices[0] for one in asked]
    other, *found = (one.choices[0] for one in guessing.generate(["a dog", *["the cat"] * 8], [params(), *asked]))
    assert other.token_ids == alone
    ends = [(one.text, one.token_ids, one.finish_reason) for one in expected]
    assert [(one.text, one.token_ids, one.finish_reason) for one in found] == ends
    assert {reason for _, _, reason in ends} == {FinishReason.ERROR, FinishReason.LENGTH}
    assert any(set(one.levels) != {"full"} for one in found)
    for text, one in [(text, one) for (text, _, reason), one in zip(ends, asked, strict=True) if reason is FinishReason.ERROR]:
        stopping = replace(one, stop=(text[-2:],))
        choices = [llm.generate("the cat", stopping)[0].choices[0] for llm in (plain, guessing)]
        assert [choice.finish_reason for choice in choices] == [FinishReason.STOP] * 2
        assert choices[0].token_ids == choices[1].token_ids
    assert_clean(guessing)


def test_a_request_may_be_decoded_plainly(llm: LLM) -> None:
    def rows() -> int:
        return sum(counts.rows for counts in llm.engine.counts[:-1])

    first = llm.generate("the cat", params())[0].choices[0]
    assert set(first.levels) != {"full"}
    plain = llm.generate("the cat", params(speculate=False))[0].choices[0]
    assert plain.token_ids == first.token_ids
    assert set(plain.levels) == {"full"}


def test_logprobs_end_where_the_text_ends(llm: LLM) -> None:
    (whole,) = llm.generate("the cat", params(temperature=0.0, max_tokens=20, logprobs=0))[0].choices
    assert all(told.top == () for told in whole.logprobs)
    cut = llm.generate("the cat", params(temperature=0.0, max_tokens=20, logprobs=0, stop=(whole.text[3:5],)))[0].choices[0]
    assert len(cut.logprobs) == len(cut.token_ids) < 20
    assert not llm.generate("the cat", params())[0].choices[0].logprobs
    with pytest.raises(RequestError, match="logprobs is 21; it must be from 0 to 20"):
        params(logprobs=21)
