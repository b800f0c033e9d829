"""One process's part of the model: loads it as the settings say and runs step plans on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hispec_ray.config import Settings, SpeculationSettings
from hispec_ray.core.plan import StepPlan, StepResult, Tentative
from hispec_ray.model.architecture import Architecture, check_exits
from hispec_ray.model.decoder import Decoder
from hispec_ray.model.heads import Heads, exit_layers, exits_in, load_heads, piece_of_heads
from hispec_ray.model.layout import weight_bytes
from hispec_ray.model.native_decoder import NativeDecoder
from hispec_ray.model.parallel import ALONE, Collective, Piece, whole
from hispec_ray.model.torch_decoder import TorchDecoder
from hispec_ray.model.weights import ModelSource
from hispec_ray.native.library import NativeUnavailableError, load
from hispec_ray.speculation.choice import Choose, choose_native, choose_together, choose_torch
from hispec_ray.speculation.drafters import Drafter, LookupDrafter
from hispec_ray.speculation.grammar import Grammars
from hispec_ray.speculation.levels import Doubt, Level, Model
from hispec_ray.speculation.native_lookup import NativeLookup
from hispec_ray.speculation.phrases import NONE, load_phrases
from hispec_ray.speculation.round import Round
from hispec_ray.speculation.upper import Upper

logger = logging.getLogger(__name__)

_GIB = 2**30
_CPU_CACHE_GIB = 1.0
_GPU_SHARE = 0.9
WORKSPACE_BYTES = _GIB
"""What a GPU keeps free beside weights and cache: rows that are run, tables, CUDA's and NCCL's own."""


def levels_for(speculation: SpeculationSettings, layers: int, own: Mapping[int, int] | None = None) -> tuple[Level, ...]:
    """Return the levels of the method, shallow to deep, the last at the full depth of `layers`.

    own: by depth, the layers that exits have to themselves; see `Decoder`.
    Raises ValueError when the exits are out of order or deeper than the model, also where the method does not use them.
    """
    eighth, quarter = max(1, layers // 8), max(1, layers // 4)
    exits = speculation.exits
    draft = exits.draft or min(eighth, exits.check or layers)
    check = exits.check or max(draft, quarter)
    check_exits(layers, draft, check)
    own = own or {}
    guesser = () if speculation.drafter == "lookup" else (Level("draft", draft, 0, own.get(draft)),)
    if speculation.method == "plain":
        return (Level("full", layers, 0),)
    if speculation.method == "single":
        return *guesser, Level("full", layers, speculation.draft_tokens)
    return *guesser, Level("check", check, speculation.draft_tokens, own.get(check)), Level("full", layers, speculation.window)


def looks_up(speculation: SpeculationSettings) -> bool:
    """Whether a lookup takes part."""
    return speculation.method != "plain" and speculation.drafter != "exit"


def drafter_for(speculation: SpeculationSettings, vocabulary: int | None = None) -> Drafter | None:
    """Return the drafter that is no exit, where the settings want one. vocabulary: as `load_phrases` takes it, and raises.

    It is native wherever it can be built, whatever runs the layers: many sequences' texts are too much for Python beside fast passes.
    """
    if not looks_up(speculation):
        return None
    phrases = load_phrases(speculation.phrases, vocabulary) if speculation.phrases else NONE
    try:
        return NativeLookup(phrases)
    except NativeUnavailableError as error:
        _warn_once(f"looking up in Python, several times slower than compiled: {error}")
        return LookupDrafter(phrases)


@cache
def _warn_once(words: str) -> None:
    logger.warning("%s", words)


def round_for(
    speculation: SpeculationSettings,
    model: Model,
    layers: int,
    choose: Choose,
    drafter: Drafter | None,
    own: Mapping[int, int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    grammars: Grammars | None = None,
    end: int | None = None,
) -> Round:
    """Return the round of the method: its levels, what they do where they are unsure, and its pace. own: see `levels_for`.

    end: see `Round`.
    """
    levels, paced = levels_for(speculation, layers, own), speculation.pace == "auto"
    confidence, doubt = speculation.lookup_confidence, _doubt(speculation)
    return Round(model, levels, choose, drafter, doubt, confidence=confidence, paced=paced, clock=clock, grammars=grammars, end=end)


def _doubt(speculation: SpeculationSettings) -> Doubt:
    return Doubt(speculation.stop_below, speculation.branch_below, speculation.branches)


class Shard:
    """The part of a model that one process has, behind one method: `execute`, or in a stage of several `ask` and `answer`.

    levels: of the method, see `levels_for`; sources: who may have chosen a token first, see `Round`; blocks: of the key-value pool;
    weight_bytes, cache_bytes: what the weights and the pool take.
    Sets the threads of torch for the whole process: one where the native kernels have their own.
    Raises ValueError when the settings do not fit the model or the machine.
    """

    def __init__(
        self,
        settings: Settings,
        source: ModelSource,
        like: Shard | None = None,
        piece: Piece | None = None,
        collective: Collective = ALONE,
    ) -> None:
        """Load the model, or share the weights of a shard that is like this one but for speculation, scheduling and the pool's size.

        piece, collective: what this process has of the model, and the other ranks of its stage; all of it where not given.
        """
        architecture, speculation = source.architecture, settings.speculation
        self.settings = settings
        free = _free_on_gpu(settings)
        if like and not _shares_weights(settings, like.settings):
            raise ValueError("engines share weights only where model, cache.block_size and speculation.exits.heads are the same")
        dtype: torch.dtype = getattr(torch, settings.model.dtype)
        piece = piece or whole(architecture)
        heads = heads_for(settings, source) if piece.embeds else None
        own = like.decoder.exit_layers if like else exit_layers(heads, architecture.layers)
        self.levels = levels_for(speculation, architecture.layers, own)
        native = isinstance(like.decoder, NativeDecoder) if like else wants_native(settings)
        needs = needs_of(settings, architecture, piece, native=native)
        self.blocks = cache_blocks(settings, replace(needs, weight_bytes=0) if like else needs, free)
        self.cache_bytes = self.blocks * needs.block_bytes
        threads = settings.model.thread_count()
        torch.set_num_threads(threads)
        self.choose: Choose = choose_native(threads) if native else choose_torch
        if collective.size > 1:
            self.choose = choose_together(self.choose, collective.gather)
        weights = {} if like else source.weights(dtype, piece)
        self.weight_bytes: int = like.weight_bytes if like else sum({id(tensor): tensor.nbytes for tensor in weights.values()}.values())
        positions = min(architecture.attention_limit, settings.model.max_model_len or architecture.attention_limit)
        shape: dict[str, Any] = {"positions": positions, "blocks": self.blocks, "block_size": settings.cache.block_size}
        shape |= {"heads": heads and piece_of_heads(heads, architecture, piece), "piece": piece, "collective": collective}
        self.decoder: Decoder
        try:
            if like:
                self.decoder = like.decoder.twin(self.blocks)
            elif native:
                self.decoder = NativeDecoder(architecture, weights, threads=threads, choose=self.choose, **shape)
            else:
                device = torch.device(settings.model.device)
                self.decoder = TorchDecoder(architecture, weights, device=device, choose=self.choose, **shape)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ValueError(
                f"the model's {self.weight_bytes / _GIB:.1f} GiB and a cache of {self.blocks} blocks, {self.cache_bytes / _GIB:.1f} GiB "
                "(cache.memory_gib or cache.blocks), do not fit into memory"
            ) from error
        if native:
            torch.set_num_threads(1)  # torch's own threads, once woken, spin for milliseconds on the kernels' cores
        self.grammars: Grammars = like.grammars if like else Grammars(source.byte_tokenizer)
        first, end = piece.layers.start, piece.layers.stop
        self._round: Round | None = None
        self._upper: Upper | None = None
        if piece.embeds:
            drafter = drafter_for(speculation, architecture.vocabulary)
            parts: dict[str, Any] = {"drafter": drafter, "own": own, "grammars": self.grammars, "end": end}
            self._round = round_for(speculation, self.decoder, architecture.layers, self.choose, **parts)
        else:
            told: dict[str, Any] = {"lookup": looks_up(speculation), "first": first, "end": end, "grammars": self.grammars}
            self._upper = Upper(self.decoder, self.levels, self.choose, _doubt(speculation), **told)
        self.sources = (self._round or self._upper).sources  # type: ignore[union-attr]

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one round; see `Round.run`."""
        assert self._round
        return self._round.run(plan)

    def ask(self, plan: StepPlan) -> tuple[list[Tentative], torch.Tensor, StepResult]:
        """Begin a round that stages above this one end; see `Round.ask`."""
        assert self._round
        return self._round.ask(plan)

    def look_ahead(self) -> None:
        """Guess on while the stages above look; see `Round.look_ahead`."""
        if self._round:
            self._round.look_ahead()

    def answer(self, plan: StepPlan, asked: Sequence[Tentative], hidden: torch.Tensor) -> tuple[torch.Tensor, StepResult]:
        """Go on with a round of the stages below; see `Upper.answer`."""
        assert self._upper
        return self._upper.answer(plan, asked, hidden)

    @property
    def peak_held_bytes(self) -> int:
        """Most bytes of hidden rows that waited between segments at once: what the hierarchy adds to weights and cache."""
        return self._round.peak_held_bytes if self._round else 0


