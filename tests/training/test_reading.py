"""Files of texts: what becomes a line, what of it is learned, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.tiny import make_checkpoint

from hispec_ray.model.weights import ModelSource, open_model
from hispec_ray.training.data import Line
from hispec_ray.training.reading import LineReader, split
from hispec_ray.training.vocabulary import choose_vocabulary

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = 2


@pytest.fixture(scope="module")
def source(tiny_folder: Path) -> ModelSource:
    """The tiny model with a chat template."""
    source = open_model(str(tiny_folder))
    source.tokenizer().chat_template = TEMPLATE
    return source


@pytest.fixture
def read(source: ModelSource, tmp_path: Path) -> Callable[..., list[tuple[Line, ...]]]:
    """Read objects as the lines of a file, `data.jsonl`."""

    def read(*objects: object, line_tokens: int = 32) -> list[tuple[Line, ...]]:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in objects))
        return LineReader(source, line_tokens).read([path])

    return read


def learned(source: ModelSource, line: Line) -> str:
    text: str = source.tokenizer().decode(list(line.ids[max(1, line.learn_from) :]))
    return text


def test_texts_stand_one_after_the_other_with_an_end_between(source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one two")
    (tmp_path / "a.jsonl").write_text('{"text": "three"}\n\n{"prompt": "four"}\n')
    (tmp_path / "notes.md").write_text("of another kind")
    groups = LineReader(source, 7).read([tmp_path])
    encode = source.tokenizer().encode
    wanted = [*encode("three"), END, *encode("four"), END, *encode("one two"), END]
    assert [token for (line,) in groups for token in line.ids] == wanted
    assert [len(line.ids) for (line,) in groups[:-1]] == [7] * (len(groups) - 1)
    assert {line.learn_from for (line,) in groups} == {1}


def test_of_a_completion_all_is_learned_and_the_end_of_text_too(source: ModelSource, read: Callable[..., Any]) -> None:
    ((line,),) = read({"prompt": "ab", "completion": " cd"})
    assert learned(source, line) == " cd<|im_end|>"
    ((line,),) = read({"prompt": "ab", "completion": " cdefghij"}, line_tokens=4)
    assert (line.ids, line.learn_from) == (tuple(source.tokenizer().encode("ab cdefghij")[:4]), 2)


def test_of_a_chat_each_answer_is_learned_in_a_line_of_its_own(source: ModelSource, read: Callable[..., Any]) -> None:
    said = [("system", "s"), ("user", "u"), ("assistant", "first"), ("user", "v"), ("assistant", "second")]
    ((one, two),) = read({"messages": [{"role": role, "content": text} for role, text in said]}, line_tokens=200)
    assert learned(source, one) == "first<|im_end|>\n"
    assert learned(source, two) == "second<|im_end|>\n"
    assert source.tokenizer().decode(list(two.ids)).startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu")


def test_a_template_that_changes_earlier_turns_is_learned_from_where_it_differs(source: ModelSource, read: Callable[..., Any]) -> None:
    source.tokenizer().chat_template = "{% if add_generation_prompt %}ab#{% else %}ab{{ messages[-1].content }}{% endif %}"
    try:
        ((line,),) = read({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "xy"}]})
    finally:
        source.tokenizer().chat_template = TEMPLATE
    assert learned(source, line) == "xy"


def test_ids_are_taken_as_they_are(read: Callable[..., Any]) -> None:
    groups = read({"ids": [5, 6, 7], "learn_from": 2}, {"ids": [8, 9]}, {"ids": list(range(40)), "learn_from": 31})
    assert groups[:2] == [(Line((5, 6, 7), 2),), (Line((8, 9), 1),)]
    assert groups[2] == (Line(tuple(range(32)), 31),)


def test_lines_with_nothing_to_learn_are_left_out(read: Callable[..., Any]) -> None:
    kept = {"ids": [1, 2, 3]}
    assert read(kept, {"ids": [1]}, {"ids": []}, {"ids": [1, 2], "learn_from": 2}, {"ids": [0] * 50, "learn_from": 40}, {"text": " "}) == [
        (Line((1, 2, 3), 1),)
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": \n', "line 2: not JSON ("),
        ("[1]\n", "line 2: [1] is no JSON object"),
        ({"txt": "a"}, "line 2: has ['txt']; it must have 'text', 'prompt' (and 'completion'), 'messages', or 'ids' (and 'learn_from')"),
        ({"text": 5}, "line 2: text is 5; it must be a string"),
        ({"prompt": "a", "completion": None}, "line 2: completion is None; it must be a string"),
        ({"messages": "hi"}, "line 2: messages is 'hi'; it must be a list of objects with 'role' and 'content'"),
        ({"messages": 5}, "line 2: messages is 5; it must be a list of objects with 'role' and 'content'"),
        ({"messages": [5]}, "line 2: messages is [5]; it must be a list of objects with 'role' and 'content'"),
        ({"text": "Tom \ud800 has"}, "line 2: it has half of a surrogate pair; its text must be whole characters"),
        ({"messages": [{"role": role, "content": "\ud800"} for role in ("user", "assistant")]}, "line 2: it has half of a surrogate pair"),
        ('{"ids": [' + "1" * 5000 + "]}\n", "line 2: it has a number of more than 4300 digits"),
        ({"ids": [1, 300]}, "line 2: ids has 300; the model's are from 0 to 299"),
        ({"ids": [1, -1]}, "line 2: ids has -1; the model's are from 0 to 299"),
        ({"ids": [1, True]}, "line 2: ids is [1, True]; it must be a list of whole numbers"),
        ({"ids": [1, 2], "learn_from": "x"}, "line 2: learn_from is 'x'; it must be the index of an id, from 0"),
    ],
)
def test_a_bad_line_is_named_in_one_line(read: Callable[..., Any], tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  the message is compared below
        read({"text": "good"}, line)
    assert str(error.value).startswith(f"{tmp_path / 'data.jsonl'}, {message}")
    assert "\n" not in str(error.value)


def test_bad_files_are_named_in_one_line(source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("a")
    (tmp_path / "bytes.txt").write_bytes(b"ab\xff")
    (tmp_path / "blank.txt").write_text(" \n")
    for name, message in {
        "none.txt": "does not exist; a file or folder is needed",
        "empty": "has no .txt or .jsonl file in it",
        "a.csv": "is neither .txt (plain text) nor .jsonl (a JSON object a line)",
        "bytes.txt": "not valid UTF-8 (byte 2)",
        "blank.txt": "no text to learn from; valid are .txt files, and .jsonl files with 'text', ",
    }.items():
        with pytest.raises(ValueError) as error:  # noqa: PT011  the message is compared below
            LineReader(source, 8).read([tmp_path / name])
        assert str(error.value).startswith(str(tmp_path / name))
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_a_chat_needs_a_template(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(ValueError, match="line 1: has messages, but the model has no chat template; give 'prompt' and 'completion'"):
        LineReader(open_model(str(tiny_folder)), 8).read([tmp_path / "chat.jsonl"])


def test_ids_need_no_tokenizer(tmp_path: Path) -> None:
    source = open_model(str(make_checkpoint(tmp_path / "model", "opt")))
    (tmp_path / "a.jsonl").write_text('{"ids": [3, 4, 5]}')
    assert LineReader(source, 8).read([tmp_path / "a.jsonl"]) == [(Line((3, 4, 5), 1),)]


def test_the_split_is_the_same_again_and_keeps_a_chat_together() -> None:
    groups = [tuple(Line((group, turn)) for turn in range(3)) for group in range(50)]
    train, away = split(groups, 0.1, seed=3)
    assert len(away) == 15
    assert {line.ids[0] for line in away}.isdisjoint(line.ids[0] for line in train)
    assert sorted(line.ids for line in train + away) == [line.ids for group in groups for line in group]
    assert split(groups, 0.1, seed=3) == (train, away)
    assert split(groups, 0.1, seed=4)[1] != away
    assert len(split(groups[:5], 0.01, seed=0)[1]) == 3  # never none


def test_a_vocabulary_has_what_is_frequent_and_what_every_text_needs(source: ModelSource) -> None:
    lines = [Line((270, 280, 280, 281, 281, 282), 1), Line((290, 290, 290, 290, 280, 281), 4)]
    chosen = choose_vocabulary(lines, 2, source)
    tokenizer = source.tokenizer()
    needed = {0, 1, 2, *(tokenizer.convert_tokens_to_ids(token) for token in "azAZ09Ġ")}
    assert needed <= set(chosen.tolist())
    assert set(chosen.tolist()) - set(range(259)) == {280, 281}  # 3 special tokens and 256 bytes; 290 is read, never learned
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == sorted(chosen.tolist())
    more = choose_vocabulary([Line((270, 280, 280))], 265, source)
    assert more.tolist() == [*range(264), 280]  # the lowest fill up
