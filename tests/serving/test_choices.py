"""A choice's way to the client: log-probabilities with the text that they belong to, calls, and who chose what."""

from __future__ import annotations

from typing import Any

import pytest

from hispec_ray.engine.tools import HERMES, CallPart, ToolUse
from hispec_ray.request import FinishReason, TokenDelta
from hispec_ray.serving.answers import ChatAnswer, CompletionAnswer
from hispec_ray.serving.choices import ChoiceWriter, Speller
from hispec_ray.serving.wire import Delta, Entry, Spelled, joined
from serving.fake_engine import FakeTokenizer, score

EMOJI = "🎉"


class Halves(FakeTokenizer):
    """Ids from 2000 on are bytes; 0 ends a sequence."""

    def decode_bytes(self, ids: Any) -> bytes:
        return b"".join(bytes([id - 2000]) if id >= 2000 else super(Halves, self).decode_bytes([id]) for id in ids)


def tokens_of(text: str) -> list[int]:
    """Plain characters whole, others byte by byte."""
    return [id for c in text for id in ([ord(c)] if ord(c) < 1000 else [2000 + byte for byte in c.encode()])]


def delta(text: str, ids: list[int] | None = None, reason: FinishReason | None = None, stopped_by: Any = None) -> TokenDelta:
    ids = tokens_of(text) if ids is None else ids
    return TokenDelta("a", text, ids, ["full"] * len(ids), reason, [score(id, 2) for id in ids], stopped_by=stopped_by)


def writer(**fields: Any) -> ChoiceWriter:
    return ChoiceWriter(0, speller=Speller(Halves(), Halves().is_special_token), **fields)


def texts(entries: tuple[Entry, ...]) -> list[tuple[str, int]]:
    return [(entry.token.text, entry.offset) for entry in entries]


def taken(choice: ChoiceWriter, *deltas: TokenDelta) -> list[Delta]:
    """What the choice gives after each delta that leaves it something."""
    found = []
    for one in deltas:
        choice.add(one)
        if (part := choice.take()) is not None:
            found.append(part)
    return found


def test_a_token_whose_log_probability_is_held_back_is_told_with_it() -> None:
    """Another coordinator that goes on behind what was told would not know it."""
    first, second = taken(writer(ids=True, trace=True), delta("7,", tokens_of("7, 8")), delta(" 8 9", tokens_of(" 9"), FinishReason.LENGTH))
    assert [part.ids for part in (first, second)] == [tuple(tokens_of("7,")), tuple(tokens_of(" 8 9"))]
    assert [part.tokens for part in (first, second)] == [2, 4]
    assert [len(part.entries) for part in (first, second)] == [2, 4]
    assert [len(part.levels) for part in (first, second)] == [2, 4]
    half = writer(ids=True)
    half.add(delta("", tokens_of(EMOJI)[:2]))
    assert half.take() is None


def test_an_entry_goes_with_the_text_that_it_begins() -> None:
    # " 8" is held back until it is known that no stop string follows
    first, second = taken(writer(), delta("7,", tokens_of("7, 8")), delta(" 8 9", tokens_of(" 9"), FinishReason.LENGTH))
    assert texts(first.entries) == [("7", 0), (",", 1)]
    assert texts(second.entries) == [(" ", 2), ("8", 3), (" ", 4), ("9", 5)]
    assert [part.tokens for part in (first, second)] == [4, 2]


def test_entries_are_cut_where_a_stop_string_cuts_the_text() -> None:
    end = delta("7,", tokens_of("7, 8, 9"), FinishReason.STOP, "8, 9")
    assert texts(taken(writer(), end)[0].entries) == [("7", 0), (",", 1)]
    begun = [2000 + byte for byte in EMOJI.encode()[:2]]
    assert texts(taken(writer(), delta("", begun), delta("", tokens_of("x"), FinishReason.STOP, "x"))[-1].entries) == []


def test_the_end_of_sequence_has_an_entry_without_bytes() -> None:
    (found,) = taken(writer(), delta("a", [ord("a"), 0], FinishReason.STOP, 0))
    assert [entry.token for entry in found.entries] == [Spelled("a", b"a"), Spelled("<end>", b"")]
    assert [entry.offset for entry in found.entries] == [0, 1]