def wants_native(settings: Settings) -> bool:
    """Return whether the native kernels run the model, which builds them. Raises ValueError where the settings ask for them in vain."""
    if settings.model.device != "cpu" or settings.model.kernels == "torch":
        return False
    try:
        load()
    except NativeUnavailableError as error:
        if settings.model.kernels == "native":
            raise ValueError(f"model.kernels is 'native', but {error}") from error
        logger.warning("decoding with torch alone, several times slower than the native kernels: %s", error)
        return False
    return True


def _shares_weights(one: Settings, other: Settings) -> bool:
    heads = one.speculation.exits.heads == other.speculation.exits.heads
    return one.model == other.model and one.cache.block_size == other.cache.block_size and heads


def heads_for(settings: Settings, source: ModelSource) -> Heads | None:
    """The trained exits, where a file of them is named. Raises ValueError as `load_heads`."""
    speculation = settings.speculation
    if speculation.exits.heads is None:
        return None
    dtype: torch.dtype = getattr(torch, settings.model.dtype)
    path, a = Path(speculation.exits.heads).expanduser(), source.architecture
    needed = [level.depth for level in levels_for(speculation, a.layers)[:-1] if level.depth < a.layers]
    return load_heads(path, source.fingerprint(), needed=needed, architecture=a, dtype=dtype)


