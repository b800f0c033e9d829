"""The house's imports run one way (design, section 4)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "hispec_ray"
ROOT = Path(__file__).parents[1] / PACKAGE

_GROUND = {"config", "request", "native", "grammar"}
_SHARDS = _GROUND | {"core", "model", "speculation"}
_ENGINE = _SHARDS | {"shard"}
_DOORS = _ENGINE | {"engine"}
STANDS_ON: dict[str, set[str]] = {
    "config": set(),
    "request": set(),
    "grammar": set(),
    "native": set(),
    "core": {"config", "request"},
    "model": _GROUND | {"core.plan"},
    "speculation": _GROUND | {"core.plan"},
    "abacus": {"training", "model", "__init__"},
    "training": _GROUND | {"core.plan", "model"},
    "shard": _SHARDS,
    "engine": _ENGINE,
    "llm": _DOORS,
    "__init__": {"config", "request", "llm"},
    "serving": _DOORS | {"llm", "__init__"},
    "tuning": _DOORS | {"llm", "__init__", "training"},
    "distill": _DOORS | {"llm", "__init__", "training"},
    "phrases": {"core.plan", "model", "speculation", "training"},
    "commands": _DOORS | {"llm", "__init__", "training", "tuning", "distill", "phrases"},
    "cli": _DOORS | {"llm", "__init__", "training", "tuning", "serving", "commands"},
}
"""What each room may import besides itself; a dotted name is one module of a room, `__init__` the package's own front door."""

NO_TORCH = {"config", "request", "core"}
MAY_IMPORT_RAY = {"serving", "shard.ray_group", "shard.placement", "training.cluster"}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name within it; a room's `__init__` has the room's name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imported(source: str) -> set[str]:
    """Every module that the source imports anywhere, in functions and under TYPE_CHECKING too, in full."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:  # a module, or something in the module `base`
                whole = f"{base}.{alias.name}"
                names.add(whole if whole.removeprefix(f"{PACKAGE}.") in modules() else base)
    return names


def inside(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def faults(module: str, source: str) -> list[str]:
    """Say what the imports of `module` break."""
    room = module.partition(".")[0]
    found = []
    for target in sorted(imported(source)):
        first, _, place = target.partition(".")
        if first == PACKAGE and not inside(place or "__init__", STANDS_ON[room] | {room}):
            found.append(f"{module} imports {target}")
        if first == "torch" and room in NO_TORCH:
            found.append(f"{module} imports torch")
        if first == "ray" and not inside(module, MAY_IMPORT_RAY):
            found.append(f"{module} imports ray")
        if not first:
            found.append(f"{module} imports {target}: relative imports hide the room")
    return found


@pytest.mark.parametrize("module", modules())
def test_imports_run_one_way(module: str) -> None:
    assert module.partition(".")[0] in STANDS_ON, f"{module} is in no room of the house; give it a line in STANDS_ON and in the design"
    assert faults(module, modules()[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("core.plan", "from hispec_ray.model.decoder import Decoder", "core.plan imports hispec_ray.model.decoder"),
        ("core.plan", "def f():\n    import torch.nn as nn", "core.plan imports torch"),
        ("config", "from torch import Tensor", "config imports torch"),
        ("speculation.round", "from hispec_ray.core import scheduler", "speculation.round imports hispec_ray.core.scheduler"),
        ("speculation.round", "from hispec_ray.core.plan import Rows, StepPlan", None),
        ("model.decoder", "import hispec_ray.speculation.choice", "model.decoder imports hispec_ray.speculation.choice"),
        ("engine.engine", "from hispec_ray import LLM", "engine.engine imports hispec_ray"),
        ("engine.engine", "from hispec_ray.llm import LLM", "engine.engine imports hispec_ray.llm"),
        ("llm", "import ray", "llm imports ray"),
        ("shard.inline", "from ray import serve", "shard.inline imports ray"),
        ("shard.ray_group", "import ray.util", None),
        ("shard.shard", "from .inline import InlineExecutor", "shard.shard imports .inline: relative imports hide the room"),
        ("training.exits", "from hispec_ray.engine.engine import Engine", "training.exits imports hispec_ray.engine.engine"),
        ("serving.coordinator", "from ray import serve\nfrom hispec_ray.engine.async_engine import AsyncEngine", None),
    ],
)
def test_a_back_arrow_is_found(module: str, line: str, fault: str | None) -> None:
    assert faults(module, line) == ([] if fault is None else [fault])
