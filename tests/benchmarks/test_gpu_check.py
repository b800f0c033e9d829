"""The check of a GPU passes on a CPU with a small model, and its dial says what it is set to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import gpu_check
from benchmarks.gpu_check import SHAPES, Dial, Machine, Watched, decode, random_weights
from hispec_ray.model.architecture import Architecture


@pytest.mark.parametrize("method", gpu_check.METHODS)
def test_the_full_depth_writes_the_text_that_guesses_are_dialled_against(method: str) -> None:
    a = Architecture.from_config(LlamaConfig(**SHAPES["tiny"]))
    machine = Machine(torch.device("cpu"), torch.float32, a, random_weights(a, torch.float32, torch.device("cpu")))
    prompt = [3, 1, 4, 1, 5]
    text = [*prompt, *((11 * i) % 256 for i in range(20))]  # which the model itself would not write
    dial = Dial(0.5, text, a.layers)
    watched = Watched(machine.decoder(1, len(text), choose=dial), dial)
    assert decode(machine, watched, method, prompt, 20, 1, dial)[0] == text


def test_the_small_check_passes_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--tiny", "--tokens", "8", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (end.value.code, headline["passed"]) == (0, True)
    assert "hispec's text against plain decoding's | equal |" in (tmp_path / "gpu.md").read_text()
