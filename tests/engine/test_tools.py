"""Promises of tool calls: a grammar lets through exactly the calls that a request allows, and the reader finds them in the text again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from hispec_ray.engine.detokenizer import Detokenizer
from hispec_ray.engine.tools import HERMES, LLAMA, TAGS, CallReader, Tool, ToolFormat, ToolUse, for_template, format_of, grammar_for
from hispec_ray.model.weights import ModelSource
from hispec_ray.request import RequestError

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
SUM = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"], "additionalProperties": False}
WEATHER, ADD = Tool("get_weather", CITY, {}), Tool("add", SUM, {})
Follows = Callable[[str, ToolFormat, ToolUse], bool]


@pytest.fixture(scope="module")
def follows(default_source: ModelSource) -> Follows:
    """Whether a whole answer is one that the grammar allows."""
    tokenizer = default_source.tokenizer()

    def follow(text: str, written: ToolFormat, use: ToolUse) -> bool:
        matcher = LLMatcher(default_source.byte_tokenizer(), grammar_for(use, written, lambda text: False))
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return follow


def call(written: ToolFormat, name: str, arguments: str) -> str:
    return f"{written.begin}{name}{written.middle}{arguments}{written.end}"


def right(written: ToolFormat) -> str:
    return call(written, "get_weather", '{"city": "Rome }\\" {", "unit": "C"}')


ADDING = call(HERMES, "add", '{"a": 1}')
FORMATS = pytest.mark.parametrize("written", [HERMES, LLAMA], ids=lambda written: written.name)


@FORMATS
def test_what_a_tool_choice_allows(written: ToolFormat, follows: Follows) -> None:
    free, forced = ToolUse((WEATHER, ADD)), ToolUse((WEATHER, ADD), required=True)
    named = ToolUse((WEATHER,), required=True, several=False, named=True)
    adding = call(written, "add", '{"a": 1}')
    for text, allowed in (
        ("It is warm.", (True, False, False)),
        (right(written), (True, True, True)),
        (adding, (True, True, False)),
        (right(written).replace("city", "town"), (False, False, False)),
        (right(written).replace('"C"', '"K"'), (False, False, False)),
        (right(written).replace("get_weather", "get_news"), (False, False, False)),
    ):
        assert tuple(follows(text, written, use) for use in (free, forced, named)) == allowed, text


def test_several_calls_are_allowed_where_they_may_be(follows: Follows) -> None:
    both = f"{right(HERMES)}\n{ADDING}"
    for required in (False, True):
        assert follows(both, HERMES, ToolUse((WEATHER, ADD), required))
        assert not follows(both, HERMES, ToolUse((WEATHER, ADD), required, several=False))
        assert follows(right(HERMES), HERMES, ToolUse((WEATHER, ADD), required, several=False))
    assert follows(f"Let me see. {both}\nThere.", HERMES, ToolUse((WEATHER, ADD)))
    assert not follows(f"Let me see. {both}", HERMES, ToolUse((WEATHER, ADD), required=True))


def test_a_tool_without_parameters_takes_any_object(follows: Follows) -> None:
    use = ToolUse((Tool("now", {}, {}),), required=True)
    assert follows(call(HERMES, "now", "{}"), HERMES, use)
    assert follows(call(HERMES, "now", '{"a": [1]}'), HERMES, use)
    assert not follows(call(HERMES, "now", "[]"), HERMES, use)


def test_text_that_only_looks_like_a_call_is_text(follows: Follows) -> None:
    for text in ("a { b < c", "<tool_ call>", "1 < 2", ""):
        assert follows(text, HERMES, ToolUse((WEATHER,)))
        assert read(HERMES, text, 1) == (text, [])
    assert not follows("<tool_call> of the wild", HERMES, ToolUse((WEATHER,)))


def read(written: ToolFormat, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """The text, and each call's name and arguments, read in pieces of `size` characters."""
    reader = CallReader(written)
    shown, calls, ids = "", list[tuple[str, str]](), set[str]()
    for at in range(0, len(text), size):
        more, parts = reader.feed(text[at : at + size])
        shown += more
        for part in parts:
            if part.id is not None:
                assert part.number == len(calls)
                calls.append((part.name or "", ""))
                ids.add(part.id)
            name, arguments = calls[part.number]
            calls[part.number] = (name, arguments + part.arguments)
    assert len(ids) == len(calls) == reader.calls
    return shown + reader.finish(), calls


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@FORMATS
def test_calls_come_back_as_they_were_written(written: ToolFormat, size: int) -> None:
    arguments = '{"city": "Rome }\\" {", "unit": "C"}'
    assert read(written, right(written), size) == ("", [("get_weather", arguments)])
    assert read(written, "It is warm.", size) == ("It is warm.", [])
    assert json.loads(read(written, right(written), size)[1][0][1])["city"] == 'Rome }" {'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_blanks_between_calls_are_no_text(size: int) -> None:
    text = f"Let me see.\n{right(HERMES)}\n{ADDING}\n"
    shown, calls = read(HERMES, text, size)
    assert shown == "Let me see.\n"
    assert [name for name, _ in calls] == ["get_weather", "add"]
    assert read(HERMES, f"{text}Done.", size)[0] == "Let me see.\n\nDone."


