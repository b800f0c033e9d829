"""`hispec phrases`: what usually follows what in texts, counted, for a lookup to begin with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from hispec_ray.core.plan import IntArray
from hispec_ray.model.weights import open_model
from hispec_ray.speculation.phrases import AFTER, LENGTHS, VOCABULARY, name_of
from hispec_ray.training.data import Line
from hispec_ray.training.output import save_tensors, whole
from hispec_ray.training.reading import LineReader

LEAST_COUNT = 2
"""How often a token must have followed an n-gram."""
LEAST_SHARE = 0.3
"""How often it must have, of all times that the n-gram was there: a lookup weighs candidates by their kind, which poor ones would spoil."""


def write_phrases(model: str, data: Sequence[Path], out: Path, most: int) -> tuple[int, int]:
    """Count texts and write the file; return how many tokens were learned from, and how many n-grams are kept, at most `most`.

    data: as `LineReader` reads it; of `hispec distill` it is the model's own text, which is what pays.
    Raises ValueError, in one line, where the model or the data is not as it should be, and OSError where the file cannot be written.
    """
    if not out.parent.is_dir() or (out.exists() and not out.is_file()):
        raise ValueError(f"out is '{out}'; it must be a file in a folder that exists")
    if any(path.exists() and out.exists() and path.samefile(out) for path in data):
        raise ValueError(f"out is '{out}', which is data; name another file")
    source = open_model(model, weights=False)
    groups = LineReader(source, source.architecture.attention_limit).read(data)
    lines = [line for group in groups for line in group]
    tensors = count(lines, most, source.architecture.vocabulary)
    kept = sum(len(tensors[name_of(length)]) for length in LENGTHS)
    if not kept:
        raise ValueError(f"{', '.join(map(str, data))}: nothing is said twice there; phrases are counted in texts of many thousand tokens")
    with whole(out, scratch := out.with_name(out.name + ".writing")):
        save_tensors(tensors, scratch, {VOCABULARY: str(source.architecture.vocabulary)})
        scratch.rename(out)
    return sum(len(line.ids) - max(1, line.learn_from) for line in lines), kept


def count(lines: Sequence[Line], most: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return the tensors that `load_phrases` reads: of n-grams the `most` that foretell most tokens."""
    grams: dict[int, IntArray] = {}
    times: dict[int, IntArray] = {}
    for length in LENGTHS:
        windows, counts, ranks, totals = _followers(lines, length)
        good = (ranks == 0) & (counts >= LEAST_COUNT) & (counts >= LEAST_SHARE * totals)
        grams[length], times[length] = windows[good], counts[good]
    every = np.concatenate([times[length] for length in reversed(LENGTHS)])
    kept = np.zeros(len(every), dtype=bool)
    kept[np.argsort(-every, kind="stable")[:most]] = True  # of equally frequent ones the shorter
    windows, _, ranks, _ = _followers(lines, 1)
    firsts, seconds = windows[ranks == 0], windows[ranks == 1]
    after = np.column_stack([firsts, firsts[:, 1]])
    after[np.searchsorted(firsts[:, 0], seconds[:, 0]), 2] = seconds[:, 1]
    found = {AFTER: after}
    for length in reversed(LENGTHS):
        mine, kept = np.split(kept, [len(grams[length])])
        found[name_of(length)] = grams[length][mine]
    return {name: torch.from_numpy(part).to(torch.uint16 if vocabulary <= 2**16 else torch.int32) for name, part in found.items()}


def _followers(lines: Sequence[Line], length: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return every n-gram with every token that followed it where it is to be learned, and how often it did.

    windows `[N, length + 1]`, sorted; counts `[N]`; ranks `[N]`: 0 for the token that followed its n-gram most often; totals `[N]`: how
    often something did.
    """
    parts = [np.empty((0, length + 1), dtype=np.int64)]
    for line in lines:
        if len(line.ids) > length:
            parts.append(sliding_window_view(np.array(line.ids), length + 1)[max(0, line.learn_from - length) :])
    windows, counts = np.unique(np.concatenate(parts), axis=0, return_counts=True)
    news = np.ones(len(windows), dtype=bool)
    news[1:] = (windows[1:, :-1] != windows[:-1, :-1]).any(axis=1)
    groups = np.cumsum(news) - 1
    starts = np.flatnonzero(news)
    order = np.lexsort((-counts, groups))  # stable: of equals the lowest id
    ranks = np.empty(len(windows), dtype=np.int64)
    ranks[order] = np.arange(len(windows)) - starts[groups]
    totals = np.bincount(groups, weights=counts, minlength=len(starts))[groups].astype(np.int64)
    return windows, counts, ranks, totals
