"""Settings out of deployment files and options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hispec_ray.commands.errors import InputError, in_words
from hispec_ray.config import Settings


def settings_from(config: Path | None, options: Mapping[str, object]) -> Settings:
    """The settings of a deployment file, or else the defaults, under the options that were given. Raises InputError."""
    tree = _application_args(config) if config else {}
    for name, value in options.items():
        if value is not None:
            *groups, last = name.split(".")
            group = tree
            for key in groups:
                group = group.setdefault(key, {})
                if not isinstance(group, dict):
                    raise InputError(f"config is '{config}': {key} is {group!r}; it must be a mapping")
            group[last] = value
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise InputError(in_words(error)) from None


def _application_args(path: Path) -> dict[str, Any]:
    """What stands under `args:` of the one application in a deployment file that is ours. Raises InputError."""
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise InputError(f"config is '{path}': {reason}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    listed = applications if isinstance(applications, list) else []
    ours = [one for one in listed if isinstance(one, dict) and str(one.get("import_path")).startswith("hispec_ray.")]
    args = ours[0].get("args", {}) if len(ours) == 1 else None
    if not isinstance(args, dict):
        raise InputError(f"config is '{path}'; it must be a Serve config with one application of hispec_ray, whose args are a mapping")
    return args
