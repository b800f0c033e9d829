"""What a training leaves: a file of trained exits, or a model folder, each with its card; each file is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hispec_ray.model.heads import Card, card_path
from hispec_ray.model.weights import ModelSource

EXITS_FILE = "exits.safetensors"
MODEL_FOLDER = "model"
_COPIED = (".json", ".jinja", ".txt", ".model")  # config, tokenizer, chat template


def write_heads(path: Path, tensors: Mapping[str, torch.Tensor], card: Card) -> None:
    """Write a file of trained exits and its card.

    Raises OSError where there is no room or no right to write; files that stood there before stay as they were. Who is killed between the
    last two steps leaves weights without a card, which nobody loads.
    """
    scratch, card_scratch = path.with_name("exits.writing"), path.with_name("card.writing")
    with whole(path, scratch, card_scratch):
        save_tensors(tensors, scratch)
        card_scratch.write_text(card.model_dump_json(indent=1))
        card_path(path).unlink(missing_ok=True)
        scratch.rename(path)
        card_scratch.rename(card_path(path))


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that may be read by whom the umask lets: safetensors itself leaves it to its owner."""
    save_file(dict(tensors), path, metadata=metadata)
    os.umask(mask := os.umask(0))
    path.chmod(0o666 & ~mask)


def write_model(path: Path, model: Any, source: ModelSource, card: Card) -> None:
    """Write a transformers model into a folder that `model.path` takes, with the config and tokenizer of its source, and its card.

    Raises OSError as `write_heads`.
    """
    scratch = path.with_name(f"{path.name}.writing")
    with whole(path, scratch):
        model.save_pretrained(scratch, max_shard_size="1TB")
        for file in source.folder.iterdir():
            if file.suffix in _COPIED and file.name != "model.safetensors.index.json":
                shutil.copyfile(file, scratch / file.name)
        card_path(scratch / EXITS_FILE).write_text(card.model_dump_json(indent=1))
        if path.exists():
            shutil.rmtree(path)
        scratch.rename(path)


@contextlib.contextmanager
def whole(path: Path, *scratch: Path) -> Iterator[None]:
    """Leave nothing of the scratch where writing fails, and say in one line what could not be written."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # what safetensors and torch raise where a disk is full
        raise OSError(f"{path} cannot be written: {' '.join(str(error).split())}") from error
    finally:
        for left in scratch:
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