def test_the_parts_of_a_character_wait_for_the_whole() -> None:
    ids = tokens_of(EMOJI)
    first, second = taken(writer(), delta("a", [ord("a"), *ids[:3]]), delta(EMOJI, ids[3:]))
    assert texts(first.entries) == [("a", 0)]
    assert [(entry.token.bytes, entry.offset) for entry in second.entries] == [(bytes([byte]), 1) for byte in EMOJI.encode()]
    (cut,) = taken(writer(), delta("\ufffd", ids[:2], FinishReason.LENGTH))
    assert len(cut.entries) == 2


def test_an_echoed_prompt_comes_first_with_entries_of_its_own() -> None:
    choice = writer(prompt=tokens_of("abc"), prompt_text="abc")
    prompt = TokenDelta("a", prompt_logprobs=[score(id, 1) for id in tokens_of("bc")])
    assert taken(choice, prompt) == []
    (found,) = taken(choice, delta("de", reason=FinishReason.LENGTH))
    assert found.text == "abcde"
    assert texts(found.entries) == [("a", 0), ("b", 1), ("c", 2), ("d", 3), ("e", 4)]
    assert [entry.logprob for entry in found.entries][:2] == [None, -ord("b") / 1000]
    nothing = writer(prompt=tokens_of("abc"), prompt_text="abc")
    (found,) = taken(nothing, prompt, TokenDelta("a", finish_reason=FinishReason.LENGTH))
    assert (found.text, found.tokens, len(found.entries)) == ("abc", 0, 3)


def test_a_special_token_of_the_prompt_counts_where_its_name_stands_in_the_text() -> None:
    prompt = [0, *tokens_of("ab")]
    told = TokenDelta("a", prompt_logprobs=[score(id, 1) for id in prompt[1:]])
    for text, offsets in (("<end>ab", [0, 5, 6]), ("ab", [0, 0, 1])):
        (found,) = taken(writer(prompt=prompt, prompt_text=text), told, delta("c", reason=FinishReason.LENGTH))
        assert [entry.offset for entry in found.entries] == [*offsets, len(text)]


def test_an_added_token_that_the_answer_shows_has_its_bytes() -> None:
    """As <think> has, which llguidance takes for special and the detokenizer does not."""
    choice = ChoiceWriter(0, speller=Speller(Halves(), lambda id: False))
    (found,) = taken(choice, delta("<end>a", [0, ord("a")], FinishReason.LENGTH))
    assert [(entry.token.bytes, entry.offset) for entry in found.entries] == [(b"<end>", 0), (b"a", 5)]


def test_an_answers_offsets_begin_behind_the_prompt_whatever_its_tokens_spell() -> None:
    choice = writer(prompt=[0, ord(" "), ord("a")], prompt_text="a")  # as of a tokenizer that puts a space before the first word
    told = TokenDelta("a", prompt_logprobs=[score(id, 1) for id in (ord(" "), ord("a"))])
    (found,) = taken(choice, told, delta("b", reason=FinishReason.LENGTH))
    assert texts(found.entries)[-1] == ("b", 1)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("named", "reason"), [(False, "tool_calls"), (True, "stop")])
def test_calls_are_no_text(size: int, named: bool, reason: str) -> None:
    text = 'Let me see. <tool_call>\n{"name": "f", "arguments": {"a": "}\\""}}\n</tool_call>\n'
    text += '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    choice = ChoiceWriter(0, calls=(HERMES, ToolUse((), named=named)))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [TokenDelta("a", piece, [1], ["full"]) for piece in pieces]
    deltas[-1].finish_reason = FinishReason.STOP
    whole = joined(taken(choice, *deltas))
    assert (whole.text, whole.tokens, whole.reason) == ("Let me see. ", len(pieces), reason)
    assert [(part.number, part.name, part.arguments) for part in whole.calls] == [(0, "f", '{"a": "}\\""}'), (1, "g", "{}")]
    assert len({part.id for part in whole.calls} - {None}) == 2
    message = ChatAnswer("M").choice(whole)["message"]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "}\\""}'}


