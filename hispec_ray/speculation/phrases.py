"""Phrases: what usually follows what in texts of a kind, so that a lookup knows something from its first word on.

A file of them is made from texts beforehand (`hispec phrases`). The drafter of REST (He et al., arXiv 2311.08252) searches such texts
themselves; here only what they said more than once is kept, counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from hispec_ray.config import DEFAULT_MODEL

LENGTHS = (6, 4, 3, 2)
"""Lengths of the n-grams that a lookup knows, longest first."""
PAIRS = "after"
"""The tensor with what follows single tokens; those of n-grams have the names of `name_of`."""
_OWN = Path(__file__).with_name("smollm2-135m-instruct.phrases.safetensors")


@dataclass(frozen=True, slots=True)
class Phrases:
    """follows: by n-gram, the token that followed it most often; after: by token, the two that did, the same twice where only one has."""

    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    after: dict[int, tuple[int, int]] = field(default_factory=dict)


NONE = Phrases()


def name_of(length: int) -> str:
    """Return the name of the tensor with n-grams of this length, `[N, length + 1]`: each with what follows it."""
    return f"grams.{length}"


def load_phrases(path: str, vocabulary: int | None = None) -> Phrases:
    """Read a file of phrases, or those that come with the package for a model of this name. vocabulary: how many ids the model has.

    Raises ValueError, in one line that names `speculation.phrases`, where the file cannot be read, is of another kind, or has ids that
    the model does not have. Another tokenizer with as many ids is not noticed: its guesses are poor, and the text is the same.
    """
    file = _OWN if path == DEFAULT_MODEL else Path(path).expanduser()
    try:
        changed = file.stat().st_mtime_ns
        most, phrases = _read(file, changed)
    except OSError as error:
        raise ValueError(
            f"speculation.phrases is {path!r}: {error.strerror or error}; it must be a file that `hispec phrases` wrote"
        ) from error
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"speculation.phrases is {path!r}, which is no file of phrases: {' '.join(str(error).split())}") from error
    if vocabulary is not None and most >= vocabulary:
        raise ValueError(
            f"speculation.phrases is {path!r}, made for another model: it has id {most}; this one's are from 0 to {vocabulary - 1}"
        )
    return phrases


@lru_cache(maxsize=2)
def _read(file: Path, changed: int) -> tuple[int, Phrases]:
    """The highest id and the phrases. changed: when the file was, in ns."""
    tensors = load_file(file)
    shapes = {PAIRS: 3} | {name_of(length): length + 1 for length in LENGTHS}
    for name, columns in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise ValueError(f"it has no {name}")
        if tensor.ndim != 2 or tensor.shape[1] != columns or tensor.dtype not in (torch.uint16, torch.int32):
            raise ValueError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; it must be uint16 or int32 in {columns} columns")
    lists = {name: tensors[name].numpy() for name in shapes}
    if any(len(part) and part.min() < 0 for part in lists.values()):
        raise ValueError("it has ids below 0")
    follows = {tuple(gram): token for length in LENGTHS for *gram, token in lists[name_of(length)].tolist()}
    most = max((int(part.max()) for part in lists.values() if len(part)), default=0)
    return most, Phrases(follows, {token: (first, second) for token, first, second in lists[PAIRS].tolist()})
