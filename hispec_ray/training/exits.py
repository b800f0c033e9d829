"""`hispec train-exits`: from a model and texts to trained exits. Reads the data, picks the recipe, trains, writes the result."""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from hispec_ray.config import Group, Positive
from hispec_ray.model.heads import Card, ExitNetwork, Heads, Kind, block_weights, head_tensors
from hispec_ray.model.weights import ModelSource, open_model
from hispec_ray.training.claim import claim, make_folder, refuse_file
from hispec_ray.training.data import Line, TextBatches
from hispec_ray.training.output import EXITS_FILE, MODEL_FOLDER, write_heads, write_model
from hispec_ray.training.progress import Progress
from hispec_ray.training.reading import LineReader, split
from hispec_ray.training.student import LOGITS_AT_ONCE, ExitStudent, next_layer
from hispec_ray.training.trainer import Report, TrainingSettings, join_group, train
from hispec_ray.training.vocabulary import choose_vocabulary

SETTINGS_FILE = "settings.json"
RATES = {"heads": 1e-3, "layerskip": 1e-4}
_TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 4096}  # that one process reads in one pass
_FREE = ("out", "threads", "save_every")  # what may change when a training goes on
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")


class ExitTrainingSettings(Group):
    """What `hispec train-exits` is asked for."""

    model: str
    data: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files and folders; see `LineReader`."""
    exits: Annotated[tuple[int, ...], Field(min_length=1)]
    """Depths, in layers from the bottom, ascending."""
    out: str
    """A folder. Processes on several machines must all see it."""
    recipe: Literal["heads", "layerskip"] = "heads"
    kind: Kind = "mlp"
    """heads: what stands at an exit before the shared norm and head; a block begins as a copy of the model's next layer."""
    inner: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """heads: inner width of an exit's MLP; the model's width where unset."""
    vocabulary: Positive | None = None
    """heads: how many of the data's most frequent ids the exits score; all of the model's where unset."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """layerskip: rank of the adapters on every linear layer, merged at the end; 0 trains the whole model."""
    layer_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """layerskip: how likely a batch skips the last layer."""
    exit_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """layerskip: what the exits' divergence weighs, beside the text's cross-entropy, which weighs 1."""
    steps: Positive = 1000
    lines_per_step: Positive = 16
    line_tokens: Annotated[int, Field(ge=2)] = 256
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """RATES where unset."""
    zero: Literal[1, 2, 3] = 1
    workers: Positive = 1
    """Processes; more than one run in Ray Train."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bfloat16", "float32"] | None = None
    """heads: of the backbone, bfloat16 on cuda and float32 on cpu where unset; a CPU that multiplies bf16 reads faster with it.
    Exit networks are float32 everywhere."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of each process."""
    seed: Annotated[int, Field(ge=0, le=2**40)] = 0
    save_every: Positive = 200
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Share of the data that is not trained on but measured with."""


@dataclass(frozen=True, slots=True)
class Task:
    """Settings that have been held against the model and the data, and what was read of both."""

    settings: ExitTrainingSettings
    source: ModelSource
    lines: list[Line]
    held_out: list[Line]
    vocabulary: torch.Tensor | None
    base: str

    @property
    def out(self) -> Path:
        return Path(self.settings.out).expanduser()

    @property
    def result(self) -> Path:
        """What the training writes: a file for heads, a folder for layerskip."""
        return self.out / (EXITS_FILE if self.settings.recipe == "heads" else MODEL_FOLDER)


def train_exits(settings: ExitTrainingSettings) -> Path:
    """Train exits, from the last checkpoint in the output folder on, and return what was written there.

    That is `exits.safetensors` for `speculation.exits.heads` (heads), or the folder `model` for `model.path` (layerskip), each with a
    card `exits.json` beside the weights. Shows a progress bar; leaves `log.jsonl`, tensorboard's events and checkpoints.
    Raises ValueError, in one line, where the settings do not fit the model, the data or the training that the folder has begun, and
    OSError, with nothing half-written left, where something cannot be written.
    """
    refuse_file(Path(settings.out).expanduser())  # before the data is read
    task = prepare(settings)
    begin(task)
    with Progress(task.out, settings.steps, settings.exits) as progress:
        if settings.workers == 1:
            run(task, progress)
        else:
            from hispec_ray.training.cluster import run_on_ray  # noqa: PLC0415  seconds to import, and only clusters need it

            run_on_ray(settings, progress)
    return task.result


def prepare(settings: ExitTrainingSettings) -> Task:
    """Open the model and read the data. Raises ValueError where something does not fit."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' and torch sees no CUDA device here; it must be 'cpu'")
    source = open_model(settings.model)
    _check(settings, source)
    groups = LineReader(source, settings.line_tokens).read([Path(path).expanduser() for path in settings.data])
    lines, held_out = split(groups, settings.held_out, settings.seed)
    TextBatches(lines, held_out, settings.lines_per_step, settings.seed)  # raises where there are too few
    vocabulary = None if settings.vocabulary is None else choose_vocabulary(lines, settings.vocabulary, source)
    return Task(settings, source, lines, held_out, vocabulary, source.fingerprint())


