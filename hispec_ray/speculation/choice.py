"""The choice rule: which token follows, at every level and at every temperature.

The token at position t is the v with the largest `logits[v] / T + g(seed, t, v)`, the lowest id among equals.
g is standard Gumbel noise from a counter-based hash, so the choice is an exact draw from softmax(logits / T)
(the Gumbel-max trick; Maddison et al., arXiv 1411.0030); at T = 0, g is 0 and the division is left out. Every
level meets the same noise at the same position, so a guess is accepted exactly when the deeper level would have
chosen it, however the guess was made (drafter-invariant coupling; Daliri et al., arXiv 2408.07978).

The noise has 23 bits of randomness and uses only operations that IEEE 754 rounds exactly (no library logarithm, no
fused multiply-add): the native kernel and torch give the same bits, whatever the shape.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from hispec_ray.native import library


class Choices(NamedTuple):
    """What rows chose: ids, the runners-up, and by how much a runner-up's score (logit / T + noise) falls short: how sure a choice is.

    scores, second_scores: of both, where the rule says them.
    """

    ids: list[int]
    seconds: list[int]
    gaps: list[float]
    scores: Sequence[float] = ()
    second_scores: Sequence[float] = ()


class Choose(Protocol):
    """The rule for a batch of rows."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperatures: Sequence[float],
        seeds: Sequence[int],
        positions: Sequence[int],
        vocabulary: torch.Tensor | None = None,
    ) -> Choices:
        """Return R choices for logits fp32 `[R, V]`, each row with its own temperature, seed and position (that of the token chosen).

        vocabulary: int64[V], ascending, the ids that the columns stand for; 0 .. V - 1 where None. A runner-up of a vocabulary of one
        is the choice itself, with a gap of infinity.
        """


_WORD = 0xFFFFFFFF
_LOG_POLYNOMIAL = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


