"""Promises of the choice rule: known noise, one rule in two languages, ties to the lowest id, an exact draw."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch

from hispec_ray.native import library
from hispec_ray.speculation.choice import choose_native, choose_torch, gumbel, philox

BIG = 2**63 - 1

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16), dtype=torch.int64) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_the_hash_is_philox(counter: str, key: str, output: str) -> None:
    assert philox(words(counter), words(key)).tolist() == [int(word, 16) for word in output.split()]  # type: ignore[arg-type]


def native_noise(seed: int, position: int, count: int) -> torch.Tensor:
    out = np.empty(-(-count // 256) * 256, dtype=np.float32)
    kernel = library.load().hispec_gumbel
    kernel(ctypes.c_int64(seed), ctypes.c_int64(position), ctypes.c_int64(len(out)), ctypes.c_void_p(out.ctypes.data))
    return torch.from_numpy(out[:count])


@pytest.mark.parametrize("position", [0, 1, 511, 2**31, 2**32 + 5])
@pytest.mark.parametrize("seed", [0, 1, 7, 2**32, 2**32 - 1, BIG])
def test_the_noise_is_the_same_in_both_languages(seed: int, position: int) -> None:
    assert torch.equal(native_noise(seed, position, 4096), gumbel([seed], [position], 4096)[0])


def test_the_noise_is_gumbel_noise_of_the_hash() -> None:
    """Against float64: u = (23 bits of the word + 1/2) / 2**23, g = -log(-log u), word v // 4 of counter (v // 4, position), lane v % 4."""
    seed, position, count = 2**40 + 3, 2**33 + 9, 4096
    counter = (
        torch.arange(count // 4),
        torch.tensor(position & 0xFFFFFFFF),
        torch.tensor(position >> 32),
        torch.tensor(0),
    )
    lanes = philox(counter, (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32))).flatten()
    uniform = ((lanes >> 9).double() + 0.5) / 2**23
    exact = -(-uniform.log()).log()
    noise = gumbel([seed], [position], count)[0]
    # fp32: half a unit of u near 1 is 2**-24 / -log(u), so the tail is looked at relative to that
    assert ((noise.double() - exact).abs() / (1 + exact.exp())).max() < 1e-6
    assert noise.isfinite().all()


def test_the_noise_has_the_moments_of_gumbels_law() -> None:
    noise = gumbel(range(64), range(64), 4096).double()
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
    flat = noise.flatten()
    for probability in (0.01, 0.25, 0.5, 0.75, 0.99):
        assert float(flat.quantile(probability)) == pytest.approx(-math.log(-math.log(probability)), abs=0.03)


