"""A training that nothing but files reaches and leaves."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from cluster.offline import LIST, pack, train, unpack
from hispec_ray.model.heads import read_card


def test_what_is_packed_comes_out_whole(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "weights").write_bytes(bytes(range(256)) * 400)
    (tmp_path / "texts.txt").write_text("a text")
    parts = pack([tmp_path / "folder", tmp_path / "texts.txt"], tmp_path / "parts", 50_000)
    assert len(parts) > 2
    assert all(part.stat().st_size <= 50_000 for part in parts)
    folder, texts = unpack(tmp_path / "parts", tmp_path / "out")
    assert (folder / "weights").read_bytes() == bytes(range(256)) * 400
    assert texts.read_text() == "a text"


@pytest.mark.parametrize("harm", ["missing", "damaged", "no list"])
def test_a_part_that_is_not_what_was_packed_is_named(harm: str, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a text" * 10_000)
    part = pack([tmp_path / "texts.txt"], tmp_path / "parts", 20_000)[1]
    if harm == "missing":
        part.unlink()
    elif harm == "damaged":
        part.write_bytes(part.read_bytes()[:-1])
    else:
        (part := tmp_path / "parts" / LIST).unlink()
    with pytest.raises(ValueError, match=str(part)):
        unpack(tmp_path / "parts", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_paths_that_cannot_be_packed_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no-such does not exist"):
        pack([tmp_path / "no-such"], tmp_path / "parts", 100)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same").touch()
    with pytest.raises(ValueError, match="two of the paths are named same"):
        pack([tmp_path / "a" / "same", tmp_path / "b" / "same"], tmp_path / "parts", 100)


def test_exits_are_trained_from_parts_and_come_back_in_parts(tmp_path: Path) -> None:
    model = Path(str(files("hispec_ray.abacus") / "model"))
    (tmp_path / "texts.txt").write_text("\n".join(f"line {i} says that {i} and {i + 1} are {2 * i + 1}" for i in range(400)))
    pack([model, tmp_path / "texts.txt"], tmp_path / "job", 2**22)
    options = ["--exits", "1,2", "--steps", "4", "--lines-per-step", "2", "--line-tokens", "32", "--held-out", "0.1", "--threads", "1"]
    parts = train(tmp_path / "job", tmp_path / "work", tmp_path / "result", 100_000, options)
    assert len(parts) > 1
    weights, card, log = unpack(tmp_path / "result", tmp_path / "back")
    assert read_card(weights).exits == (1, 2)
    assert card.suffix == ".json"
    assert json.loads(log.read_text().splitlines()[-1])["step"] == 4
