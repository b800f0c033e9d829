"""Who has which part of the model: stages and their ranks, out of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from hispec_ray.config import ParallelSettings, SpeculationSettings
from hispec_ray.model.architecture import Architecture
from hispec_ray.model.parallel import Piece, check_ranks, piece_of
from hispec_ray.shard.shard import levels_for


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of layers and the pieces of its ranks, by rank."""

    layers: range
    pieces: tuple[Piece, ...]


def stages_of(parallel: ParallelSettings, architecture: Architecture, check: int) -> tuple[Stage, ...]:
    """Return the stages that the settings ask for. check: the depth of the deepest exit below the full depth.

    Raises ValueError, in one line with the valid values, where the layers do not add up to the model's, the first stage ends below the
    check exit, or a stage has more ranks than there is to cut.
    """
    a, asked = architecture, parallel.stages
    counts = [a.layers if stage.layers is None and len(asked) == 1 else stage.layers for stage in asked]
    for number, count in enumerate(counts):
        if count is None:
            raise ValueError(f"parallel.stages.{number}.layers is missing; with several stages each says how many of the {a.layers} it has")
    layers = [count for count in counts if count is not None]
    if sum(layers) != a.layers:
        total = f"{' + '.join(map(str, layers))} = {sum(layers)}" if len(layers) > 1 else layers[0]
        raise ValueError(f"parallel.stages have {total} layers; they must add up to the model's {a.layers}")
    if len(layers) > 1 and check > a.layers - len(layers) + 1:
        raise ValueError(
            f"speculation.exits has its deepest at {check}; drafting and checking never leave the first of {len(layers)} stages "
            f"(parallel.stages), so it must be from 1 to {a.layers - len(layers) + 1} of the model's {a.layers} layers"
        )
    if layers[0] < check and len(layers) > 1:
        raise ValueError(
            f"parallel.stages.0.layers is {layers[0]}; drafting and checking never leave the first stage, "
            f"so it must be from {check} (the deepest exit) to {a.layers - len(layers) + 1}"
        )
    for number, stage in enumerate(asked):
        check_ranks(a, stage.tp, f"parallel.stages.{number}.tp")
    stages, first = [], 0
    for number, (stage, count) in enumerate(zip(asked, layers, strict=True)):
        run = range(first, first + count)
        ends = {"embeds": number == 0, "reads": number in (0, len(asked) - 1)}  # the first reads at its exits
        stages.append(Stage(run, tuple(piece_of(a, run, stage.tp, rank, **ends) for rank in range(stage.tp))))
        first += count
    return tuple(stages)


def deepest_exit(speculation: SpeculationSettings, layers: int) -> int:
    """Return the depth below which a stage must not end: that of the deepest exit that takes part; 1 for plain decoding."""
    return max((level.depth for level in levels_for(speculation, layers)[:-1]), default=1)
