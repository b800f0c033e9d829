"""`hispec distill`: the model answers prompts, and its own words become what its exits learn from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hispec_ray.llm import LLM
from hispec_ray.request import RequestError, SamplingParams
from hispec_ray.training.reading import read_records

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


def read_prompts(paths: Sequence[Path], llm: LLM, chat: bool | None, max_tokens: int) -> list[tuple[int, ...]]:
    """Return the token ids of every prompt that leaves room for an answer of `max_tokens`.

    A .txt file has a prompt a line, a .jsonl file objects with 'prompt' or 'messages'. chat: put prompts into the model's chat template,
    where it has one if None. Raises ValueError, in one line that names the file and the line's number, where there is something else.
    """
    if chat is None:
        chat = llm.engine.tokenizer.chat_template is not None
    room = llm.engine.max_model_len - max_tokens
    found = [ids for ids in _encoded(paths, llm, chat) if len(ids) <= room]
    if not found:
        names = ", ".join(map(str, paths))
        raise ValueError(f"{names}: no prompt that leaves room for {max_tokens} tokens in the context of {llm.engine.max_model_len}")
    return found


def _encoded(paths: Sequence[Path], llm: LLM, chat: bool) -> Iterator[tuple[int, ...]]:
    for record in read_records(paths):
        try:
            if "messages" in record.fields:
                yield llm.encode_chat(record.fields["messages"])
                continue
            if "prompt" not in record.fields and "text" not in record.fields:
                raise RequestError("it must have 'prompt' or 'messages'", None)
            # a text is a .txt file
            for text in [record.text("prompt")] if "prompt" in record.fields else record.text("text").splitlines():
                if text.strip():
                    yield llm.encode_chat([{"role": "user", "content": text}]) if chat else llm.encode(text)
        except RequestError as error:
            raise ValueError(f"{record.where}: {error}") from error


def distill(llm: LLM, prompts: Sequence[tuple[int, ...]], out: Path, wish: Wish) -> int:
    """Append answers to `out`, after those that are there, until it has `wish.tokens` tokens of answers; return how many it has.

    A line is `{"ids": [...], "learn_from": n}`: prompt and answer, and where the answer begins. The answers are the same whether they
    are written at once or in several goes. Prompts come again, with other seeds; at temperature 0 each comes once.
    Raises ValueError where `out` has lines that do not begin with these prompts, and OSError, with the line that was being written
    taken back, where it cannot be written.
    """
    jobs = range(len(prompts)) if wish.temperature == 0 else count()
    done, written = _done(out, prompts)
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
            answers = [completion.choices[0].token_ids for completion in llm.generate(asked, draws)]
            _append(out, [{"ids": [*prompt, *answer], "learn_from": len(prompt)} for prompt, answer in zip(asked, answers, strict=True)])
            written += sum(map(len, answers))
            bar.update(task, completed=written)
    return written


def _seed(seed: int, job: int) -> int:
    return (seed * 1_000_003 + job) % 2**63


def _done(out: Path, prompts: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """How many whole lines there are already, and their answers' tokens. What is no whole line at the end is cut off."""
    if not out.is_file():
        return 0, 0
    whole = lines = tokens = 0
    with out.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            prompt = prompts[lines % len(prompts)]
            if not _answers(line, prompt):
                raise ValueError(f"{out}, line {lines + 1}: no answer to prompt {lines % len(prompts) + 1}; name another file with --out")
            lines, tokens, whole = lines + 1, tokens + len(json.loads(line)["ids"]) - len(prompt), whole + len(line)
        file.truncate(whole)
    return lines, tokens


def _answers(line: bytes, prompt: tuple[int, ...]) -> bool:
    try:
        fields = json.loads(line)
        return bool(fields["learn_from"] == len(prompt) and tuple(fields["ids"][: len(prompt)]) == prompt)
    except (ValueError, LookupError, TypeError):
        return False


def _append(out: Path, lines: Sequence[dict[str, Any]]) -> None:
    try:
        with out.open("ab") as file:
            before = file.tell()
            try:
                file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
                file.flush()
            except OSError:
                file.truncate(before)
                raise
    except OSError as error:
        raise OSError(f"{out} cannot be written: {error.strerror or error}") from error
