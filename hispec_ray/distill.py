"""`hispec distill`: the model answers prompts, and its own words become what its exits learn from."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hispec_ray.llm import LLM
from hispec_ray.request import RequestError, SamplingParams
from hispec_ray.training.claim import claim
from hispec_ray.training.reading import SUFFIXES, Record, read_records

BATCHES = (16, 128)
"""Answers that are asked for and written down together: at least, at most."""
AT_ONCE = 48
"""Of these, those that are decoded side by side."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How much text is wanted: tokens in all, at most max_tokens an answer; and how it is drawn."""

    tokens: int
    max_tokens: int
    temperature: float
    seed: int


def check_out(out: Path, prompts: Sequence[Path]) -> None:
    """Raise ValueError where `out` cannot be a file of answers: a folder, in no folder, or one that prompts are read from."""
    if out.is_dir():
        raise ValueError(f"out is '{out}', which is a folder; it must be a file")
    if not out.parent.is_dir():
        raise ValueError(f"out is '{out}' and there is no folder '{out.parent}'; make it first")
    for path in prompts:
        same = path.samefile(out) if path.exists() and out.exists() else path.resolve() == out.resolve()
        if same or (path.is_dir() and out.suffix in SUFFIXES and path.resolve() in out.resolve().parents):
            raise ValueError(f"out is '{out}', which is one of the prompts; name another file")


def read_prompts(paths: Sequence[Path], llm: LLM, chat: bool | None, max_tokens: int) -> list[tuple[int, ...]]:
    """Return the token ids of every prompt that leaves room for an answer of `max_tokens`; say on stderr how many do not.

    A .txt file has a prompt a line, a .jsonl file objects with 'prompt' or 'messages'. chat: put prompts into the model's chat template,
    where it has one if None. Raises ValueError, in one line that names the file and the line's number, where there is something else.
    """
    if chat is None:
        chat = llm.engine.tokenizer.chat_template is not None
    context = llm.engine.max_model_len
    room = context - max_tokens
    if room < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be from 1 to {context - 1} (the context, {context}, has the prompt too)")
    every = list(_encoded(paths, llm, chat))
    names = ", ".join(map(str, paths))
    if not every:
        raise ValueError(f"{names}: no prompt; valid are .txt files, a prompt a line, and .jsonl files with 'prompt' or 'messages' in each")
    found = [ids for ids in every if ids is not None and len(ids) <= room]
    left_out = len(every) - len(found)
    if not found:
        raise ValueError(f"{names}: no prompt that leaves room for {max_tokens} tokens: it may have {room} (the context is {context})")
    if left_out:
        print(f"{left_out} of {len(every)} prompts left out: they have more than {room} tokens", file=sys.stderr)
    return found


def _encoded(paths: Sequence[Path], llm: LLM, chat: bool) -> Iterator[tuple[int, ...] | None]:
    """Every prompt's ids; None for one that is too long to be encoded at all."""
    for record in read_records(paths):
        try:
            yield from map(partial(_fitting, llm), _asked(record, chat))
        except RequestError as error:
            raise ValueError(f"{record.where}: {error}") from error


def _asked(record: Record, chat: bool) -> Iterator[str | list[dict[str, Any]]]:
    """The prompts of a record: texts, and conversations for the chat template."""
    if "messages" in record.fields:
        yield record.messages()
        return
    if "prompt" not in record.fields and "text" not in record.fields:
        raise ValueError(f"{record.where}: it must have 'prompt' or 'messages'")
    # a text is a .txt file
    for text in [record.text("prompt")] if "prompt" in record.fields else re.split(r"\r?\n", record.text("text")):
        if text.strip():
            yield [{"role": "user", "content": text}] if chat else text


def _fitting(llm: LLM, prompt: str | list[dict[str, Any]]) -> tuple[int, ...] | None:
    try:
        return llm.encode(prompt) if isinstance(prompt, str) else llm.encode_chat(prompt)
    except RequestError as error:
        if error.code == "context_length_exceeded":
            return None
        raise


