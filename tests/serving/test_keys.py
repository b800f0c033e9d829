"""Where API keys come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from hispec_ray.serving.keys import read_keys


def test_keys_come_from_a_file_and_from_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\none\n\n  two  \n")
    monkeypatch.setenv("KEYS", "three, four,")
    assert read_keys(None, None) is None
    both = read_keys(str(file), "KEYS")
    assert both
    assert [both.has(f"Bearer {key}") for key in ("one", "two", "three", "four", "five", "# of the team", "")] == [True] * 4 + [False] * 3


@pytest.mark.parametrize("text", ["", "\n# nothing\n", None, b"\xff"])
def test_a_file_without_keys_stops_the_start(tmp_path: Path, text: str | bytes | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"server\.api_keys_file is"):
        read_keys(str(file), None)


def test_a_variable_without_keys_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYS", raising=False)
    with pytest.raises(ValueError, match=r"server\.api_keys_variable is 'KEYS'"):
        read_keys(None, "KEYS")
