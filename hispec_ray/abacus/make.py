"""Makes the abacus model again, from nothing: `python -m hispec_ray.abacus.make`; some hours on two cores.

It is taught by the `layerskip` recipe alone: cross-entropy of the full depth with the worked solution, the exits' divergence from
the full depth, layers dropped the more often the deeper they lie. Short and simple problems come first.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

from hispec_ray import LLM, SamplingParams
from hispec_ray.abacus.problems import MOST_STEPS, Problem, answer_of, held_out, make, stream
from hispec_ray.abacus.tokenizer import train_tokenizer
from hispec_ray.training.data import Line
from hispec_ray.training.progress import Progress
from hispec_ray.training.student import ExitStudent
from hispec_ray.training.trainer import TrainingSettings, train

EXITS = (2, 4, 6)
POSITIONS = 512
SETTINGS = TrainingSettings(
    steps=2800,
    lines_per_step=16,
    micro_lines=8,
    learning_rate=2e-3,
    warmup=0.03,
    layer_dropout=0.1,
    exit_weight=0.5,
    save_every=100,
    report_every=20,
    evaluate_every=500,
)


GROWING = 600
"""Steps of the training, at its start, in which problems grow from one step to all."""
EXAMINED = 500
"""Held-out problems that the finished model solves for its card."""
ECHOES = 1100, 1400
"""Between these steps every other line is a problem's question said twice: what a solution needs is copied from there."""


class ProblemBatches:
    """Problems drawn anew for every step, short ones first."""

    def __init__(self, tokenizer: Any, settings: TrainingSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

    def batch(self, step: int) -> Sequence[Line]:
        rng = random.Random(f"abacus {self._settings.seed} {step}")
        most = min(MOST_STEPS, 1 + MOST_STEPS * step // GROWING)
        drawn = (make(rng, rng.randint(1, most)) for _ in itertools.count())
        problems = itertools.islice((p for p in drawn if not held_out(p)), self._settings.lines_per_step)
        echoes = ECHOES[0] <= step < ECHOES[1]
        return [self._echo(p) if echoes and i % 2 else self._line(p) for i, p in enumerate(problems)]

    def held_out(self) -> Sequence[Line]:
        return [self._line(problem) for problem in itertools.islice(stream(1, "held_out"), 128)]

    def _echo(self, problem: Problem) -> Line:
        prompt = self._tokenizer.encode(problem.prompt, add_special_tokens=False)
        return Line((*prompt, *prompt), len(prompt))

    def _line(self, problem: Problem) -> Line:
        prompt, solution = (self._tokenizer.encode(text, add_special_tokens=False) for text in (problem.prompt, problem.solution))
        return Line((*prompt, *solution, self._tokenizer.eos_token_id), len(prompt))


def main(
    out: Annotated[Path, typer.Option(help="Folder for the model; checkpoints go there too while it trains.")],
    steps: Annotated[int, typer.Option(min=1)] = SETTINGS.steps,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    device: str = "cpu",
) -> None:
    torch.set_num_threads(threads)
    settings = SETTINGS.model_copy(update={"steps": steps})
    tokenizer = train_tokenizer(problem.text for problem in itertools.islice(stream(0, "train"), 20_000))
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=16,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    student = ExitStudent(model, EXITS)
    with Progress(out, settings.steps, EXITS) as progress:
        report = train(student, ProblemBatches(tokenizer, settings), settings, out, progress)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    card = {
        "made_by": "python -m hispec_ray.abacus.make --out FOLDER",
        "recipe": "layerskip",
        "parameters": parameters,
        "steps": settings.steps,
        "problems": settings.steps * settings.lines_per_step,
        "exits": EXITS,
        "agreement": [round(share, 4) for share in report.agreement],  # with the full depth, on held-out solutions
        "text": report.text,  # cross-entropy of the full depth there, in nats a token
        "accuracy": accuracy(out, threads),
        "accuracy_of": EXAMINED,
    }
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")


def accuracy(folder: Path, threads: int) -> float:
    """Return the share of EXAMINED held-out problems to which the model's greedy solution ends in the right number."""
    llm = LLM({"model": {"path": str(folder), "threads": threads}, "speculation": {"method": "plain"}})
    problems = list(itertools.islice(stream(2, "held_out"), EXAMINED))
    done = llm.generate([problem.prompt for problem in problems], SamplingParams(temperature=0, max_tokens=400))
    right = [answer_of(one.choices[0].text) == problem.answer for one, problem in zip(done, problems, strict=True)]
    return sum(right) / len(right)


if __name__ == "__main__":
    typer.run(main)