def philox(counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the four output words, stacked last, of Philox4x32-10 (Salmon et al., SC 2011).

    counter, key: int64 tensors that broadcast, each holding a 32-bit word.
    """
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57  # 64-bit products; wrapping keeps their bits
        a, b, c, d = ((q >> 32) & _WORD) ^ b ^ k0, q & _WORD, ((p >> 32) & _WORD) ^ d ^ k1, p & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack(torch.broadcast_tensors(a, b, c, d), dim=-1)


def _log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of normal fp32 x > 0 (the polynomial of Cephes' logf), one rounding an operation."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    low = m < 0.707106781186547524
    e = (exponent - low.int()).float()
    m = (m - 1.0) + torch.where(low, m, torch.zeros_like(m))
    z = m * m
    p = torch.full_like(m, _LOG_POLYNOMIAL[0])
    for coefficient in _LOG_POLYNOMIAL[1:]:
        p = p * m + coefficient
    p = p * m * z
    p = p + e * -2.12194440e-4
    p = p + z * -0.5
    return (m + p) + e * 0.693359375


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocabulary: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the noise g(seed, position, v), fp32 `[R, vocabulary]`, for R pairs of seed and position."""
    seed, position = (torch.tensor(list(values), dtype=torch.int64, device=device).unsqueeze(1) for values in (seeds, positions))
    first = torch.arange(-(-vocabulary // 4), dtype=torch.int64, device=device).unsqueeze(0)
    words = philox(
        (first, position & _WORD, (position >> 32) & _WORD, torch.zeros_like(first)),
        (seed & _WORD, (seed >> 32) & _WORD),
    ).flatten(1)[:, :vocabulary]
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return -_log(-_log(uniform))


def choose_torch(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    vocabulary: torch.Tensor | None = None,
) -> Choices:
    """The rule in torch, on any device; see the module's docstring and `Choose`."""
    device = logits.device
    columns = logits.shape[1]
    ids = torch.arange(columns, device=device) if vocabulary is None else vocabulary.to(device)
    scores = torch.where(logits.isnan(), -torch.inf, logits)  # a number that is none is never the best
    drawn = [i for i, temperature in enumerate(temperatures) if temperature > 0]
    if drawn:
        most = columns if vocabulary is None else int(vocabulary[-1]) + 1
        noise = gumbel([seeds[i] for i in drawn], [positions[i] for i in drawn], most, device)
        scales = torch.tensor([temperatures[i] for i in drawn], dtype=torch.float32, device=device).unsqueeze(1)
        scores[drawn] = scores[drawn] / scales + (noise if vocabulary is None else noise[:, ids])
    place = torch.arange(columns, device=device)

    def best_of(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = scores.max(dim=1, keepdim=True).values
        return best[:, 0], torch.where(scores == best, place[: scores.shape[1]], columns).min(dim=1).values

    value, column = best_of(scores)
    chosen: list[int] = ids[column].tolist()
    if columns == 1:
        return Choices(chosen, chosen, [float("inf")] * len(chosen), value.tolist(), [float("-inf")] * len(chosen))
    others = place.expand(len(scores), -1)[place != column[:, None]].view(len(scores), columns - 1)
    second_value, second = best_of(scores.gather(1, others))
    gaps = torch.where(second_value == value, 0.0, value - second_value)  # also of two minus infinities
    runners_up = ids[others.gather(1, second[:, None])[:, 0]].tolist()
    return Choices(chosen, runners_up, gaps.tolist(), value.tolist(), second_value.tolist())


def choose_together(choose: Choose, gather: Callable[[torch.Tensor], torch.Tensor]) -> Choose:
    """Return the rule over the columns of several ranks: each finds its own best two, and all compare the same numbers.

    gather: every rank's fp32 tensor, by rank, as `Collective.gather`. Rows that all ranks have whole come out as by `choose` alone.
    The ids are compared as fp32, exact below 2 ** 24.
    """

    def together(
        logits: torch.Tensor,
        temperatures: Sequence[float],
        seeds: Sequence[int],
        positions: Sequence[int],
        vocabulary: torch.Tensor | None = None,
    ) -> Choices:
        mine = choose(logits, temperatures, seeds, positions, vocabulary)
        found = gather(torch.tensor([mine.scores, mine.ids, mine.second_scores, mine.seconds], dtype=torch.float32, device=logits.device))
        scores, ids = found[:, 0::2].flatten(0, 1).T.cpu(), found[:, 1::2].flatten(0, 1).T.cpu()  # [R, 2 * ranks]
        best, best_ids = _first(scores, ids)
        others = torch.where(ids == best_ids[:, None], -torch.inf, scores)
        second, second_ids = _first(others, torch.where(ids == best_ids[:, None], torch.inf, ids))
        alone = second_ids.isinf()  # a vocabulary of one
        second_ids = torch.where(alone, best_ids, second_ids)
        gaps = torch.where(alone, torch.inf, torch.where(second == best, 0.0, best - second))
        return Choices(best_ids.long().tolist(), second_ids.long().tolist(), gaps.tolist(), best.tolist(), second.tolist())

    return together


def _first(scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row, and the lowest of the ids that have it."""
    best = scores.max(dim=1).values
    return best, torch.where(scores == best[:, None], ids, torch.inf).min(dim=1).values


class _Law(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("temperatures", "seeds", "positions"))


class _Chosen(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("ids", "seconds", "gaps", "scores", "second_scores"))


def choose_native(threads: int) -> Choose:
    """Return the rule as a native CPU kernel with `threads` threads; bit for bit `choose_torch`.

    Raises NativeUnavailableError where the kernels cannot be built.
    """
    kernel = library.load().hispec_choose
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = (pointer, number, number, pointer, pointer, number, pointer)
    reference = ctypes.byref

    def choose(
        logits: torch.Tensor,
        temperatures: Sequence[float],
        seeds: Sequence[int],
        positions: Sequence[int],
        vocabulary: torch.Tensor | None = None,
    ) -> Choices:
        rows, columns = logits.shape
        # arrays of the standard library: tensors would take longer to make than the kernel runs
        words = array("q", seeds)
        words.extend(positions)
        words.frombytes(bytes(16 * rows))  # the choices and the runners-up
        floats = array("f", temperatures)
        floats.frombytes(bytes(12 * rows))  # the gaps and both scores
        at, line, scales = words.buffer_info()[0], 8 * rows, floats.buffer_info()[0]
        law = _Law(scales, at, at + line)
        chosen = _Chosen(at + 2 * line, at + 3 * line, *(scales + 4 * rows * part for part in (1, 2, 3)))
        ids = None if vocabulary is None else vocabulary.data_ptr()
        kernel(logits.data_ptr(), rows, columns, ids, reference(law), threads, reference(chosen))
        numbers = floats.tolist()
        ends = [part * rows for part in range(1, 5)]
        gaps, scores, second_scores = (numbers[begin:end] for begin, end in pairwise(ends))
        return Choices(words[2 * rows : 3 * rows].tolist(), words[3 * rows :].tolist(), gaps, scores, second_scores)

    return choose
