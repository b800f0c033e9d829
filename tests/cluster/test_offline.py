"""A training that nothing but files reaches and leaves."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from cluster.offline import LIST, main, pack, unpack
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


def test_links_are_packed_as_what_they_lead_to(tmp_path: Path) -> None:
    """As in the folders that Hugging Face keeps: names that lead to files outside."""
    (tmp_path / "blob").write_text("weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model").symlink_to("../blob")
    pack([tmp_path / "snapshot"], tmp_path / "parts", 100_000)
    (folder,) = unpack(tmp_path / "parts", tmp_path / "out")
    assert (folder / "model").read_text() == "weights"
    assert not (folder / "model").is_symlink()


def test_a_folder_of_parts_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.txt").write_text("a text")
    pack([tmp_path / "texts.txt"], tmp_path / "parts", 1000)
    with pytest.raises(SystemExit) as ended:
        main(["pack", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "parts")])
    assert ended.value.code == 2
    assert f"{tmp_path / 'parts'} holds parts already; name another folder" in capsys.readouterr().err


@pytest.mark.parametrize("listed", ["{}", "[]", '{"part-000":'])
def test_a_list_that_is_damaged_is_one_line(listed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / LIST).write_text(listed)
    with pytest.raises(SystemExit):
        main(["unpack", str(tmp_path / "parts"), "--out", str(tmp_path / "out")])
    assert str(tmp_path / "parts") in capsys.readouterr().err.splitlines()[-1]


def test_exits_are_trained_from_parts_and_come_back_in_parts(tmp_path: Path) -> None:
    model = Path(str(files("hispec_ray.abacus") / "model"))
    (tmp_path / "texts.txt").write_text("\n".join(f"line {i} says that {i} and {i + 1} are {2 * i + 1}" for i in range(400)))
    pack([model, tmp_path / "texts.txt"], tmp_path / "job", 2**22)
    options = ["--exits", "1,2", "--steps", "4", "--lines-per-step", "2", "--line-tokens", "32", "--held-out", "0.1", "--threads", "1"]
    folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "result")]
    main(["train", str(tmp_path / "job"), *folders, "--", *options])
    weights, card, log = unpack(tmp_path / "result", tmp_path / "back")
    assert read_card(weights).exits == (1, 2)
    assert card.suffix == ".json"
    assert json.loads(log.read_text().splitlines()[-1])["step"] == 4


@pytest.mark.parametrize("option", ["--out", "--model", "--data=x", "--help"])
def test_what_the_job_says_itself_is_no_further_option(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", str(tmp_path), "--work", str(tmp_path / "work"), "--out", str(tmp_path / "result"), "--", option, "x"])
    assert f"behind -- stands {option}; the model, the texts and the folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mib", [0, 1025])
def test_the_size_of_a_part_has_bounds(mib: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pack", str(tmp_path), "--out", str(tmp_path / "parts"), "--part-mib", str(mib)])
    assert f"--part-mib is {mib}; it must be from 1 to 1024" in capsys.readouterr().err
