"""The small model's tokenizer: whole words, single digits and single characters."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
UNKNOWN = "<|unk|>"

_CHARACTERS = ["\n", *(chr(code) for code in range(0x20, 0x7F))]
_DIGITS = [f" {digit}" for digit in string.digits]
_PIECES = Regex(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s")
"""A word, one digit or one sign, each with the space before it, or a lone space or line end."""

_CHAT_TEMPLATE = (
    "{% set questions = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% if not questions %}{{ raise_exception('there is no message of the role user; there must be one, with the question') }}{% endif %}"
    "{{ 'Question: ' + questions[-1].content | trim + '\\nSolution:' }}"
)
"""The last user message is the question; other messages are not read."""


def train_tokenizer(texts: Iterable[str], vocabulary: int = 512) -> PreTrainedTokenizerFast:
    """Return a tokenizer of exactly `vocabulary` entries: the most frequent words of the texts, every ASCII character and each digit.

    A word has its leading space in its token, so texts are the tokens joined. A word that is not in the vocabulary is spelled in
    characters, and a character that is not printable ASCII or a line end becomes `<|unk|>`. `<|end|>` is end of text and padding.
    Entries that the texts have no word for are spare special tokens. Raises ValueError for a vocabulary too small for the characters.
    """
    fixed = [END, UNKNOWN, *_CHARACTERS, *_DIGITS]
    if vocabulary < len(fixed):
        raise ValueError(f"vocabulary is {vocabulary}; it must be {len(fixed)} or more, for the characters and digits alone")
    pre_tokenizer = Split(_PIECES, behavior="isolated")
    counts = Counter(piece for text in texts for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    known = set(fixed)
    words = [piece for piece, _ in counts.most_common() if piece not in known and piece.isascii()][: vocabulary - len(fixed)]
    spares = [f"<|spare_{index}|>" for index in range(vocabulary - len(fixed) - len(words))]
    entries = [*fixed, *words, *spares]

    model = BPE({entry: index for index, entry in enumerate(entries)}, [], unk_token=UNKNOWN, ignore_merges=True)  # known words stay whole
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizer
    raw.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=spares,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