def blocks_that_fit(settings: Settings, source: ModelSource, piece: Piece) -> int:
    """Return how many blocks the cache of this piece's process gets. Raises ValueError as `Shard`."""
    free = _free_on_gpu(settings)
    return cache_blocks(settings, needs_of(settings, source.architecture, piece, native=wants_native(settings)), free)


def resources_of_rank(settings: Settings) -> dict[str, float]:
    """Return what one rank of a group takes of a node, as Ray counts: a GPU and a CPU that drives it, or a CPU for each of its threads."""
    return {"CPU": 1, "GPU": 1} if settings.model.device == "cuda" else {"CPU": settings.model.threads or 1}


@dataclass(frozen=True, slots=True)
class Needs:
    """What a piece takes in its process's memory, in bytes: its weights with trained exits, and one block of its cache."""

    weight_bytes: int
    block_bytes: int


def needs_of(settings: Settings, architecture: Architecture, piece: Piece, *, native: bool) -> Needs:
    """Return what a piece takes, without reading weights. native: whether the native kernels run it, see `wants_native`.

    Raises ValueError where a file of trained exits is named and cannot be read.
    """
    dtype: torch.dtype = getattr(torch, settings.model.dtype)
    heads = settings.speculation.exits.heads
    own, numbers = exits_in(Path(heads).expanduser(), architecture, piece) if heads and piece.embeds else (0, 0)
    decoder = NativeDecoder if native else TorchDecoder
    block = decoder.block_bytes(piece.architecture(architecture), len(piece.layers) + own, settings.cache.block_size, dtype)
    return Needs(weight_bytes(architecture, piece, dtype) + numbers * dtype.itemsize, block)


def cache_blocks(settings: Settings, needs: Needs, free: int | None) -> int:
    """Return how many blocks the cache of a process gets. free: bytes of its GPU before the weights are there; None on a CPU.

    Raises ValueError, with the numbers, where that is not one.
    """
    cache = settings.cache
    if cache.blocks:
        return cache.blocks
    block = f"one block of {cache.block_size} tokens takes {needs.block_bytes / _GIB:.3g} GiB"
    if cache.memory_gib is None and free is not None:
        blocks = int(((free - needs.weight_bytes) * _GPU_SHARE - WORKSPACE_BYTES) // needs.block_bytes)
        if blocks < 1:
            raise ValueError(
                f"no room for a cache: of the {free / _GIB:.1f} GiB free on the GPU the weights take {needs.weight_bytes / _GIB:.1f} and "
                f"passes {WORKSPACE_BYTES / _GIB:.1f}, and {block}; cut the model over more GPUs with parallel.stages"
            )
        return blocks
    memory = _CPU_CACHE_GIB if cache.memory_gib is None else cache.memory_gib
    blocks = int(memory * _GIB // needs.block_bytes)
    if blocks < 1:
        raise ValueError(f"cache.memory_gib is {memory}; {block}, so it must be at least that")
    return blocks


def _free_on_gpu(settings: Settings) -> int | None:
    """Bytes that this process's GPU has free; None on a CPU. Takes CUDA into use. Raises ValueError where there is none."""
    if settings.model.device == "cpu":
        return None
    if not torch.cuda.is_available():
        raise ValueError("model.device is 'cuda' and torch sees no CUDA device here; set it to 'cpu' or install a CUDA build of torch")
    return torch.cuda.mem_get_info()[0]
