"""The house's imports run one way (design, section 4)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "hispec_ray"
ROOT = Path(__file__).parents[1] / PACKAGE

STANDS_ON: dict[str, set[str]] = {
    "config": set(),
    "request": set(),
    "native": set(),
    "core": {"config", "request"},
    "model": {"config", "request", "core.plan", "native"},
    "speculation": {"config", "request", "core.plan", "native"},
    "training": {"config", "request", "core.plan", "native", "model"},
    "shard": {"config", "request", "native", "core", "model", "speculation"},
    "engine": {"config", "request", "native", "core", "model", "speculation", "shard"},
}
for top in ("llm", "serving", "tuning", "cli"):
    STANDS_ON[top] = {*STANDS_ON["engine"], "engine"}
STANDS_ON["serving"] |= {"llm"}
STANDS_ON["tuning"] |= {"llm", "training"}
STANDS_ON["cli"] |= {"llm", "serving", "tuning", "training"}
STANDS_ON["__init__"] = {"config", "request", "llm"}
"""What each room may import besides itself; a dotted name is one module of a room."""

NO_TORCH = {"config", "request", "core"}
MAY_IMPORT_RAY = {"serving", "shard.ray_group", "shard.placement"}


def modules() -> list[str]:
    """Every module of the package, dotted, without the package's own name."""
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py"))


def imported(tree: ast.AST, module: str) -> set[str]:
    """Every module that the source imports anywhere, in functions and type-checking blocks too, in full."""
    home = [PACKAGE, *module.split(".")]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*(home[: -node.level] if node.level else []), *([node.module] if node.module else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def inside(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def faults(module: str, source: str) -> list[str]:
    """What the module's imports break of the design's section 4."""
    room = module.split(".")[0]
    found = []
    if room not in STANDS_ON:
        return [f"{module} is in no room of the house"]
    targets = imported(ast.parse(source), module)
    for target in sorted(targets):
        if target.startswith(f"{PACKAGE}.") and room != "__init__":
            place = target.removeprefix(f"{PACKAGE}.")
            allowed = STANDS_ON[room] | {room}
            # `from hispec_ray.core import plan` names the room and the module: only the room's own line would be too strict
            parent_of_allowed = any(one.startswith(f"{place}.") for one in allowed) and any(
                other.startswith(f"{target}.") and inside(other.removeprefix(f"{PACKAGE}."), allowed) for other in targets
            )
            if not inside(place, allowed) and not parent_of_allowed:
                found.append(f"{module} imports {target}")
        if target.split(".")[0] == PACKAGE and target == PACKAGE and len(module.split(".")) > 0 and room not in ("cli", "tuning", "__init__"):
            if not any(other.startswith(f"{PACKAGE}.") for other in targets):
                found.append(f"{module} imports the whole package")
        if target.split(".")[0] == "torch" and room in NO_TORCH:
            found.append(f"{module} imports torch")
        if target.split(".")[0] == "ray" and not inside(module, MAY_IMPORT_RAY):
            found.append(f"{module} imports ray")
    return found
