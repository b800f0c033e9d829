"""Training on a machine that nothing but files reaches: `pack` cuts a model and its texts into parts, `train` puts them together there and
trains exits, `unpack` puts the result together again. See cluster/README.md.

Parts are a tar archive cut into pieces, with a list of what each must be; a part that is missing or damaged is named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from hispec_ray.model.heads import card_path
from hispec_ray.training.claim import make_folder

LIST = "parts.json"
_MIB = 2**20
_MOST_MIB = 1024  # of a part, which is held in memory
_OURS = ("--model", "--data", "--out", "--help")


def pack(paths: Iterable[Path], out: Path, part_bytes: int) -> list[Path]:
    """Put files and folders, links as what they lead to, into parts of at most so many bytes in `out`, beside their list; return the parts.

    Raises ValueError where a path does not exist, two have the same name, or `out` holds parts already.
    """
    names: set[str] = set()
    paths = [path.resolve() for path in paths]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        if path.name in names:
            raise ValueError(f"two of the paths are named {path.name}; names must differ")
        names.add(path.name)
    _claim(out)
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w", dereference=True) as archive:
            for path in paths:
                archive.add(path, arcname=path.name)
        whole.seek(0)
        parts: list[Path] = []
        digests: dict[str, str] = {}
        while piece := whole.read(part_bytes):
            parts.append(out / f"part-{len(parts):03}")
            parts[-1].write_bytes(piece)
            digests[parts[-1].name] = hashlib.sha256(piece).hexdigest()
    (out / LIST).write_text(json.dumps(digests, indent=1))
    return parts


def _claim(out: Path) -> None:
    if (out / LIST).exists():
        raise ValueError(f"{out} holds parts already; name another folder")
    make_folder(out)


def unpack(folder: Path, out: Path) -> list[Path]:
    """Put parts together in `out`; return what was packed. Raises ValueError where a part is missing or is not what it was."""
    try:
        digests = {str(name): str(digest) for name, digest in json.loads((folder / LIST).read_text()).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder / LIST} cannot be read: {error}") from None
    with tempfile.TemporaryFile() as whole:
        for name, digest in digests.items():
            part = folder / Path(name).name
            if not part.is_file():
                raise ValueError(f"{part} is missing; {LIST} names {len(digests)} parts")
            piece = part.read_bytes()
            if hashlib.sha256(piece).hexdigest() != digest:
                raise ValueError(f"{part} is not what was packed ({len(piece)} bytes); copy it again")
            whole.write(piece)
        whole.seek(0)
        try:
            with tarfile.open(fileobj=whole) as archive:
                top = list(dict.fromkeys(name.split("/")[0] for name in archive.getnames()))
                out.mkdir(parents=True, exist_ok=True)
                archive.extractall(out, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise ValueError(f"the parts in {folder} cannot be put together in {out}: {' '.join(str(error).split())}") from None
    return [out / name for name in top]


def train(folder: Path, work: Path, out: Path, part_bytes: int, options: Sequence[str]) -> list[Path]:
    """Train with what was packed: the model first, then texts. options: further ones of `hispec train-exits`.

    Returns the parts of the result. The same again goes on from the last checkpoint in `work`.
    Raises ValueError as `unpack`, and subprocess.CalledProcessError where the training fails.
    """
    taken = [option for option in options if option.split("=")[0] in _OURS]
    if taken:
        raise ValueError(f"behind -- stands {taken[0]}; the model, the texts and the folder are those of this command")
    _claim(out)  # before the time is spent
    model, *texts = unpack(folder, work / "packed")
    if not texts:
        raise ValueError(f"{folder} holds {model.name} alone; a model and at least one file of texts must be packed, in this order")
    data = [word for text in texts for word in ("--data", str(text))]
    command = [sys.executable, "-c", "from hispec_ray.cli import main; main()", "train-exits", "--model", str(model), *data]
    done = subprocess.run([*command, "--out", str(work / "exits"), *options], check=True, stdout=subprocess.PIPE, text=True)
    result = Path(done.stdout.splitlines()[-1])
    results = [result] if result.is_dir() else [result, card_path(result)]
    return pack([*results, work / "exits" / "log.jsonl"], out, part_bytes)


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    ours, further = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = argparse.ArgumentParser(prog="python -m cluster.offline", description=__doc__)
    commands = options.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="cut files and folders into parts; for train: a model, then texts")
    packing.add_argument("paths", type=Path, nargs="+")
    unpacking = commands.add_parser("unpack", help="put parts together")
    unpacking.add_argument("folder", type=Path)
    training = commands.add_parser("train", help="train on what was packed; what stands behind -- goes to hispec train-exits")
    training.add_argument("folder", type=Path)
    training.add_argument("--work", type=Path, required=True, help="a folder for the files, checkpoints and the log")
    for command, mib in ((packing, 50), (training, 15)):
        command.add_argument("--part-mib", type=int, default=mib, help=f"most of a part (default {mib})")
    for command in (packing, unpacking, training):
        command.add_argument("--out", type=Path, required=True, help="a folder for what comes out")
    asked = options.parse_args(ours)
    if further and asked.command != "train":
        options.error(f"behind -- stands {' '.join(further)}; only train takes further options")
    if asked.command != "unpack" and not 1 <= asked.part_mib <= _MOST_MIB:
        options.error(f"--part-mib is {asked.part_mib}; it must be from 1 to {_MOST_MIB}")
    try:
        if asked.command == "pack":
            made = pack(asked.paths, asked.out, asked.part_mib * _MIB)
        elif asked.command == "unpack":
            made = unpack(asked.folder, asked.out)
        else:
            made = train(asked.folder, asked.work, asked.out, asked.part_mib * _MIB, further)
    except (ValueError, OSError) as error:
        options.error(str(error))
    except subprocess.CalledProcessError as error:  # it has said why
        sys.exit(error.returncode)
    for path in made:
        print(path)


if __name__ == "__main__":
    main()
