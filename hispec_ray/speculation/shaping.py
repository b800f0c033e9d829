"""What a request does to the distribution before a token is drawn: grammar, biases, penalties, filters.

Every level does the same to its own logits.

At each position the tokens before it count, the tentative ones among them; a rejected token is forgotten with its row. A row is shaped by
itself, in double precision where it matters, so that its result does not depend on which rows stand beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from hispec_ray.core.plan import StepPlan
from hispec_ray.request import Shape, TokenLogprob
from hispec_ray.speculation.grammar import Grammars, Walk

_FEW = 256  # candidates that are sorted first: nearly always enough to fill top_p


class _Said:
    """What a sequence has said: known tokens, how often each is in the answer, and every id in prompt or answer.

    walk: the grammar's state behind the answer, where there is a grammar. good: how many of the tokens that came last it could follow.
    """

    def __init__(self, shape: Shape, walk: Walk | None) -> None:
        self.known = 0
        self.answer: Counter[int] = Counter()
        self.ids: set[int] = set()
        self.walk = walk
        self.good = 0
        self._answer_from = shape.answer_from
        self._counts = shape.counts

    def read(self, tokens: Sequence[int]) -> None:
        answer = tokens[max(0, self._answer_from - self.known) :]
        self.known += len(tokens)
        if self._counts:
            self.answer.update(answer)
            self.ids.update(tokens)
        if self.walk:
            self.good = len(tokens) - len(answer) + self.walk.read(answer)


class Shaper:
    """Shapes rows of logits, and keeps what it takes of the texts of those sequences whose shape depends on them.

    grammars: compiles those of sequences that have one.
    """

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._said: dict[int, _Said] = {}

    def begin(self, plan: StepPlan) -> None:
        """Take note of the plan's new tokens, histories and endings."""
        for id in plan.ended:
            self._said.pop(id, None)
        for sequence in plan.sequences:
            shape = sequence.shape
            if shape is not None and (shape.counts or shape.grammar is not None):
                said = self._said.get(sequence.id)
                if said is None or sequence.history is not None:
                    said = self._said[sequence.id] = _Said(shape, self._walk(shape.grammar))
                    said.read(sequence.history or ())
                said.read(sequence.tokens[said.known - sequence.start :])

    def _walk(self, grammar: str | None) -> Walk | None:
        if grammar is None:
            return None
        if self._grammars is None:
            raise ValueError("a sequence has a grammar, and there is no tokenizer to read it with")
        return self._grammars.walk(grammar)

    def failed(self, id: int) -> int | None:
        """Return how many of the tokens committed last still follow the sequence's grammar, where it failed behind them: see `Walk`."""
        said = self._said.get(id)
        return said.good if said is not None and said.walk is not None and said.walk.failed else None

    def committed(self, id: int, tokens: Sequence[int]) -> None:
        """Take note of what the full depth has written."""
        said = self._said.get(id)
        if said is not None:
            said.read(tokens)

    def shape(
        self,
        id: int,
        shape: Shape,
        temperature: float,
        logits: torch.Tensor,
        tentative: Sequence[int],
        position: int,
        vocabulary: torch.Tensor | None,
    ) -> None:
        """Shape one row in place: fp32 `[V']`, of the token at `position`, after the known tokens and the tentative ones.

        vocabulary: int64[V'], ascending, what the columns stand for, as in `Choose`.
        """
        said = self._said.get(id)
        if said is not None and said.walk:
            allowed = said.walk.allowed(tentative)
            if allowed is not None:
                of_columns = allowed[: len(logits)] if vocabulary is None else allowed[vocabulary.cpu()]
                logits.masked_fill_(~of_columns.to(logits.device), -math.inf)
        if shape.logit_bias:
            _add(logits, [id for id, _ in shape.logit_bias], [value for _, value in shape.logit_bias], vocabulary)
        if position < shape.late_from:
            _add(logits, shape.late, [-math.inf] * len(shape.late), vocabulary)
        if said is not None:
            if shape.repetition_penalty != 1:
                columns, _ = _columns(sorted({*said.ids, *tentative}), None, vocabulary, logits.device)
                found = logits[columns]
                logits[columns] = torch.where(found > 0, found / shape.repetition_penalty, found * shape.repetition_penalty)
            if shape.presence_penalty or shape.frequency_penalty:
                counts = said.answer + Counter(tentative)
                ids = sorted(counts)
                _add(logits, ids, [-shape.presence_penalty - shape.frequency_penalty * counts[id] for id in ids], vocabulary)
        if temperature > 0 and shape.filters:
            logits.masked_fill_(~kept(logits.double() / temperature, shape), -math.inf)


def kept(scores: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return which tokens may be drawn, bool `[V]`, for scores (logits / temperature) fp64 `[V]`: min_p, then top_k, then top_p."""
    best = scores.max()
    if not torch.isfinite(best):
        return torch.ones_like(scores, dtype=torch.bool)
    least = best + math.log(shape.min_p) if shape.min_p else torch.full_like(best, -math.inf)
    if 0 < shape.top_k < len(scores):
        least = torch.maximum(least, scores.topk(shape.top_k).values[-1])
    if shape.top_p < 1:
        among = scores.masked_fill(scores < least, -math.inf)
        total = among.logsumexp(0)
        for count in (min(_FEW, len(among)), len(among)):
            values = among.topk(count).values
            enough = (values - total).exp().cumsum(0) >= shape.top_p
            if enough.any():
                least = torch.maximum(least, values[int(enough.int().argmax())])
                break
    return scores >= least


def logprobs(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens, one for each row of logits fp32 `[R, V]`, with those of the `count` likeliest."""
    scores = logits.double()
    # Row by row: over several rows at once torch adds in another order, and the last bits would tell how many there were.
    scores = scores - torch.stack([row.logsumexp(dim=0) for row in scores])[:, None]
    own = scores[torch.arange(len(tokens)), torch.tensor(tokens, device=scores.device)].tolist()
    values, ids = scores.topk(min(count, scores.shape[1]), dim=1)
    tops = [tuple(zip(row, line, strict=True)) for row, line in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(value, top) for value, top in zip(own, tops, strict=True)]


def _add(logits: torch.Tensor, ids: Sequence[int], values: Sequence[float], vocabulary: torch.Tensor | None) -> None:
    columns, places = _columns(ids, values, vocabulary, logits.device)
    logits[columns] += places


def _columns(
    ids: Sequence[int], values: Sequence[float] | None, vocabulary: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns of those ids that have one, and their values, fp32."""
    found = torch.tensor(ids, dtype=torch.int64)
    given = torch.tensor([0.0] * len(ids) if values is None else values, dtype=torch.float32)
    if vocabulary is not None:
        places = torch.searchsorted(vocabulary, found).clamp(max=len(vocabulary) - 1)
        there = vocabulary[places] == found
        found, given = places[there], given[there]
    return found.to(device), given.to(device)
