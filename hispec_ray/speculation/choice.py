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
from collections.abc import Callable, Sequence

import torch

from hispec_ray.native import library

Choose = Callable[[torch.Tensor, Sequence[float], Sequence[int], Sequence[int]], list[int]]
"""(logits fp32 [R, V], temperatures [R], seeds [R], positions [R]) -> R token ids."""

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


def choose_torch(logits: torch.Tensor, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """The rule in torch, on any device; see the module's docstring and `Choose`."""
    scores = torch.where(logits.isnan(), -torch.inf, logits)  # a number that is none is never the best
    drawn = [i for i, temperature in enumerate(temperatures) if temperature > 0]
    if drawn:
        noise = gumbel([seeds[i] for i in drawn], [positions[i] for i in drawn], logits.shape[1], logits.device)
        scales = torch.tensor([temperatures[i] for i in drawn], dtype=torch.float32, device=logits.device).unsqueeze(1)
        scores[drawn] = scores[drawn] / scales + noise
    best = scores.max(dim=1, keepdim=True).values
    ids = torch.arange(scores.shape[1], device=scores.device)
    chosen: list[int] = torch.where(scores == best, ids, scores.shape[1]).min(dim=1).values.tolist()
    return chosen


def choose_native(threads: int) -> Choose:
    """Return the rule as a native CPU kernel with `threads` threads; bit for bit `choose_torch`.

    Raises NativeUnavailableError where the kernels cannot be built.
    """
    kernel = library.load().hispec_choose
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = (pointer, number, number, pointer, pointer, pointer, number, pointer)

    def choose(logits: torch.Tensor, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
        rows, vocabulary = logits.shape
        scales = torch.tensor(temperatures, dtype=torch.float32)
        words = torch.tensor((seeds, positions, positions))  # the last line is written over with the choices
        at, line = words.data_ptr(), 8 * rows
        kernel(logits.data_ptr(), rows, vocabulary, scales.data_ptr(), at, at + line, threads, at + 2 * line)
        ids: list[int] = words[2].tolist()
        return ids

    return choose
