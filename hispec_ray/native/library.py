"""Compiles the kernels once for this machine's processor and loads them.

A plain shared library behind ctypes rather than a torch extension: it builds in seconds, needs no headers
of torch, and a call releases the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = {"kernels.cpp": (), "draft.cpp": (), "choice.cpp": ("-ffp-contract=off",), "lookup.cpp": ("-ffp-contract=off",)}
HEADERS = ("model.h", "team.h")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-pthread", "-fPIC")


class NativeUnavailableError(RuntimeError):
    """The kernels cannot be built here; the message says why and what would help."""


def cache_folder() -> Path:
    """Where built kernels, converted models and fingerprints are kept: `$XDG_CACHE_HOME/hispec_ray`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hispec_ray"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, target: Path) -> None:
    folder = Path(__file__).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        objects = []
        for name, extra in SOURCES.items():
            objects.append(f"{work}/{name}.o")
            _execute([compiler, *FLAGS, *extra, "-c", str(folder / name), "-o", objects[-1]])
        library = f"{work}/{target.name}"
        _execute([compiler, "-shared", "-pthread", *objects, "-o", library])
        os.replace(library, target)  # another process may be building the same file: the last one wins, both are whole


def _execute(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[-1] if lines else f"status {done.returncode}")
        raise NativeUnavailableError(f"the C++ compiler failed ({reason.strip()}); the command was {' '.join(command)}")


def load() -> ctypes.CDLL:
    """Return the loaded kernels, building them on first use (about ten seconds).

    Raises NativeUnavailableError where there is no C++ compiler or no cache folder that can be written and run from; in a process that it
    was raised in, nothing is tried again.
    """
    found = _load()
    if isinstance(found, NativeUnavailableError):
        raise found
    return found


@functools.cache
def _load() -> ctypes.CDLL | NativeUnavailableError:
    try:
        return _built()
    except NativeUnavailableError as error:
        return error


def _built() -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NativeUnavailableError("no C++ compiler (g++ or c++) on PATH; install one, or set model.kernels to torch")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise NativeUnavailableError(
            f"the C++ compiler {compiler} cannot be run ({error}); install another, or set model.kernels to torch"
        ) from error
    parts = [
        version,
        _processor(),
        repr(FLAGS),
        repr(SOURCES),
        *((Path(__file__).parent / name).read_text() for name in (*SOURCES, *HEADERS)),
    ]
    folder: Path | str = "~/.cache/hispec_ray"
    try:
        folder = cache_folder()
        target = folder / "kernels" / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
        if not target.exists():
            _compile(compiler, target)
        library = ctypes.CDLL(str(target))
    except NativeUnavailableError:
        raise
    except (OSError, RuntimeError) as error:  # read-only, full, or mounted noexec; RuntimeError where there is no home folder
        raise NativeUnavailableError(
            f"the kernels cannot be kept in or loaded from the cache folder {folder} ({error}); name another in XDG_CACHE_HOME"
        ) from error
    library.hispec_panel.restype = ctypes.c_int64
    library.hispec_chunk.restype = ctypes.c_int64
    return library
