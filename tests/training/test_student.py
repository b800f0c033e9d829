"""The student: what an exit's loss is, for every family, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model.tiny import FAMILIES, make_checkpoint
from transformers import AutoModelForCausalLM

from hispec_ray.model.heads import ExitNetwork
from hispec_ray.training.student import IGNORED, LOGITS_AT_ONCE, ExitStudent, layers_to_drop, next_layer

VOCABULARY = torch.arange(0, 300, 3)


def model_of(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(make_checkpoint(folder, family), dtype=dtype).eval()


def networks(width: int, count: int = 2) -> list[ExitNetwork]:
    """Networks that are not at their start, where they change nothing."""
    torch.manual_seed(0)
    made = [ExitNetwork(width, "mlp", 32) for _ in range(count)]
    for network in made:
        torch.nn.init.normal_(network.down.weight, std=0.1)
    return made


def batch(rows: int = 3, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets; lines are padded at the end and learned from the fourth id on."""
    ids = torch.randint(3, 300, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[:, :3] = IGNORED
    targets[0, 8:] = IGNORED
    return ids[:, :-1], targets


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exit_is_compared_with_the_full_depth_of_its_own_model(family: str, tmp_path: Path) -> None:
    ids, targets = batch()
    kept = targets != IGNORED
    model = model_of(family, tmp_path)
    full = model(ids).logits[kept].detach()
    shallow = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2)
    early = shallow(ids).logits[kept].detach()

    loss, scores = ExitStudent(model, [2])(ids, targets, frozenset(), 0.5, 2.0)
    text = F.cross_entropy(full, targets[kept], reduction="sum")
    divergence = F.kl_div(early.log_softmax(-1), full.log_softmax(-1), reduction="sum", log_target=True)
    assert int(scores.tokens) == int(kept.sum())
    torch.testing.assert_close(scores.text, text)
    torch.testing.assert_close(scores.divergence, divergence[None])
    torch.testing.assert_close(loss, 2 * text + 0.5 * divergence)
    assert int(scores.agreement[0]) == int((early.argmax(-1) == full.argmax(-1)).sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exit_with_a_block_begins_as_the_exit_one_layer_deeper(family: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path)
    blocks = [next_layer(model, depth) for depth in (1, 3)]
    deeper = ExitStudent(model, [2, 4])(*batch())[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    student = ExitStudent(model, [1, 3], blocks=blocks)
    torch.testing.assert_close(parts(student(*batch())[1]), parts(deeper))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.1)
    changed = student(*batch())[1]
    assert (changed.divergence[0] - deeper.divergence[0]).abs() > 1e-3
    torch.testing.assert_close(changed.text, deeper.text)  # the full depth is as it was


def exits_of(model: Any, kind: str) -> dict[str, Any]:
    return {"blocks": [next_layer(model, 1), next_layer(model, 2)]} if kind == "block" else {"networks": networks(model.config.hidden_size)}


@pytest.mark.parametrize("kind", ["mlp", "block"])
@pytest.mark.parametrize("family", ["llama2", "opt"])
def test_heads_leave_the_backbone_without_gradients(family: str, kind: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path)
    student = ExitStudent(model, [1, 2], **exits_of(model, kind), vocabulary=VOCABULARY)
    student.train()
    assert not model.training
    loss, _ = student(*batch(), text_weight=0.0)
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in student.parameters())
    assert all(parameter.grad.abs().sum() > 0 for name, parameter in student.named_parameters() if "k_proj.bias" not in name)
    place = "blocks" if kind == "block" else "networks"
    assert {name.split(".")[0] for name, _ in student.named_parameters()} == {place}
    assert {name.split(".")[0] for name in student.state_dict()} == {place}


