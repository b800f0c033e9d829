"""Files of texts into lines of token ids: plain text, prompts with completions, chats, and ids as `hispec distill` writes them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from hispec_ray.model.weights import ModelSource
from hispec_ray.training.data import Line

KINDS = "'text', 'prompt' (and 'completion'), 'messages', or 'ids' (and 'learn_from')"
SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True, slots=True)
class Record:
    """One object of a .jsonl file, or a whole .txt file as its `text`. where: the file and the line's number, for messages."""

    where: str
    fields: Mapping[str, Any]

    def text(self, field: str) -> str:
        """Return a field that must be a text. Raises ValueError."""
        value = self.fields[field]
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {field} is {_short(value)}; it must be a string")
        return value

    def messages(self) -> list[dict[str, Any]]:
        """Return the turns of a conversation. Raises ValueError where 'messages' are something else."""
        value = self.fields["messages"]
        if not isinstance(value, list) or not all(isinstance(message, dict) and "role" in message for message in value):
            raise ValueError(f"{self.where}: messages is {_short(value)}; it must be a list of objects with 'role' and 'content'")
        return value


def read_records(paths: Iterable[Path]) -> Iterator[Record]:
    """Yield what stands in files; of a folder, in its .txt and .jsonl files, in the order of their names.

    Raises ValueError, in one line with the file and the line's number, where a file is missing, of another kind or not UTF-8, or a
    line is not a JSON object.
    """
    for path in _files(paths):
        if path.suffix == ".txt":
            yield Record(str(path), {"text": _decoded(path.read_bytes(), str(path))})
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                text = _decoded(line, where)
                if text.strip():
                    yield Record(where, _parsed(text, where))


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path} has no .txt or .jsonl file in it")
        for file in found:
            if not file.is_file():
                raise ValueError(f"{file} does not exist; a file or folder is needed")
            if file.suffix not in SUFFIXES:
                raise ValueError(f"{file} is neither .txt (plain text) nor .jsonl (a JSON object a line)")
            yield file


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not valid UTF-8 (byte {error.start})") from None


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); it must be an object a line") from None
    except ValueError:
        raise ValueError(f"{where}: it has a number of more than {sys.get_int_max_str_digits()} digits") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: {_short(fields)} is no JSON object")
    return fields


class LineReader:
    """Turns records into lines of at most `line_tokens` ids of a model, with its tokenizer where the data is not ids already.

    Plain texts, each ended by the end-of-sequence token, stand one after the other and are cut into lines of full length. The
    other kinds have lines of their own, cut at the end: of a completion all of it is learned, of a chat each turn of the assistant,
    in a line of its own with what was said before it, of ids those from `learn_from` on.
    """

    def __init__(self, source: ModelSource, line_tokens: int) -> None:
        self._source = source
        self._most = line_tokens

    def read(self, paths: Sequence[Path]) -> list[tuple[Line, ...]]:
        """Return the lines in groups: a chat's together, every other line by itself. Lines with nothing to learn are left out.

        Raises ValueError, in one line with the file and the line's number, where there is something else than the kinds above, where
        ids are not the model's, and where all files together have no line to learn from.
        """
        groups: list[tuple[Line, ...]] = []
        pack: list[int] = []
        for record in read_records(paths):
            if "text" in record.fields or ("prompt" in record.fields and "completion" not in record.fields):
                text = record.text("text" if "text" in record.fields else "prompt")
                pack += [*self._encode(record, text), *self._end()] if text.strip() else []
                while len(pack) >= self._most:
                    groups.append((Line(tuple(pack[: self._most])),))
                    del pack[: self._most]
            else:
                groups.append(tuple(self._lines(record)))
        groups.append((Line(tuple(pack)),))
        kept = [tuple(line for line in group if max(1, line.learn_from) < len(line.ids)) for group in groups]
        kept = [group for group in kept if group]
        if not kept:
            names = ", ".join(map(str, paths))
            raise ValueError(f"{names}: no text to learn from; valid are .txt files, and .jsonl files with {KINDS} in each line")
        return kept

    def _lines(self, record: Record) -> Iterator[Line]:
        if "completion" in record.fields and "prompt" in record.fields:
            prompt, completion = record.text("prompt"), record.text("completion")
            before = self._encode(record, prompt) if prompt else []
            yield self._cut([*before, *self._encode(record, completion, special=not before), *self._end()], len(before))
        elif "messages" in record.fields:
            yield from self._turns(record)
        elif "ids" in record.fields:
            yield self._ids(record)
        else:
            raise ValueError(f"{record.where}: has {_short(list(record.fields))}; it must have {KINDS}")

    def _turns(self, record: Record) -> Iterator[Line]:
        messages, tokenizer = record.messages(), self._source.tokenizer()
        if not tokenizer.chat_template:
            raise ValueError(f"{record.where}: has messages, but the model has no chat template; give 'prompt' and 'completion'")
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                before = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, tokenize=False)
                whole = tokenizer.apply_chat_template(messages[: place + 1], tokenize=False)
            except Exception as error:  # a template is a program of the model's maker and may raise anything
                said = " ".join(str(error).split())
                raise ValueError(f"{record.where}: the model's chat template refuses the messages: {said}") from error
            read, ids = (self._encode(record, text, special=False) for text in (before, whole))
            # templates may change earlier turns (leave out thoughts): learn from where the two part
            yield self._cut(ids, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(read, ids, strict=False))))

    def _ids(self, record: Record) -> Line:
        ids, learn_from = record.fields["ids"], record.fields.get("learn_from", 1)
        size = self._source.architecture.vocabulary
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError(f"{record.where}: ids is {_short(ids)}; it must be a list of whole numbers")
        wrong = [token for token in ids if not 0 <= token < size]
        if wrong:
            raise ValueError(f"{record.where}: ids has {_short(wrong[0])}; the model's are from 0 to {size - 1}")
        if type(learn_from) is not int or learn_from < 0:
            raise ValueError(f"{record.where}: learn_from is {_short(learn_from)}; it must be the index of an id, from 0")
        return self._cut(ids, learn_from)

    def _cut(self, ids: Sequence[int], learn_from: int) -> Line:
        return Line(tuple(ids[: self._most]), learn_from)

    def _encode(self, record: Record, text: str, *, special: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:  # which a tokenizer would answer with words of its own
            raise ValueError(f"{record.where}: it has half of a surrogate pair; its text must be whole characters") from None
        ids: list[int] = self._source.tokenizer().encode(text, add_special_tokens=special, verbose=False)
        return ids

    def _end(self) -> tuple[int, ...]:
        end = self._source.tokenizer().eos_token_id
        return self._source.architecture.eos_token_ids[:1] if end is None else (end,)


def split(groups: Sequence[tuple[Line, ...]], held_out: float, seed: int) -> tuple[list[Line], list[Line]]:
    """Return lines to train on and lines to hold out, about a share `held_out` of the groups; the same for the same arguments."""
    order = list(range(len(groups)))
    random.Random(f"held out {seed}").shuffle(order)
    away = set(order[: max(1, round(held_out * len(groups)))])
    train = [line for place, group in enumerate(groups) if place not in away for line in group]
    return train, [line for place in sorted(away) for line in groups[place]]


def _short(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