def _check(settings: ExitTrainingSettings, source: ModelSource) -> None:
    layers, positions = source.architecture.layers, source.architecture.attention_limit
    named = ",".join(map(str, settings.exits))
    if list(settings.exits) != sorted(set(settings.exits)):
        raise ValueError(f"exits is {named}; they must ascend")
    if settings.exits[0] < 1 or settings.exits[-1] >= layers:
        raise ValueError(f"exits is {named}; each must be from 1 to {layers - 1} (the model has {layers} layers)")
    if settings.line_tokens > positions:
        raise ValueError(f"line_tokens is {settings.line_tokens}; it must be from 2 to {positions} (the model's context)")
    if settings.lines_per_step % settings.workers:
        raise ValueError(f"lines_per_step is {settings.lines_per_step}; it must be a multiple of workers, {settings.workers}")
    others = {"heads": ("lora_rank", "layer_dropout", "exit_weight"), "layerskip": ("kind", "inner", "vocabulary")}
    for name in others[settings.recipe]:
        value = getattr(settings, name)
        if value != ExitTrainingSettings.model_fields[name].default:
            raise ValueError(f"{name} is {value!r} and recipe is '{settings.recipe}'; it goes with the other recipe alone")
    if settings.dtype and settings.recipe == "layerskip":
        raise ValueError(f"dtype is '{settings.dtype}' and recipe is 'layerskip'; it goes with heads alone, where the model stays as it is")
    if settings.inner and settings.kind != "mlp":
        raise ValueError(f"inner is {settings.inner} and kind is '{settings.kind}'; it goes with 'mlp' alone")


def begin(task: Task) -> None:
    """Note in the output folder what is trained there. Raises as `make_folder` and `claim`."""
    make_folder(task.out)
    settings = task.settings.model_dump(mode="json", exclude=set(_FREE))
    settings |= {"model": task.base, "data": _digest(task.lines + task.held_out)}
    claim(task.out / SETTINGS_FILE, settings, task.out, "a training", "folder")


def _digest(lines: list[Line]) -> str:
    digest = hashlib.sha256()
    for line in sorted(lines, key=lambda line: (line.ids, line.learn_from)):  # whatever the seed of the split
        digest.update(array("q", [line.learn_from, len(line.ids), *line.ids]).tobytes())
    return digest.hexdigest()


def run(task: Task, report: Callable[[Report], None]) -> None:
    """Train in this process, one of its process group or one by itself; rank 0 writes the result. Raises as `train_exits`."""
    settings = task.settings
    if settings.threads:
        torch.set_num_threads(settings.threads)
    transformers_logging.disable_progress_bar()
    rank, world = join_group(settings.device)
    model = _Model(task)
    batches = TextBatches(task.lines, task.held_out, settings.lines_per_step, settings.seed)
    last = train(model.student, batches, _training_settings(task, world), task.out, report)
    if rank == 0:
        model.write(last)