def test_agreement_is_with_the_choice_among_all_ids_and_the_divergence_over_the_vocabulary(tmp_path: Path) -> None:
    ids, targets = batch()
    model = model_of("llama2", tmp_path)
    full = model(ids).logits[targets != IGNORED].detach()
    student = ExitStudent(model, [1, 2], networks=networks(64), vocabulary=VOCABULARY)
    loss, scores = student(ids, targets, text_weight=0.0)
    assert float(scores.text) == 0
    torch.testing.assert_close(loss, scores.divergence.sum())
    assert (scores.agreement <= torch.isin(full.argmax(-1), VOCABULARY).sum()).all()
    # where agreement is not wanted, the full depth's other logits are not needed: same loss
    less, counted = student(ids, targets, text_weight=0.0, agreement=False)
    torch.testing.assert_close(less, loss)
    assert float(counted.agreement.sum()) == 0

    everything = ExitStudent(model, [1, 2], networks=networks(64), vocabulary=torch.arange(300))(ids, targets)
    without = ExitStudent(model, [1, 2], networks=networks(64))(ids, targets)
    torch.testing.assert_close([everything[0], *parts(everything[1])], [without[0], *parts(without[1])])


@pytest.mark.parametrize("frozen", [True, False])
def test_logits_in_pieces_give_the_same_loss_and_gradients(frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("smollm", tmp_path)
    student = ExitStudent(model, [1, 2], networks=networks(48) if frozen else None)
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda head, rows, logits: sizes.append(len(logits)))
    results = []
    for at_once in (2**26, 5 * 300):
        monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", at_once)
        sizes.clear()
        student.zero_grad()
        loss, scores = student(*batch())
        loss.backward()
        results.append([loss.detach(), *parts(scores), *(p.grad.clone() for p in student.parameters() if p.grad is not None)])
    torch.testing.assert_close(results[1], results[0])
    assert max(sizes) == 5


def test_logits_of_few_ids_come_in_larger_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("smollm", tmp_path)
    student = ExitStudent(model, [1, 2], networks=networks(48), vocabulary=VOCABULARY)
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 5 * len(VOCABULARY))
    sizes: list[int] = []
    score = student._score
    monkeypatch.setattr(student, "_score", lambda *args: (sizes.append(len(args[3])), score(*args))[1])
    pieces, _ = student(*batch(), text_weight=0.0, agreement=False)
    assert max(sizes) == 5
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 2**26)
    torch.testing.assert_close(student(*batch(), text_weight=0.0, agreement=False)[0], pieces)


def parts(scores: Any) -> list[torch.Tensor]:
    return [scores.tokens, scores.text, scores.divergence, scores.agreement]


@pytest.mark.parametrize("kind", ["mlp", "block"])
def test_a_bf16_backbone_takes_fp32_networks(kind: str, tmp_path: Path) -> None:
    for family in ("llama2", "opt"):
        model = model_of(family, tmp_path / family, torch.bfloat16)
        student = ExitStudent(model, [1, 2], **exits_of(model, kind), vocabulary=VOCABULARY)
        loss, _ = student(*batch(), text_weight=0.0)
        loss.backward()
        assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}
        assert all(parameter.grad.isfinite().all() for parameter in student.parameters())


def test_a_dropped_layer_is_not_run_and_an_exit_above_it_is_still_read(tmp_path: Path) -> None:
    model = model_of("llama2", tmp_path)
    ids, targets = batch()
    student = ExitStudent(model, [1, 2])
    whole = student(ids, targets)[1]
    first = student(ids, targets, frozenset({1}))[1]
    torch.testing.assert_close(first.divergence[0], first.divergence[1])  # exit 2 reads what exit 1 reads
    assert float(first.divergence[0]) != float(whole.divergence[0])  # whose teacher lacks a layer


def test_deeper_layers_are_dropped_more_often() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [layers_to_drop(9, 0.4, generator) for _ in range(4000)]
    shares = torch.tensor([sum(layer in layers for layers in drawn) / len(drawn) for layer in range(9)])
    law = torch.tensor([0.4 * (2 ** (layer / 8) - 1) for layer in range(9)])
    assert shares[0] == 0
    torch.testing.assert_close(shares, law, atol=0.03, rtol=0)
    assert layers_to_drop(9, 0.0, generator) == frozenset()


def test_every_rank_drops_the_same_layers() -> None:
    ranks = [torch.Generator().manual_seed(7) for _ in range(2)]
    assert len({tuple(layers_to_drop(30, 0.5, generator) for _ in range(20)) for generator in ranks}) == 1
