"""Files of trained exits that are not what their card says are refused in one line, whatever is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.tiny import make_checkpoint
from safetensors.torch import save_file

from hispec_ray.model.heads import Card, ExitNetwork, Heads, card_path, head_tensors, load_heads
from hispec_ray.model.weights import ModelSource, open_model

Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_model(str(make_checkpoint(tmp_path_factory.mktemp("model"), "smollm")))


def written(folder: Path, source: ModelSource, network: str, **card: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file of two exits with five ids, and its tensors."""
    width = source.architecture.width
    networks = {depth: ExitNetwork(width, network, 8).weights() for depth in (1, 2)}  # type: ignore[arg-type]
    tensors = head_tensors(Heads(networks, torch.arange(0, 10, 2)), torch.bfloat16)
    fields = {"base": source.fingerprint(), "exits": (1, 2), "recipe": "heads", "kind": network, "inner": 8, "vocabulary": 5, **card}
    path = folder / "exits.safetensors"
    card_path(path).write_text(Card.model_validate(fields).model_dump_json())
    return path, tensors


def load(path: Path, source: ModelSource) -> Heads:
    return load_heads(path, source.fingerprint(), needed=[1, 2], architecture=source.architecture, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_what_is_written_is_read(kind: str, source: ModelSource, tmp_path: Path) -> None:
    path, tensors = written(tmp_path, source, kind)
    save_file(tensors, path)
    heads = load(path, source)
    assert heads.vocabulary is not None
    assert heads.vocabulary.tolist() == [0, 2, 4, 6, 8]
    assert all(torch.equal(exit.up, tensors[f"exits.{depth}.up"]) for depth, exit in heads.exits.items() if exit.up is not None)


CHANGES: dict[str, tuple[str, Change, str]] = {
    "no up": ("mlp", lambda t: t.pop("exits.2.up"), "it has no exits.2.up; expected one of shape [16, {width}]"),
    "no down": ("mlp", lambda t: t.pop("exits.1.down"), "it has no exits.1.down; expected one of shape [{width}, 8]"),
    "rows of up": ("mlp", lambda t: t.update({"exits.1.up": t["exits.1.up"][:-1]}), "exits.1.up has shape [15, {width}]"),
    "inner of down": ("mlp", lambda t: t.update({"exits.1.down": t["exits.1.down"][:, :4].clone()}), "exits.1.down has shape [{width}, 4]"),
    "a linear with too many rows": (
        "linear", lambda t: t.update({"exits.1.up": torch.cat((t["exits.1.up"], t["exits.1.up"]))}), "exits.1.up has shape [",
    ),
    "a row": ("linear", lambda t: t.update({"exits.1.up": t["exits.1.up"][0].clone()}), "exits.1.up has shape [{width}]"),
    "whole numbers": ("linear", lambda t: t.update({"exits.1.up": t["exits.1.up"].int()}), "exits.1.up is torch.int32; it must be"),
    "not a number": ("linear", lambda t: t["exits.2.up"].fill_(float("nan")), "exits.2.up has numbers that are not finite"),
    "fractions of ids": ("mlp", lambda t: t.update(vocabulary=t["vocabulary"].float()), "its vocabulary is torch.float32 of shape [5]"),
    "one id without a row": ("mlp", lambda t: t.update(vocabulary=torch.tensor(3)), "its vocabulary is torch.int64 of shape []"),
    "fewer ids": ("mlp", lambda t: t.update(vocabulary=t["vocabulary"][:3].clone()), "its vocabulary has 3 ids; its card says 5"),
    "no ids": ("mlp", lambda t: t.pop("vocabulary"), "its vocabulary is missing"),
    "ids that do not ascend": ("mlp", lambda t: t.update(vocabulary=t["vocabulary"].flip(0)), "its vocabulary must be ascending ids"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_are_not_what_the_card_says_are_named(change: str, source: ModelSource, tmp_path: Path) -> None:
    kind, do, message = CHANGES[change]
    path, tensors = written(tmp_path, source, kind)
    do(tensors)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="exits") as refused:
        load(path, source)
    assert str(refused.value).startswith(f"speculation.exits.heads is '{path}': {message.format(width=source.architecture.width)}")


@pytest.mark.parametrize(
    "card", [b"\xff\xfe", b"[" * 100_000, b'{"base": ' + b"1" * 5000 + b"}", b"[]", b"{}"], ids=["bytes", "deep", "long", "list", "empty"]
)
def test_a_card_that_is_no_card_is_one_line(card: bytes, source: ModelSource, tmp_path: Path) -> None:
    path, tensors = written(tmp_path, source, "mlp")
    save_file(tensors, path)
    card_path(path).write_bytes(card)
    with pytest.raises(ValueError, match="exits") as refused:
        load(path, source)
    assert str(refused.value).startswith(f"speculation.exits.heads is '{path}': its card {card_path(path)} cannot be read: ")


@pytest.mark.parametrize(
    ("card", "message"), [({"kind": None}, "its card names no kind"), ({"inner": None}, "its card names no inner width")]
)
def test_a_card_that_leaves_something_out_is_refused(card: dict[str, Any], message: str, source: ModelSource, tmp_path: Path) -> None:
    path, tensors = written(tmp_path, source, "mlp", **card)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        load(path, source)