def test_a_call_that_the_limit_cut_is_no_reason_of_its_own() -> None:
    choice = ChoiceWriter(0, calls=(HERMES, ToolUse(())))
    (found,) = taken(choice, TokenDelta("a", '<tool_call>\n{"name": "f", "arguments": {"a"', [1], ["full"], FinishReason.LENGTH))
    assert (found.reason, found.calls[0].arguments) == ("length", '{"a"')
    held = ChoiceWriter(0, calls=(HERMES, ToolUse(())))
    (found,) = taken(held, TokenDelta("a", "a <tool", [1], ["full"], FinishReason.STOP))
    assert (found.text, found.reason) == ("a <tool", "stop")


@pytest.mark.parametrize(("cut", "reason"), [('{"a"', "stop"), ('{"a": 1}', "tool_calls")])
def test_a_call_that_a_stop_string_cut_is_no_reason_of_its_own(cut: str, reason: str) -> None:
    choice = ChoiceWriter(0, calls=(HERMES, ToolUse(())))
    end = TokenDelta("a", f'<tool_call>\n{{"name": "f", "arguments": {cut}', [1], ["full"], FinishReason.STOP, stopped_by="x")
    (found,) = taken(choice, end)
    assert (found.reason, found.calls[0].arguments) == (reason, cut)


def test_what_gathers_of_a_call_is_one_part() -> None:
    choice = ChoiceWriter(0, calls=(HERMES, ToolUse(())))
    for text in ('<tool_call>\n{"name": "f', '", "arguments": {"a"', ": 1", "}}\n</tool_call>"):
        choice.add(TokenDelta("a", text, [1], ["full"]))
    gathered = choice.take()
    assert gathered is not None
    assert [(part.number, part.name, part.arguments) for part in gathered.calls] == [(0, "f", '{"a": 1}')]


def test_who_chose_a_token_is_told_where_it_is_asked_for() -> None:
    deltas = (delta("a"), delta("b", reason=FinishReason.STOP))
    assert joined(taken(writer(trace=True), *deltas)).levels == ((ord("a"), "full"), (ord("b"), "full"))
    assert joined(taken(writer(), *deltas)).levels == ()


def test_a_completion_lists_log_probabilities() -> None:
    choice = writer(prompt=[0], prompt_text="")
    half = [2000 + EMOJI.encode()[0]]
    (found,) = taken(choice, delta("a\ufffd", [ord("a"), *half], FinishReason.LENGTH))
    lists = CompletionAnswer("M", logprobs=True).choice(found)["logprobs"]
    assert lists["tokens"] == ["<end>", "a", "bytes:\\xf0"]
    assert lists["token_logprobs"] == [None, -0.097, -half[0] / 1000]
    assert lists["top_logprobs"][:2] == [None, {"a": -0.097, "b": -0.098}]
    assert lists["text_offset"] == [0, 0, 1]
    assert CompletionAnswer("M").choice(found)["logprobs"] is None


def test_of_several_tokens_with_one_text_the_likeliest_stands() -> None:
    same = Entry(Spelled("a", b"a"), -2.0, ((Spelled("a", b"a"), -1.0), (Spelled("b", b"b"), -1.5)), 0)
    lists = CompletionAnswer("M", logprobs=True).choice(Delta(0, "a", 1, "stop", (same,)))["logprobs"]
    assert lists["top_logprobs"] == [{"a": -1.0, "b": -1.5}]


def test_a_chats_log_probabilities_have_the_bytes_of_the_content() -> None:
    choice = writer()
    chunks = [chunk for part in taken(choice, delta(f"a{EMOJI}"), delta("", [0], FinishReason.STOP, 0)) for chunk in streamed(part)]
    content = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "".join(c["delta"].get("content", "") for c in chunks)
    assert content[0] == {
        "token": "a",
        "logprob": -0.097,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.097, "bytes": [97]}, {"token": "b", "logprob": -0.098, "bytes": [98]}],
    }


def streamed(part: Delta) -> list[dict[str, Any]]:
    return [choice for chunk in ChatAnswer("M", logprobs=True).chunks(part) for choice in chunk["choices"]]


def test_a_streams_calls_have_their_place_and_their_name_once() -> None:
    parts = (CallPart(0, "call_1", "f", "{"), CallPart(0, None, None, "}"))
    sent = [streamed(Delta(0, calls=(part,)))[0]["delta"]["tool_calls"] for part in parts]
    assert sent == [
        [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{"}}],
        [{"index": 0, "function": {"arguments": "}"}}],
    ]
