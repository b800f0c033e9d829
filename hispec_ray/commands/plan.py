"""`hispec plan`: whether a model fits a cluster, where its ranks would go, and what they take there."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hispec_ray.commands.errors import InputError, in_one_line
from hispec_ray.commands.settings import settings_from
from hispec_ray.config import DEFAULT_MODEL, Settings
from hispec_ray.shard.machine import Machine, in_gib

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hispec_ray.config import ParallelSettings
    from hispec_ray.model.architecture import Architecture
    from hispec_ray.shard.fit import Fit

_GIB = 2**30
_PATIENCE_S = 60.0
_model = partial(typer.Option, rich_help_panel="Model")
_layout = partial(typer.Option, rich_help_panel="Layout")
_cluster = partial(typer.Option, rich_help_panel="Cluster")


def plan(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A deployment file; options given here override it.")] = None,
    *,
    model: Annotated[
        str | None, _model(help="A folder, a Hugging Face id, a .gguf file, or a config.json alone.", show_default=DEFAULT_MODEL)
    ] = None,
    dtype: Annotated[str | None, _model(help="bfloat16 or float32.", show_default="bfloat16")] = None,
    max_model_len: Annotated[int | None, _model(help="Most tokens of a sequence.", show_default="the model's limit")] = None,
    typical: Annotated[int, _model(min=1, help="Tokens of a usual sequence, to count how many the cache holds.")] = 1024,
    stages: Annotated[str | None, _layout(help="LAYERS:TP of each stage from the bottom, for example 20:4,60:4.")] = None,
    tp: Annotated[int | None, _layout(help="One stage of all layers, over so many ranks.")] = None,
    cluster: Annotated[
        str | None,
        _cluster(help="A described cluster: NODESxGPUSxMEMORY (2x4x80GiB) or NODESxCPUScpuxMEMORY (3x2cpux16GiB); + joins kinds of nodes."),
    ] = None,
    address: Annotated[str | None, _cluster(envvar="RAY_ADDRESS", help="A running Ray cluster, or auto.")] = None,
    device: Annotated[str | None, _cluster(help="cpu or cuda.", show_default="what the file says, or GPUs where there are any")] = None,
) -> None:
    """Say whether a model fits a cluster, and what each of its processes would take. Reads no weights; exit status 1 where it does not fit.

    The cluster is the one that is described, the one at the address, or else this machine. Without a layout in FILE or in options the
    smallest that fits is shown.
    """
    layout = _stages(stages, tp)
    given = {"model.path": model, "model.dtype": dtype, "model.max_model_len": max_model_len, "parallel.stages": layout}
    settings = settings_from(file, given | {"model.device": device})
    with in_one_line("stopped"):
        from hispec_ray.model.weights import read_architecture  # noqa: PLC0415  torch takes seconds, which a mistyped option need not wait for
        from hispec_ray.shard.fit import fit, smallest  # noqa: PLC0415

        machines = _machines(cluster, address)
        device = device or (None if file else "cuda" if any(machine.gpus for machine in machines) else "cpu")
        settings = settings_from(file, given | {"model.device": device})
        _check_devices(settings, machines)
        a = read_architecture(settings.model.path)
        chosen = file is None and layout is None
        best = smallest(settings, a, machines) if chosen else None
        found = best or fit(settings, a, machines)
        better = best or (smallest(settings, a, machines) if found.problem else None)
    _show(settings, a, machines, found, better if found.problem else None, typical, chosen=chosen and best is not None)
    if found.problem:
        raise typer.Exit(1)


def _stages(stages: str | None, tp: int | None) -> list[dict[str, int]] | None:
    """The layout that options ask for. Raises InputError."""
    if stages is None:
        return None if tp is None else [{"tp": tp}]
    if tp is not None:
        raise InputError(f"stages is {stages!r} and tp is {tp}; give one of them: tp is for one stage of all layers")
    found = [re.fullmatch(r"\s*([0-9]{1,9}):([0-9]{1,9})\s*", stage) for stage in stages.split(",")]
    if not all(found):
        raise InputError(f"stages is {stages!r}; it must be LAYERS:TP for each stage with commas between them, for example 20:4,60:4")
    return [{"layers": int(stage[1]), "tp": int(stage[2])} for stage in found if stage]


def _machines(cluster: str | None, address: str | None) -> list[Machine]:
    """The nodes to plan for. Raises ValueError."""
    from hispec_ray.shard.machine import described, this_machine  # noqa: PLC0415

    if cluster is not None:
        return described(cluster)
    if not address:
        return [this_machine()]
    from hispec_ray.shard.placement import connected, machines_of  # noqa: PLC0415

    with connected(address):
        found = machines_of(_PATIENCE_S)
    for machine in found:
        if machine.problem:
            print(f"hispec: {machine.name} is left out: {machine.problem}", file=sys.stderr)
    return [machine for machine in found if not machine.problem]


def _check_devices(settings: Settings, machines: list[Machine]) -> None:
    """Raise ValueError where no node has the kind of device that the model is for."""
    if settings.model.device == "cuda" and not any(machine.gpus for machine in machines):
        raise ValueError("model.device is 'cuda' and no node of the cluster has a GPU; --device cpu plans for the CPUs")
    if settings.model.device == "cpu" and not any(machine.memory_bytes for machine in machines):
        raise ValueError("model.device is 'cpu' and the cluster is described by its GPUs alone; --device cuda plans for them")


def _show(
    settings: Settings, a: Architecture, machines: list[Machine], found: Fit, better: Fit | None, typical: int, *, chosen: bool
) -> None:
    from rich.console import Console  # noqa: PLC0415

    from hispec_ray.shard.shard import levels_for  # noqa: PLC0415

    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    depths = ", ".join(f"{level.name} {level.depth}" for level in levels_for(settings.speculation, a.layers))
    console.print(f"{settings.model.path} in {settings.model.dtype}, {settings.speculation.method} ({depths} layers)")
    console.print(f"on {_on(machines, settings)}", end="\n\n")
    if found.ranks:
        console.print(_table(found, machines, settings), soft_wrap=False)
        console.print()
    if found.blocks:
        _line(console, "cache", f"{found.tokens:,} tokens: {found.blocks:,} blocks of {found.block_size} on every rank")
        _line(console, "sequences", _sequences(found, settings, typical))
    if found.problem:
        _line(console, "fits", f"no: {found.problem}", "red")
    else:
        words = "yes" if found.sequences(found.max_model_len) else f"yes, with sequences of up to {found.tokens:,} tokens"
        words += f"; the smallest layout that does: {_layout_words(found.parallel)}" if chosen else ""
        _line(console, "fits", words, "green")
    advice = _advice(settings, a, found, better)
    if advice:
        _line(console, "instead", advice)
    for machine in machines:
        for fault in machine.faults():
            _line(console, "warning", f"{machine.name}: {fault}", "yellow")


def _line(console: Console, label: str, words: str, style: str = "") -> None:
    from rich.text import Text  # noqa: PLC0415

    console.print(Text.assemble((f"{label:<11}", "bold"), (words, style)))


def _on(machines: list[Machine], settings: Settings) -> str:
    nodes = f"{len(machines)} node{'s' * (len(machines) != 1)}"
    if settings.model.device == "cuda":
        cards = [gpu for machine in machines for gpu in machine.gpus]
        return (
            f"{nodes} with {len(cards)} GPU{'s' * (len(cards) != 1)}, {in_gib(sum(gpu.free_bytes for gpu in cards))} of their memory free"
        )
    cpus = sum(machine.cpus or 0 for machine in machines)
    return f"{nodes} with {cpus} CPU{'s' * (cpus != 1)}, {in_gib(sum(machine.memory_bytes for machine in machines))} of memory free"


def _table(found: Fit, machines: list[Machine], settings: Settings) -> Table:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("stage", "layers", "rank", "node", "device", "weights", "KV blocks", "KV cache", "left"):
        table.add_column(heading, justify="left" if heading in ("node", "device") else "right", no_wrap=True)
    threads = settings.model.threads or (1 if found.parallel else None)
    cores = f"{threads} thread{'s' * (threads > 1)}" if threads else "every core"
    for one in found.ranks:
        device = cores if one.gpu is None else f"GPU {one.gpu}"
        left = Text(in_gib(one.left_bytes), "red" if one.left_bytes < 0 else "")
        table.add_row(
            str(one.stage), f"{one.layers.start}-{one.layers.stop - 1}", str(one.rank), machines[one.machine].name, device,
            in_gib(one.needs.weight_bytes), f"{found.blocks:,}", in_gib(one.cache_bytes), left,
        )  # fmt: skip
    return table


def _sequences(found: Fit, settings: Settings, typical: int) -> str:
    longest, usual = found.max_model_len, min(typical, found.max_model_len)
    most = settings.scheduler.max_sequences
    words = f"{found.sequences(longest) or 'none'} of {longest:,} tokens at a time (the longest there may be)"
    if usual < longest:
        words += f", {found.sequences(usual) or 'none'} of {usual:,}"
    return words + f"; scheduler.max_sequences is {most}"


def _layout_words(parallel: ParallelSettings | None) -> str:
    """A layout as an option and as a setting."""
    if parallel is None:
        return "one process with all layers"
    option = ",".join(f"{stage.layers}:{stage.tp}" for stage in parallel.stages)
    setting = ", ".join(f"{{layers: {stage.layers}, tp: {stage.tp}}}" for stage in parallel.stages)
    return f"--stages {option}, in a file parallel: {{stages: [{setting}]}}"


def _advice(settings: Settings, a: Architecture, found: Fit, better: Fit | None) -> str:
    """What to do where it does not fit, or fits for short sequences only; one thing."""
    if found.problem:
        if better:
            return f"{_layout_words(better.parallel)} fits, the smallest of those tried"
        import torch  # noqa: PLC0415

        from hispec_ray.model.layout import weight_bytes  # noqa: PLC0415
        from hispec_ray.model.parallel import whole  # noqa: PLC0415

        alone = in_gib(weight_bytes(a, whole(a), getattr(torch, settings.model.dtype)))
        return f"a larger cluster: the weights alone take {alone}" + ", half of that in bfloat16" * (settings.model.dtype == "float32")
    if found.sequences(found.max_model_len):
        return ""
    from hispec_ray.shard.fit import given_cache  # noqa: PLC0415

    block = max(one.needs.block_bytes for one in found.ranks)
    wanted = -(-found.max_model_len // found.block_size) * block
    if given_cache(settings) and all(one.left_bytes + one.cache_bytes >= wanted for one in found.ranks):
        return f"cache.memory_gib: {wanted / _GIB:.2f} (of each process) holds a sequence of {found.max_model_len:,} tokens"
    return f"model.max_model_len: {found.tokens} is what the cache holds; longer requests are refused"