def distill(llm: LLM, prompts: Sequence[tuple[int, ...]], out: Path, wish: Wish) -> int:
    """Append answers to `out`, after those that are there, until it has `wish.tokens` tokens of answers; return how many it has.

    A line is `{"ids": [...], "learn_from": n}`: prompt and answer, and where the answer begins. The answers are the same whether they
    are written at once or in several goes. Prompts come again, with other seeds; at temperature 0 each comes once. What they were drawn
    with is noted in `<out>.settings.json`.
    Raises ValueError, with `out` as it was, where it was begun with something else or has lines that do not begin with these prompts, and
    OSError, with the line that was being written taken back, where it cannot be written.
    """
    jobs = range(len(prompts)) if wish.temperature == 0 else count()
    done, written = _begin(llm, prompts, out, wish)
    left = islice(jobs, done, None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("writing", total=wish.tokens, completed=written)
        while written < wish.tokens:
            least, most = BATCHES
            batch = list(islice(left, max(least, min(most, (wish.tokens - written) // wish.max_tokens))))
            if not batch:
                break
            asked = [prompts[job % len(prompts)] for job in batch]
            draws = [SamplingParams(temperature=wish.temperature, seed=_seed(wish.seed, job), max_tokens=wish.max_tokens) for job in batch]
            lines = []
            for prompt, completion in zip(asked, llm.generate(asked, draws), strict=True):
                if written >= wish.tokens:  # so that the end is the same wherever batches begin
                    break
                answer = completion.choices[0].token_ids
                lines.append({"ids": [*prompt, *answer], "learn_from": len(prompt)})
                written += len(answer)
            _append(out, lines)
            bar.update(task, completed=written)
    return written


def _seed(seed: int, job: int) -> int:
    return (seed * 1_000_003 + job) % 2**63


def _begin(llm: LLM, prompts: Sequence[tuple[int, ...]], out: Path, wish: Wish) -> tuple[int, int]:
    """Make `out` ready to be appended to; return how many whole lines it has already, and their answers' tokens."""
    with _writing(out), out.open("ab"):
        pass  # where this fails, nothing has been asked of the model yet
    if not out.is_file():  # a device
        return 0, 0
    lines, tokens, whole = _done(out, prompts)
    note = out.with_name(out.name + ".settings.json")
    if not out.stat().st_size:  # nothing has been begun
        note.unlink(missing_ok=True)
    drawn = {"seed": wish.seed, "temperature": wish.temperature, "max_tokens": wish.max_tokens}
    settings = {"model": llm.engine.source.fingerprint(), "dtype": llm.settings.model.dtype, **drawn}
    claim(note, settings, out, "a writing", "file")
    with _writing(out):
        os.truncate(out, whole)
    return lines, tokens


def _done(out: Path, prompts: Sequence[tuple[int, ...]]) -> tuple[int, int, int]:
    """Whole lines, their answers' tokens, and their bytes. What comes after them is the beginning of the next line, or ValueError."""
    whole = lines = tokens = 0
    with out.open("rb") as file:
        for line in file:
            prompt = prompts[lines % len(prompts)]
            ended = line.endswith(b"\n")
            if not (_answers(line, prompt) if ended else _begins(line, prompt)):
                raise ValueError(f"{out}, line {lines + 1}: no answer to prompt {lines % len(prompts) + 1}; name another file with --out")
            if ended:
                lines, tokens, whole = lines + 1, tokens + len(json.loads(line)["ids"]) - len(prompt), whole + len(line)
    return lines, tokens, whole


def _answers(line: bytes, prompt: tuple[int, ...]) -> bool:
    try:
        fields = json.loads(line)
        return bool(fields["learn_from"] == len(prompt) and tuple(fields["ids"][: len(prompt)]) == prompt)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def _begins(torn: bytes, prompt: tuple[int, ...]) -> bool:
    """Whether this is the beginning of a line that answers the prompt."""
    begin = json.dumps({"ids": prompt}).removesuffix("]}").encode()
    end = json.dumps({"ids": [], "learn_from": len(prompt)}).removeprefix('{"ids": [').encode()
    answer = torn.removeprefix(begin)
    if answer == torn:
        return begin.startswith(torn)
    return answer[:1] in (b"", b",", b"]") and end.startswith(answer.lstrip(b"0123456789, "))


def _append(out: Path, lines: Sequence[dict[str, Any]]) -> None:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with _writing(out), out.open("ab", buffering=0) as file:  # a buffer would be written once more when it is closed
        before = file.tell()
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            with contextlib.suppress(OSError):  # a device cannot be cut; what went wrong first says more
                file.truncate(before)
            raise


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Say in one line that `out` could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{out} cannot be written: {error.strerror or error}") from error
