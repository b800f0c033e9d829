"""Whether a model fits a cluster: where each rank would go and what it takes there, from configs and descriptions alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hispec_ray.config import ParallelSettings, Settings, StageSettings
from hispec_ray.model.architecture import Architecture
from hispec_ray.shard.machine import Machine
from hispec_ray.shard.placement import Place, bundles_of
from hispec_ray.shard.shard import WORKSPACE_BYTES, Needs, cache_blocks, needs_of, resources_of_rank, wants_native
from hispec_ray.shard.stages import Stage, deepest_exit, stages_of

_GIB = 2**30
_MOST_STAGES = 8


@dataclass(frozen=True, slots=True)
class RankFit:
    """One process.

    machine: which, by number; gpu: of that machine, None on its CPUs; free_bytes: of that GPU or machine, before the model is there.
    cache_bytes: of as many blocks as every rank has room for. left_bytes: of the GPU or machine, with all that is placed there; below 0
        where there is too little.
    """

    stage: int
    rank: int
    layers: range
    machine: int
    gpu: int | None
    needs: Needs
    free_bytes: int
    cache_bytes: int = 0
    left_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """A layout on machines.

    parallel: the layout, None for one process, the engine's own. ranks: none where there are too few devices. blocks: of the cache, the
        same for all ranks. max_model_len: tokens of a sequence at most. problem: why it does not fit, in a line; empty where it does.
    """

    parallel: ParallelSettings | None
    ranks: tuple[RankFit, ...]
    blocks: int
    block_size: int
    max_model_len: int
    problem: str = ""

    @property
    def tokens(self) -> int:
        """How many tokens the cache holds."""
        return self.blocks * self.block_size

    def sequences(self, length: int) -> int:
        """Return how many sequences of so many tokens the cache holds at a time; 0 where not one."""
        return self.blocks // -(-length // self.block_size)


def fit(settings: Settings, architecture: Architecture, machines: Sequence[Machine]) -> Fit:
    """Return where the ranks of a layout would go, and what they take.

    Raises ValueError where the settings do not fit the model, see `stages_of` and `levels_for`. Where they do not fit the machines, the
    result says so.
    """
    a = architecture
    longest = settings.model.max_model_len or a.attention_limit
    if longest > a.attention_limit:
        raise ValueError(f"model.max_model_len is {longest}; for this model it must be from 1 to {a.attention_limit}")
    parallel = settings.parallel or ParallelSettings(stages=(StageSettings(),))
    stages = stages_of(parallel, a, deepest_exit(settings.speculation, a.layers))
    result = Fit(settings.parallel, (), 0, settings.cache.block_size, longest)
    cuda = settings.model.device == "cuda"
    try:
        _, places = bundles_of(
            [len(stage.pieces) for stage in stages], resources_of_rank(settings), [machine.resources() for machine in machines]
        )
    except ValueError as error:
        return replace(result, problem=str(error))
    ranks = _placed(settings, a, stages, places, machines)
    rooms, problems = [], []
    for one in ranks:
        try:
            rooms.append(cache_blocks(settings, one.needs, one.free_bytes if cuda else None))
        except ValueError as error:
            problems.append(f"{_where(one, machines)}: {error}")
    blocks = 0 if problems else min(rooms)
    taken: Counter[tuple[int, int | None]] = Counter()
    for one in ranks:
        taken[one.machine, one.gpu] += one.needs.weight_bytes + blocks * one.needs.block_bytes
    ranks = [
        replace(one, cache_bytes=blocks * one.needs.block_bytes, left_bytes=one.free_bytes - taken[one.machine, one.gpu]) for one in ranks
    ]
    fullest, least = min(ranks, key=lambda one: one.left_bytes), WORKSPACE_BYTES if cuda else 0
    if fullest.left_bytes < least:
        problems.append(
            f"{_where(fullest, machines)} has {fullest.free_bytes / _GIB:.1f} GiB free; weights and cache take "
            f"{(fullest.free_bytes - fullest.left_bytes) / _GIB:.1f} GiB there" + (f", passes {least / _GIB:.0f} GiB" if least else "")
        )
    return replace(result, ranks=tuple(ranks), blocks=blocks, problem=next(iter(problems), ""))


def _placed(
    settings: Settings, architecture: Architecture, stages: Sequence[Stage], places: Sequence[Sequence[Place]], machines: Sequence[Machine]
) -> list[RankFit]:
    """Where every rank goes, and what it takes. Raises ValueError as `needs_of`."""
    native, cuda = wants_native(settings), settings.model.device == "cuda"
    cards = [iter(machine.usable_gpus()) for machine in machines]
    ranks = []
    for number, (stage, on) in enumerate(zip(stages, places, strict=True)):
        for rank, (piece, place) in enumerate(zip(stage.pieces, on, strict=True)):
            gpu, free = None, machines[place.node].memory_bytes
            if cuda:
                card = next(cards[place.node])
                gpu, free = card.index, card.free_bytes
            needs = needs_of(settings, architecture, piece, native=native)
            ranks.append(RankFit(number, rank, stage.layers, place.node, gpu, needs, free))
    return ranks


def _where(one: RankFit, machines: Sequence[Machine]) -> str:
    return machines[one.machine].name + ("" if one.gpu is None else f", GPU {one.gpu}")


def smallest(settings: Settings, architecture: Architecture, machines: Sequence[Machine]) -> Fit | None:
    """Return the layout of the fewest processes, and then of the fewest stages, that fits and whose cache holds the longest sequence.

    Where no cache holds that, the one that holds most, and where the settings say how large it is, the smallest that fits; None where
    nothing fits. Tried are stages of as equal a number of layers as the check exit allows, with the same number of ranks.
    """
    best: Fit | None = None
    for parallel in _layouts(settings, architecture, machines):
        found = fit(settings.model_copy(update={"parallel": parallel}), architecture, machines)
        if found.problem:
            continue
        if found.sequences(found.max_model_len) or given_cache(settings):
            return found
        best = best if best and best.blocks >= found.blocks else found
    return best


def given_cache(settings: Settings) -> bool:
    """Return whether the cache is as large as the settings say, and not what memory is left."""
    return settings.model.device == "cpu" or bool(settings.cache.blocks or settings.cache.memory_gib)


def _layouts(settings: Settings, architecture: Architecture, machines: Sequence[Machine]) -> Iterator[ParallelSettings | None]:
    """Layouts to try, the smallest first."""
    a = architecture
    check = deepest_exit(settings.speculation, a.layers)
    each = resources_of_rank(settings)
    room = max((min(machine.resources()[name] // count for name, count in each.items()) for machine in machines), default=0)
    widest = int(min(room, a.heads, a.intermediate // 2, a.vocabulary))
    most = min(_MOST_STAGES, len(machines), a.layers)
    sizes = [(stages * tp, stages, tp) for stages in range(1, most + 1) for tp in range(1, widest + 1)]
    others = settings.parallel.model_dump(exclude={"stages"}) if settings.parallel else {}
    for ranks, stages, tp in sorted(sizes):
        if ranks == 1:
            yield None
            continue
        first = a.layers if stages == 1 else max(a.layers // stages, check)
        ends = [0, *(first + (a.layers - first) * number // max(1, stages - 1) for number in range(stages))]
        counts = [end - start for start, end in pairwise(ends)]
        if min(counts) >= 1:
            yield ParallelSettings(stages=tuple(StageSettings(layers=count, tp=tp) for count in counts), **others)
