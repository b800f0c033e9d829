"""Prompts of mixed kinds and lengths for measuring: written here, or drawn from a folder of JSON lines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_SUBJECTS = (
    "the sea", "a lighthouse", "prime numbers", "a train to the north", "bread", "the moon", "a small garden", "winter",
    "an old clock", "rivers", "bees", "a library", "volcanoes", "the colour blue", "a lost key", "chess", "tea", "maps",
)  # fmt: skip
_KINDS = (
    "Write a short story about {a} and {b}.",
    "Explain {a} to a child in three sentences.",
    "{a}, {b}, {c}, {a}, {b}, {c}, {a}, {b},",
    'def count_words(text):\n    """Return how often \'{a}\' and \'{b}\' stand in text."""\n',
    "Q: A shop sells {n} books about {a} at {m} euros each. How much is that in all?\nA: Let us work it out step by step.",
    "Translate into French: I like {a}, but not {b}.",
    "Summarise: {long}\nSummary:",
    "1. {a}\n2. {b}\n3. {c}\n4.",
    'SELECT title FROM books WHERE topic = "{a}" AND year >',
    "漢字とひらがな 🎉 {a} 🎉 {b} 🎉",
    '{{"name": "{a}", "tags": ["{b}", "{c}"], "count": {n}, "next": {{',
    "Dear Sir or Madam,\n\nI am writing to you about {a}. {long}\n",
)


def mixed(count: int, seed: int = 0) -> list[str]:
    """Return `count` prompts of about 5 to 300 tokens: stories, code, sums, lists, tables, letters, other scripts."""
    draw = random.Random(seed)
    prompts = []
    for i in range(count):
        a, b, c = draw.sample(_SUBJECTS, 3)
        long = " ".join(
            f"{draw.choice(('Once', 'Later', 'In spring', 'Far away'))} there was {draw.choice(_SUBJECTS)} beside {draw.choice(_SUBJECTS)}."
            for _ in range(draw.randint(2, 25))
        )
        prompts.append(_KINDS[i % len(_KINDS)].format(a=a, b=b, c=c, n=draw.randint(2, 99), m=draw.randint(2, 99), long=long))
    return prompts


def records(folder: Path) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return, by the file's stem, the records of each of the folder's `*.jsonl` files that have a text, each behind its text.

    A record's text is its `prompt`, `question` or first of `turns`. Raises ValueError when there is none.
    """
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        texts = [(str(r.get("prompt") or r.get("question") or next(iter(r.get("turns", [])), "")), r) for r in lines]
        found[path.stem] = [(text, record) for text, record in texts if text]
    if not any(found.values()):
        raise ValueError(f"--data is {folder}; it must be a folder with .jsonl files whose records have prompt, question or turns")
    return found


def from_folder(folder: Path, count: int, seed: int = 0) -> list[str]:
    """Return `count` prompts spread evenly over the folder's `*.jsonl` files; raises as `records`."""
    sets = [[text for text, _ in found] for found in records(folder).values()]
    for texts in sets:
        random.Random(seed).shuffle(texts)
    prompts: list[str] = []
    while len(prompts) < count and any(sets):
        for texts in sets:
            if texts and len(prompts) < count:
                prompts.append(texts.pop())
    return prompts
