"""What an output was begun with: noted beside it, so that a command goes on only where it would write the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hispec_ray.training.output import whole


def claim(note: Path, settings: Mapping[str, Any], out: Path, what: str, kind: str) -> None:
    """Note in the file `note` what `out` is begun with. what: "a training", for messages; kind: "folder" or "file", which out is.

    Raises ValueError where something else is noted there, and OSError where it cannot be written.
    """
    try:
        if not note.is_file():
            with whole(note, scratch := note.with_suffix(".writing")):
                scratch.write_text(json.dumps(settings, indent=1))
                scratch.rename(note)
            return
        there = json.loads(note.read_text())
        if not isinstance(there, dict):
            raise ValueError("no JSON object")
    except OSError as error:
        raise OSError(f"out is '{out}': {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{note} is damaged ({error}); name another {kind} with --out") from error
    for name, value in settings.items():
        if there.get(name) != value:
            raise ValueError(
                f"out is '{out}', where {what} with {name} {there.get(name)!r} has begun; this one has {value!r}. "
                f"Give the same settings to go on, or another {kind}"
            )


def refuse_file(out: Path) -> None:
    """Raise ValueError where a folder for results is a file."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out is '{out}', which is a file; it must be a folder")


def make_folder(out: Path) -> None:
    """Make the folder for results, where there is none. Raises ValueError where it is a file, and OSError where it cannot be made."""
    refuse_file(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"out is '{out}': it cannot be made: {error.strerror}") from error
