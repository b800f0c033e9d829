"""`hispec doctor`: what this machine or a cluster has of what serving needs, and what to do where something is missing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hispec_ray.commands.errors import in_one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hispec_ray.shard.checkup import Finding

_PATIENCE_S = 300.0  # for what is compiled at first use
_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="A running Ray cluster, or auto.", show_default="this machine")
    ] = None,
) -> None:
    """Look at this machine, or at every node of a cluster; exit status 1 where something that serving needs is missing."""
    with in_one_line("stopped"):
        from rich.console import Console  # noqa: PLC0415  torch takes seconds, and rich some of one

        from hispec_ray.shard.checkup import checkup  # noqa: PLC0415

        console = Console(highlight=False, soft_wrap=True)
        if sys.stderr.isatty():
            print("Looking; what is compiled at first use takes a minute or two", file=sys.stderr)
        if address:
            worst = _cluster(console, address)
        else:
            report = checkup()
            worst = _show(console, report.machine.name, report.findings)
    if worst == "problem":
        raise typer.Exit(1)


def _cluster(console: Console, address: str) -> str:
    """Show every node of the cluster; return the worst state."""
    from hispec_ray.shard.checkup import Finding, Report, checkup, differences  # noqa: PLC0415
    from hispec_ray.shard.placement import connected, nodes, on_each  # noqa: PLC0415

    with connected(address):
        every = nodes()
        found = on_each(every, checkup, _PATIENCE_S)
    alive = [node for node in every if node.alive]
    cpus, cards = (sum(node.resources.get(name, 0) for node in alive) for name in ("CPU", "GPU"))
    reports = [one for one in found if isinstance(one, Report)]
    whole = [Finding("ok", "nodes", f"{len(alive)}, with {cpus:g} CPUs and {cards:g} GPUs for Ray")]
    if len(every) > len(alive):
        whole.append(Finding("warning", "nodes", f"{len(every) - len(alive)} have left the cluster"))
    states = [_show(console, f"cluster {address}", [*whole, *differences(reports)])]
    for node, one in zip(every, found, strict=True):
        if node.alive:
            said = one.findings if isinstance(one, Report) else [Finding("problem", "node", f"it could not be looked at: {one}")]
            console.print()
            states.append(_show(console, node.name, said))
    return max(states, key=list(_STYLES).index)


def _show(console: Console, title: str, findings: Sequence[Finding]) -> str:
    """Print findings under a title; return the worst state."""
    from rich.text import Text  # noqa: PLC0415

    console.print(Text(title, style="bold"))
    for one in findings:
        console.print(Text.assemble("  ", (f"{one.state:<9}", _STYLES[one.state]), f"{one.topic:<13}{one.words}"))
    return max((one.state for one in findings), key=list(_STYLES).index, default="ok")
