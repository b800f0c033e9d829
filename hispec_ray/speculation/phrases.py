"""Phrases: what usually follows what in texts of a kind, so that a lookup knows something from its first word on.

A file of them is made from texts beforehand (`hispec phrases`). The drafter of REST (He et al., arXiv 2311.08252) searches such texts
themselves; here what followed n-grams more than once is counted beforehand, and what followed single tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from struct import Struct

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from hispec_ray.config import DEFAULT_MODEL

LENGTHS = (6, 4, 3, 2)
"""Lengths of the n-grams that a lookup knows, longest first."""
_TOKEN = Struct("=i")
TOKEN_BYTES = _TOKEN.size
packed = _TOKEN.pack
"""Returns a token as bytes. N-grams are bytes since these keep their hash, and tuples do not."""
AFTER = "after"
"""The tensor with what follows single tokens; those of n-grams have the names of `name_of`."""
VOCABULARY = "vocabulary"
"""The file's metadata say under this name how many ids the model has."""
_OWN = Path(__file__).with_name("smollm2-135m-instruct.phrases.safetensors")


@dataclass(frozen=True, slots=True, eq=False)
class Phrases:
    """grams: by length, `[N, length + 1]`: n-grams, each with the token that followed it most often.

    after: `[N, 3]`: a token and the two that followed it most often, the same twice where only one has.
    """

    grams: Mapping[int, NDArray[np.int32]]
    after: NDArray[np.int32]


NONE = Phrases({}, np.empty((0, 3), dtype=np.int32))


def name_of(length: int) -> str:
    """Return the name of the tensor with n-grams of this length, `[N, length + 1]`: each with what follows it."""
    return f"grams.{length}"


def load_phrases(path: str, vocabulary: int | None = None) -> Phrases:
    """Read a file of phrases, or those that come with the package for a model of this name. vocabulary: how many ids the model has.

    Raises ValueError, in one line that names `speculation.phrases`, where the file cannot be read, is of another kind, or is for a model
    with another number of ids. Another tokenizer with as many ids is not noticed: its guesses are poor, and the text is the same.
    """
    file = _OWN if path == DEFAULT_MODEL else Path(os.path.expanduser(path))
    given = f"speculation.phrases is {path!r}"
    try:
        ids, phrases = _read(file, file.stat().st_mtime_ns)
    except OSError as error:
        raise ValueError(f"{given}: {error.strerror or error}; it must be a file that `hispec phrases` wrote") from error
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{given}, which is no file of phrases: {' '.join(str(error).split())}") from error
    if vocabulary not in (None, ids):
        raise ValueError(f"{given}, made for another model: one with {ids} ids; this one has {vocabulary}")
    return phrases


@lru_cache(maxsize=2)
def _read(file: Path, changed: int) -> tuple[int, Phrases]:
    """How many ids the model has, and the phrases. changed: when the file was, in ns."""
    shapes = {AFTER: 3} | {name_of(length): length + 1 for length in LENGTHS}
    with safe_open(file, framework="pt") as content:
        named, vocabulary = set(content.keys()), (content.metadata() or {}).get(VOCABULARY, "")
        if missing := sorted(shapes.keys() - named):
            raise ValueError(f"it has no {missing[0]}")
        tensors = {name: content.get_tensor(name) for name in shapes}
    if not vocabulary.isdecimal():
        raise ValueError(f"its {VOCABULARY} is {vocabulary!r}; it must be a number of ids")
    for name, columns in shapes.items():
        tensor = tensors[name]
        if tensor.ndim != 2 or tensor.shape[1] != columns or tensor.dtype not in (torch.uint16, torch.int32):
            raise ValueError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; it must be uint16 or int32 in {columns} columns")
        if len(tensor) and not 0 <= tensor.numpy().min() <= tensor.numpy().max() < int(vocabulary):
            raise ValueError(f"{name} has ids outside 0 to {int(vocabulary) - 1}")
    numbers = {name: np.ascontiguousarray(tensor.numpy(), dtype=np.int32) for name, tensor in tensors.items()}
    return int(vocabulary), Phrases({length: numbers[name_of(length)] for length in LENGTHS}, numbers[AFTER])
