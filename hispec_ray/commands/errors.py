"""How a command ends that could not do what it was asked: in one line, in words for the person who typed it."""

from __future__ import annotations

import contextlib
import sys
import typing
from collections.abc import Iterator
from typing import Any

import typer
from pydantic import BaseModel, ValidationError

from hispec_ray.config import Settings

INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


class InputError(ValueError):
    """What was typed, or stands in the file that was named, cannot be used: names it and what is valid."""


@contextlib.contextmanager
def in_one_line(stopped: str) -> Iterator[None]:
    """Turn what the rooms raise into a line and a status: 2 for input, 1 for a full disk and the like, 130 and `stopped` for Ctrl-C."""
    try:
        yield
    except OSError as error:
        print(f"hispec: error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except ValueError as error:
        raise InputError(str(error)) from error
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def in_words(error: ValidationError) -> str:
    """Return what is wrong with settings, in one line: each field, its value, what is valid."""
    details = error.errors(include_url=False)
    # a list without its bad entries may be too short besides: that is no second fault
    outer = {detail["loc"][:length] for detail in details for length in range(len(detail["loc"]))}
    return "; ".join(_one_in_words(detail["type"], detail["loc"], detail) for detail in details if detail["loc"] not in outer)


def _one_in_words(kind: str, location: tuple[int | str, ...], detail: Any) -> str:
    field = ".".join(str(part) for part in location)
    if kind == "value_error":  # raised by the settings tree itself, in full words
        return str(detail["ctx"]["error"])
    if kind == "extra_forbidden":
        group: Any = Settings
        for part in location[:-1]:
            if isinstance(part, str):  # a number stands in a list, whose entries are of one kind
                group = _group_in(group.model_fields[part].annotation)
        return f"{field} is no setting; there are {', '.join(group.model_fields)}"
    return f"{field} is {detail['input']!r}; {detail['msg'].replace('Input', 'it', 1).replace('should', 'must', 1)}"


def _group_in(annotation: Any) -> Any:
    """The group of settings that a type has within it: itself, or one that may be left out, or the entries of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((group for part in typing.get_args(annotation) if (group := _group_in(part))), None)