def test_seeds_positions_and_ids_have_noise_of_their_own() -> None:
    noise = gumbel([1, 2, 1, 2**32 + 1], [1, 1, 2, 1], 1000)
    assert len({tuple(row) for row in noise.tolist()}) == 4
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(4)).abs().max() < 0.15
    assert torch.equal(gumbel([1], [1], 100)[0], noise[0, :100])


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 5, 17, 255, 256, 257, 1000, 4099, 49152])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_choice_is_the_same_in_both_languages(vocabulary: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    rows = 24
    logits = torch.randn(rows, vocabulary, generator=generator) * torch.tensor([0.0, 0.1, 1.0, 30.0]).repeat(rows // 4).unsqueeze(1)
    logits[::5] = logits[::5].bfloat16().float()  # many ties
    temperatures = [0.0, 0.3, 0.8, 1.0, 2.0, 1e-3] * (rows // 6)
    seeds = [0, 7, 2**40 + 1, BIG] * (rows // 4)
    positions = [0, 1, 500, 2**31 - 1, 2**35, 49151] * (rows // 6)
    choose = choose_native(threads)
    chosen = choose(logits, temperatures, seeds, positions)
    assert chosen == choose_torch(logits, temperatures, seeds, positions)
    for row in range(rows):
        one = (logits[row : row + 1], temperatures[row : row + 1], seeds[row : row + 1], positions[row : row + 1])
        alone = choose(*one)
        assert alone == tuple(part[row : row + 1] for part in chosen), "a row's choice depends on its batch"
        noise = gumbel(seeds[row : row + 1], positions[row : row + 1], vocabulary)[0] if temperatures[row] else 0.0
        scores = logits[row] / torch.tensor(temperatures[row] or 1.0) + noise
        assert chosen.ids[row] == int((scores == scores.max()).nonzero()[0]), "not the lowest of the best"
        if vocabulary > 1:
            scores[chosen.ids[row]] = -math.inf
            assert chosen.seconds[row] == int((scores == scores.max()).nonzero()[0]), "not the lowest of the second best"


@pytest.mark.parametrize("columns", [1, 2, 40, 300, 3000])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_part_of_the_vocabulary_meets_the_same_noise(columns: int, threads: int) -> None:
    """What a part of the ids choose is what all would choose if the others' logits were minus infinity: at any temperature."""
    generator = torch.Generator().manual_seed(columns)
    ids = torch.randperm(5000, generator=generator)[:columns].sort().values
    rows = 8
    logits = torch.randn(rows, columns, generator=generator)
    everywhere = torch.full((rows, 5000), -math.inf)
    everywhere[:, ids] = logits
    law = ([0.0, 0.5, 1.0, 2.0] * 2, list(range(rows)), list(range(100, 100 + rows)))
    chosen = choose_native(threads)(logits, *law, ids)
    assert chosen == choose_torch(logits, *law, ids)
    assert chosen.ids == choose_torch(everywhere, *law).ids
    if columns > 1:
        assert chosen.seconds == choose_torch(everywhere, *law).seconds


BOTH = pytest.mark.parametrize("choose", [choose_torch, choose_native(1), choose_native(2)], ids=["torch", "native", "native, 2 threads"])


@BOTH
@pytest.mark.parametrize("best", [[0, 1], [3, 700], [255, 256], [511, 512, 999], [998, 999], [0, 999]])
def test_ties_go_to_the_lowest_id(choose, best: list[int]) -> None:  # type: ignore[no-untyped-def]
    logits = torch.linspace(-3, 0, 1000).repeat(1, 1)
    logits[0, best] = 2.5
    assert choose(logits, [0.0], [0], [0]).ids == [best[0]]
    logits[0, best] = 1e30  # the noise is lost in the rounding: a tie at any temperature
    assert choose(logits.repeat(20, 1), [0.8] * 20, list(range(20)), [3] * 20).ids == [best[0]] * 20


@BOTH
def test_logits_are_divided_by_the_temperature(choose) -> None:  # type: ignore[no-untyped-def]
    """Neighbouring floats, the larger one second: whether their quotients tie tells a division from a product with the inverse."""
    low = torch.linspace(1e30, 2e30, 2000)
    pairs = torch.stack((low, low.nextafter(torch.tensor(torch.inf))), dim=1)
    for temperature in (0.3, 0.7, 1.7):
        quotients = pairs.numpy() / np.float32(temperature)
        expected = (quotients[:, 1] > quotients[:, 0]).astype(int).tolist()
        assert sum(expected) > 0
        assert choose(pairs, [temperature] * 2000, [1] * 2000, [2] * 2000).ids == expected


@BOTH
def test_noise_may_break_a_tie_but_never_lifts_minus_infinity(choose) -> None:  # type: ignore[no-untyped-def]
    logits = torch.full((200, 600), -math.inf)
    logits[:, [5, 300, 599]] = 1.0
    chosen = choose(logits, [1.0] * 200, list(range(200)), [9] * 200).ids
    assert set(chosen) == {5, 300, 599}
    assert choose(logits[:1], [0.0], [0], [0]).ids == [5]


@BOTH
@pytest.mark.parametrize("scale", [1e30, -1e30, 1e-30, 3e38])
def test_extreme_logits_are_compared_all_the_same(choose, scale: float) -> None:  # type: ignore[no-untyped-def]
    """Where logits are huge the noise is lost in the rounding and the largest wins; where they are tiny the noise alone decides."""
    logits = torch.linspace(-1, 1, 700).repeat(50, 1) * scale
    seeds = list(range(50))
    expected = choose_torch(logits, [1.0] * 50, seeds, [3] * 50).ids
    assert choose(logits, [1.0] * 50, seeds, [3] * 50).ids == expected
    if abs(scale) > 1:
        assert set(expected) == {699 if scale > 0 else 0}
    else:
        assert expected == gumbel(seeds, [3] * 50, 700).argmax(1).tolist()


@BOTH
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_draw_is_an_exact_draw_from_the_softmax(choose, temperature: float) -> None:  # type: ignore[no-untyped-def]
    """20,000 draws over 7 tokens, over seeds at one position and over positions at one seed."""
    logits = torch.tensor([0.3, -1.0, 2.0, 1.1, 0.0, -2.5, 1.7])
    law = torch.softmax(logits.double() / temperature, -1)
    draws = 20_000
    for seeds, positions in ((range(draws), [17] * draws), ([17] * draws, range(draws))):
        chosen = choose(logits.repeat(draws, 1), [temperature] * draws, list(seeds), list(positions)).ids
        counts = torch.tensor(chosen).bincount(minlength=7).double()
        statistic = ((counts - law * draws) ** 2 / (law * draws)).sum()
        assert float(torch.special.gammaincc(torch.tensor(3.0).double(), statistic / 2)) > 0.01


def test_levels_share_the_noise() -> None:
    """Two exits with near logits choose alike far more often than two that draw for themselves would: the coupling's whole point."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(500, 50, generator=generator) * 2
    draft = full + torch.randn(500, 50, generator=generator) * 0.3
    seeds, positions = [11] * 500, list(range(500))
    chosen = [choose_torch(logits, [1.0] * 500, seeds, positions).ids for logits in (full, draft)]
    agreed = sum(one == other for one, other in zip(*chosen, strict=True))
    p, q = torch.softmax(full, -1), torch.softmax(draft, -1)
    distance = float((p - q).abs().sum(-1).mean() / 2)
    assert agreed / 500 > (1 - distance) / (1 + distance) - 0.03
    assert agreed / 500 > 2 * float((p * q).sum(-1).mean())


@BOTH
def test_what_is_no_number_is_never_chosen_where_there_are_numbers(choose) -> None:  # type: ignore[no-untyped-def]
    logits = torch.full((3, 300), torch.nan)
    logits[0, 7], logits[1, 299] = 1.0, -5.0
    for temperature in (0.0, 0.8):
        assert choose(logits, [temperature] * 3, [1] * 3, [2] * 3).ids == [7, 299, 0]  # and an id of the vocabulary at any rate