def _training_settings(task: Task, world: int) -> TrainingSettings:
    settings = task.settings
    skips = settings.recipe == "layerskip"
    scored = task.source.architecture.vocabulary if task.vocabulary is None else len(task.vocabulary)
    return TrainingSettings(
        steps=settings.steps,
        lines_per_step=settings.lines_per_step,
        micro_lines=_lines_at_once(settings.lines_per_step // world, settings.line_tokens, scored, settings.device),
        learning_rate=settings.learning_rate or RATES[settings.recipe],
        layer_dropout=settings.layer_dropout if skips else 0.0,
        text_weight=1.0 if skips else 0.0,
        exit_weight=settings.exit_weight,
        zero_stage=settings.zero,
        save_every=settings.save_every,
        evaluate_every=max(10, settings.steps // 10),
        seed=settings.seed,
    )


def _lines_at_once(lines: int, line_tokens: int, scored: int, device: str) -> int:
    """How many of a process's lines it reads in one pass: as memory allows, and fewer where that keeps logits from being computed twice.

    See `LOGITS_AT_ONCE`. scored: ids. Not less than half as many, for then passes are slow.
    """
    even = [some for some in range(1, lines + 1) if lines % some == 0]
    most = max(some for some in even if some == 1 or some * line_tokens <= _TOKENS_AT_ONCE[device])
    fewer = max(some for some in even if some == 1 or some * line_tokens * scored <= LOGITS_AT_ONCE[device])
    return min(most, fewer) if 2 * fewer >= most else most


class _Model:
    """The model of a task: as a student to be trained, and then as what is written."""

    def __init__(self, task: Task) -> None:
        self._task = task
        settings = task.settings
        torch.manual_seed(settings.seed)
        config = copy.deepcopy(task.source.config)
        for name in _DROPOUTS:  # OPT's: a training that goes on could not draw the same again
            if hasattr(config, name):
                setattr(config, name, 0.0)
        backbone = AutoModelForCausalLM.from_pretrained(task.source.folder, config=config, dtype="auto", local_files_only=True)
        self._dtype = backbone.dtype
        dtype = settings.dtype or ("bfloat16" if settings.device == "cuda" else "float32")
        self._backbone: Any = backbone.to(settings.device, getattr(torch, dtype))
        self._networks: list[ExitNetwork] | None = None
        self._blocks: list[nn.Module] | None = None
        if settings.recipe == "heads":
            if settings.kind == "block":
                self._blocks = [next_layer(backbone, depth) for depth in settings.exits]
            else:
                width = task.source.architecture.width
                networks = [ExitNetwork(width, settings.kind, settings.inner or width) for _ in settings.exits]
                self._networks = [network.to(settings.device) for network in networks]
            vocabulary = None if task.vocabulary is None else task.vocabulary.to(settings.device)
            self.student = ExitStudent(backbone, settings.exits, networks=self._networks, blocks=self._blocks, vocabulary=vocabulary)
            return
        if settings.lora_rank:
            from peft import LoraConfig, get_peft_model  # noqa: PLC0415  seconds to import, and only adapters need it

            rank = settings.lora_rank
            self._backbone = get_peft_model(backbone, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
        self.student = ExitStudent(backbone, settings.exits)

    def _heads(self) -> Heads:
        architecture = self._task.source.architecture
        trained = [network.weights() for network in self._networks or []]
        trained += [block_weights(block, architecture) for block in self._blocks or []]
        return Heads(dict(zip(self._task.settings.exits, trained, strict=True)), self._task.vocabulary)

    def write(self, last: Report) -> None:
        """Write what has been trained, with its card."""
        task, settings = self._task, self._task.settings
        heads = settings.recipe == "heads"
        card = Card(
            base=task.base,
            exits=settings.exits,
            recipe=settings.recipe,
            kind=settings.kind if heads else None,
            inner=(settings.inner or task.source.architecture.width) if heads and settings.kind == "mlp" else None,
            vocabulary=None if task.vocabulary is None else len(task.vocabulary),
            data=", ".join(settings.data),
            tokens=sum(len(line.ids) - max(1, line.learn_from) for line in task.lines),
            acceptance={exit: round(share, 4) for exit, share in zip(settings.exits, last.agreement, strict=True)},
        )
        if heads:
            write_heads(task.result, head_tensors(self._heads(), torch.bfloat16), card)
        else:
            merged = self._backbone.merge_and_unload() if settings.lora_rank else self._backbone
            write_model(task.result, merged.to(self._dtype), task.source, card)
