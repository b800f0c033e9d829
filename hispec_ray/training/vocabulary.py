"""Which ids the exits score: the most frequent ones (FR-Spec, arXiv 2502.14856). The full depth always scores all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hispec_ray.model.weights import ModelSource
from hispec_ray.training.data import Line

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def choose_vocabulary(lines: Iterable[Line], count: int, source: ModelSource) -> torch.Tensor:
    """Return int64[V'] ascending: the `count` ids that the lines have most often where they are learned, and those that every text needs.

    These are the tokenizer's special tokens, the tokens that end a text, and the tokens of one byte, of which any text can be made.
    Where the lines have fewer ids the lowest of the others fill up, which tokenizers give to frequent pieces.
    Raises ValueError where the model has no tokenizer.
    """
    tokenizer, architecture = source.tokenizer(), source.architecture
    counts = Counter(token for line in lines for token in line.ids[max(1, line.learn_from) :])
    frequent = [token for token, _ in counts.most_common(count)]
    others = (token for token in range(architecture.vocabulary) if token not in counts)
    chosen = {*frequent, *islice(others, count - len(frequent))}
    chosen |= {*tokenizer.all_special_ids, *architecture.eos_token_ids}
    chosen |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    bytes_ = set(bytes_to_unicode().values())
    chosen |= {token for name, token in tokenizer.get_vocab().items() if name in bytes_ or _BYTE.fullmatch(name)}
    return torch.tensor(sorted(token for token in chosen if token < architecture.vocabulary))
