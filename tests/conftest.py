"""What every test stands on: one thread, no hub, and models that are loaded once a session."""

# ruff: noqa: E402  the environment is set before torch, the hub and OpenMP read it
from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
for pool in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(pool, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from model.tiny import make_checkpoint, make_gguf
from shared import MakeLLM, Run, settings_of

from hispec_ray import LLM, Settings
from hispec_ray.cli import main
from hispec_ray.config import DEFAULT_MODEL
from hispec_ray.core.plan import StepPlan, StepResult
from hispec_ray.model.decoder import Decoder
from hispec_ray.model.heads import Card, ExitWeights, Heads, head_tensors
from hispec_ray.model.layout import layer_layout
from hispec_ray.model.native_decoder import NativeDecoder
from hispec_ray.model.parallel import whole
from hispec_ray.model.weights import ModelSource, convert_gguf, open_model
from hispec_ray.shard.shard import drafter_for, levels_for, round_for
from hispec_ray.speculation.choice import choose_native
from hispec_ray.speculation.grammar import Grammars
from hispec_ray.training.output import write_heads

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 8 layers with a tokenizer of 300 tokens; neighbouring depths agree on about half of the tokens."""
    root = tmp_path_factory.mktemp("tiny")
    checkpoint = make_checkpoint(root / "checkpoint", "smollm", num_hidden_layers=8)
    folder = root / "model"
    folder.mkdir()
    convert_gguf(make_gguf(root / "tiny.gguf", checkpoint), folder)
    return folder


@pytest.fixture(scope="session")
def block_heads(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of exits at every depth below the tiny model's, with a layer each to themselves: the model's next one, changed a little."""
    source = open_model(str(tiny_folder))
    weights, generator = source.weights(torch.float32), torch.Generator().manual_seed(5)
    exits = {}
    for depth in range(1, source.architecture.layers):
        block = {name: weights[f"layers.{depth}.{name}"] for name in layer_layout(source.architecture, whole(source.architecture))}
        changed = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in block.items()}
        exits[depth] = ExitWeights(block=changed)
    path = tmp_path_factory.mktemp("blocks") / "exits.safetensors"
    card = Card(base=source.fingerprint(), exits=tuple(exits), recipe="heads", kind="block")
    write_heads(path, head_tensors(Heads(exits), torch.bfloat16), card)
    return path


@pytest.fixture(scope="session")
def tiny_llm(tiny_folder: Path) -> MakeLLM:
    """Load the tiny model: `tiny_llm(dtype, method, draft, check, draft_tokens, window, **cache_and_scheduler)`."""

    def make(dtype: str = "float32", *speculation: Any, kernels: str = "auto", threads: int = 1, **others: Any) -> LLM:
        settings = settings_of({"path": str(tiny_folder), "dtype": dtype, "threads": threads, "kernels": kernels}, *speculation, **others)
        return LLM(settings)

    return make


@pytest.fixture(scope="session")
def default_source() -> ModelSource:
    return open_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def default_llm(default_source: ModelSource) -> MakeLLM:
    """Like `tiny_llm` for the default model; its weights are packed once a dtype and shared by all that are made."""
    decoders: dict[str, NativeDecoder] = {}
    grammars = Grammars(default_source.byte_tokenizer)

    def make(dtype: str = "float32", *speculation: Any, **others: Any) -> LLM:
        if dtype not in decoders:
            weights = default_source.weights(getattr(torch, dtype))
            decoders[dtype] = NativeDecoder(default_source.architecture, weights, positions=1024, blocks=128, block_size=16, threads=1)
        model = {"path": DEFAULT_MODEL, "dtype": dtype, "threads": 1, "max_model_len": 1024}
        settings = settings_of(model, *speculation, **{"blocks": 128, **others})
        with (
            patch("hispec_ray.engine.engine.open_model", lambda path, weights: default_source),
            patch("hispec_ray.engine.engine.InlineExecutor", lambda *_: SharedExecutor(settings, decoders[dtype], grammars)),
        ):
            return LLM(settings)

    return make


class SharedExecutor:
    """An `InlineExecutor` over a decoder that others use too, one after the other."""

    def __init__(self, settings: Settings, decoder: Decoder, grammars: Grammars) -> None:
        speculation, layers = settings.speculation, decoder.architecture.layers
        levels = levels_for(speculation, layers)
        self.blocks = settings.cache.blocks
        self.window = levels[-1].window
        self.grammars = grammars
        self._round = round_for(speculation, decoder, layers, choose_native(1), drafter_for(speculation), grammars=grammars)
        self.sources = self._round.sources
        self.lanes = 1
        self._plan = StepPlan(())

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan

    def forget(self) -> None:
        pass

    def check(self) -> None:
        pass

    def look_ahead(self) -> None:
        pass

    @torch.inference_mode()
    def collect(self) -> StepResult:
        return self._round.run(self._plan)


@pytest.fixture
def hispec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line here and return its status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hispec", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        code = end.value.code
        return code if isinstance(code, int) else 0, out, err

    return run