@pytest.mark.parametrize("cut", range(0, 60, 7))
@FORMATS
def test_a_call_that_is_cut_leaves_what_there_was(written: ToolFormat, cut: int) -> None:
    text = right(written)[:cut]
    shown, calls = read(written, text, 3)
    whole = written.begin + (calls[0][0] + written.middle + calls[0][1] if calls else "")
    assert shown == (text if len(text) < len(written.begin) else "")
    assert not calls or whole.startswith(text) or text.startswith(whole)


def qwen(special: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with tokens of its own for calls and thoughts, as Qwen's; special: whether it calls those of calls special."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    raw.train_from_iterator(["hello world"], trainer)
    raw.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    calls = [AddedToken(tag, special=special, normalized=False) for tag in sorted(TAGS)]
    (raw.add_special_tokens if special else raw.add_tokens)(calls)
    raw.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")


@pytest.mark.parametrize("special", [False, True])
def test_tokens_of_their_own_begin_and_end_calls_and_come_back_as_calls(special: bool) -> None:
    tokenizer = qwen(special)
    spelled, detokenizer = from_tokenizer(tokenizer, n_vocab=len(tokenizer)), Detokenizer(tokenizer)

    def named(text: str) -> bool:
        return text in tokenizer.get_vocab() and bool(spelled.is_special_token(tokenizer.convert_tokens_to_ids(text)))

    def follows(text: str, use: ToolUse) -> bool:
        matcher = LLMatcher(spelled, grammar_for(use, HERMES, named, ["<think>", "</think>"]))
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert all(named(tag) for tag in TAGS)
    thought, free, forced = "<think>\nSo?\n</think>\n", ToolUse((ADD,)), ToolUse((ADD,), required=True)
    for text, allowed in (
        (ADDING, (True, True)),
        (f"{ADDING}\n{ADDING}", (True, True)),
        (f"{thought}Let me see. {ADDING}", (True, False)),
        (f"{thought}It is 1.", (True, False)),
        ("It is 1.", (True, False)),
        ("<tool_call>It is 1.", (False, False)),
        (ADDING.replace("1", "true"), (False, False)),
    ):
        assert (follows(text, free), follows(text, forced)) == allowed, text
    said = f"{thought}Let me see. {ADDING}<|im_end|>"
    stream = detokenizer.stream([5])
    pieces = [stream.push(id) for id in tokenizer.encode(said, add_special_tokens=False)]
    assert read(HERMES, "".join(pieces) + stream.finish(), 1000) == (f"{thought}Let me see. ", [("add", '{"a": 1}')])


def test_parameters_of_another_type_than_an_object_are_refused() -> None:
    for kind in ("string", "array", ["object", "null"], None):
        with pytest.raises(RequestError, match=r"'add' are of type .*; the type must be 'object'") as refused:
            Tool("add", {"type": kind}, {})
        assert refused.value.field == "tools.function.parameters"


def test_parameters_that_no_object_has_make_no_grammar(default_source: ModelSource) -> None:
    for schema in ({"const": 5}, {"enum": ["a"]}, {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}):
        grammar = grammar_for(ToolUse((Tool("add", schema, {}),), required=True), HERMES, lambda text: False)
        assert "incompatible types" in LLMatcher(default_source.byte_tokenizer(), grammar).get_error()


@pytest.mark.parametrize(
    ("cut", "complete"), [(12, False), (48, False), (49, True), (63, True), (80, True), (90, False), (112, False), (113, True)]
)
def test_the_reader_knows_whether_the_last_call_has_all_its_arguments(cut: int, complete: bool) -> None:
    reader = CallReader(HERMES)
    reader.feed(f"{ADDING}\n{ADDING}"[:cut])
    assert reader.complete == complete


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "knows no tools"),
        ("{{ messages }}", "knows no tools"),
        ("{{ tools }}", "does not know"),
        ("{{ tools }}<tool_call><function=", "not know"),
    ],
)
def test_a_template_without_a_known_format_is_refused(template: str | None, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        format_of(template)
    assert refused.value.field == "tools"


def test_the_templates_of_known_families_are_known() -> None:
    assert format_of("{%- if tools %}within <tool_call></tool_call> XML tags") is HERMES
    assert format_of('{%- if tools is not none %}{{ \'{"name": function name, "parameters": ...\' }}<|python_tag|>') is LLAMA


def test_a_templates_arguments_are_objects() -> None:
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ' {"a": 1}'}}],
        },
    ]
    found = for_template(said)
    assert found[0] == said[0]
    assert found[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    for bad in ("1", "{", '{"a":' * 100_000, {"a": 1}):
        said[1]["tool_calls"][0]["function"]["arguments"] = bad
        with pytest.raises(RequestError, match="must be a JSON object") as refused:
            for_template(said)
        assert refused.value.field == "messages.1"
        assert len(str(refused.value)) < 300
