"""Promises of the kernels' loader: a machine that cannot keep or run them says so, and decodes with torch instead."""

from __future__ import annotations

import ctypes
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from hispec_ray.config import Settings
from hispec_ray.native import library
from hispec_ray.native.library import NativeUnavailableError
from hispec_ray.shard import shard


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a compiler that writes an empty file instead of taking ten seconds."""

    def compile_nothing(compiler: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true")
    monkeypatch.setattr(library, "_compile", compile_nothing)
    return tmp_path / "hispec_ray"


def refuse(error: Exception) -> Any:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


def refused(*words: str) -> None:
    """Loading afresh must fail, and the message must have all these words."""
    with pytest.raises(NativeUnavailableError) as caught:
        library._built()
    assert all(word in str(caught.value) for word in (*words, "XDG_CACHE_HOME"))


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true")
    refused(str(tmp_path / "file" / "hispec_ray"), "Not a directory")


def test_a_read_only_cache_folder_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_compile", refuse(OSError(30, "Read-only file system")))
    refused(str(cache), "Read-only file system")


def test_a_cache_folder_that_is_mounted_noexec_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", refuse(OSError("failed to map segment from shared object")))
    refused(str(cache), "failed to map segment")


def test_without_a_home_folder_the_default_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", refuse(RuntimeError("Could not determine home directory.")))
    refused("~/.cache/hispec_ray", "Could not determine home directory")


def test_a_compiler_that_fails_is_not_blamed_on_the_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_compile", refuse(NativeUnavailableError("the C++ compiler failed")))
    with pytest.raises(NativeUnavailableError, match=r"^the C\+\+ compiler failed$"):
        library._built()


def test_the_start_falls_back_to_torch_with_a_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_compile", refuse(OSError(30, "Read-only file system")))
    monkeypatch.setattr(shard, "load", library._built)
    with caplog.at_level(logging.WARNING):
        assert not shard.wants_native(Settings.model_validate({"model": {"device": "cpu"}}))
    assert f"the cache folder {cache}" in caplog.text
    with pytest.raises(ValueError, match=r"model\.kernels is 'native', but the kernels cannot be kept in"):
        shard.wants_native(Settings.model_validate({"model": {"device": "cpu", "kernels": "native"}}))


def test_a_compiler_that_cannot_be_run_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (broken := tmp_path / "g++").touch(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    with pytest.raises(NativeUnavailableError, match=r"g\+\+ cannot be run \(.*Exec format error.*set model\.kernels to torch$"):
        library._built()
