"""`hispec train-exits`, from the command line to the engine that takes what it wrote."""

from __future__ import annotations

import errno
import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.tiny import make_checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from shared import Run

from hispec_ray import LLM, SamplingParams
from hispec_ray.commands import training as commands
from hispec_ray.distill import Wish, distill, read_prompts
from hispec_ray.model.heads import Card, card_path, load_heads, read_card
from hispec_ray.model.weights import open_model
from hispec_ray.training import output
from hispec_ray.training.exits import RATES, ExitTrainingSettings, _lines_at_once

Words = list[object]
PROMPTS = ["ab cd", "the tt", "so to", "u v w x", "zz", "a ta tb"]


@pytest.fixture(scope="module")
def own_text(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl file of answers, drawn so that untrained exits often disagree."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    llm = LLM({"model": {"path": str(tiny_folder), "dtype": "float32", "threads": 1}, "speculation": {"method": "plain"}})
    distill(llm, read_prompts([folder / "prompts.txt"], llm, None, 40), folder / "own.jsonl", Wish(2500, 40, 1.2, 0))
    return folder / "own.jsonl"


@pytest.fixture
def words(tiny_folder: Path, own_text: Path, tmp_path: Path) -> Words:
    """A command that trains two exits of the tiny model for a moment."""
    words = ["train-exits", "--model", tiny_folder, "--data", own_text, "--exits", "2,4", "--out", tmp_path / "out"]
    return [*words, "--steps", 4, "--line-tokens", 64, "--held-out", 0.1, "--threads", 1]


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, own_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of exits that were trained until they know the tiny model's words."""
    from hispec_ray.training.exits import train_exits  # noqa: PLC0415

    settings = ExitTrainingSettings(
        model=str(tiny_folder),
        data=(str(own_text),),
        exits=(2, 4),
        out=str(tmp_path_factory.mktemp("trained")),
        steps=80,
        line_tokens=64,
        held_out=0.1,
        learning_rate=5e-3,
        vocabulary=150,
        threads=1,
    )
    return train_exits(settings)


def llm_with(folder: Path, heads: Path | None, draft: int = 2, check: int = 4) -> LLM:
    exits = {"draft": draft, "check": check} | ({} if heads is None else {"heads": str(heads)})
    speculation = {"method": "hispec", "exits": exits, "pace": "fixed"}
    return LLM({"model": {"path": str(folder), "dtype": "float32", "threads": 1}, "speculation": speculation, "cache": {"blocks": 64}})


def one_error(out: str, err: str) -> str:
    """The one line that says what is wrong, where nothing else but progress was said."""
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if "error" in line]
    assert len(lines) == 1
    return lines[0].removeprefix("hispec: error: ")


def test_trained_exits_say_what_the_full_depth_says(trained: Path, tiny_folder: Path, own_text: Path, tmp_path: Path, hispec: Run) -> None:
    start: Words = ["--steps", 1, "--learning-rate", 1e-12, "--line-tokens", 64, "--held-out", 0.1]
    hispec("train-exits", "--model", tiny_folder, "--data", own_text, "--exits", "2,4", "--out", tmp_path, *start)
    before, after = read_card(tmp_path / "exits.safetensors").acceptance, read_card(trained).acceptance
    assert after[2] > before[2]
    assert after[4] > before[4] + 0.15

    held_out = [line for line in map(json.loads, (trained.parent / "log.jsonl").read_text().splitlines()) if line["held_out"]]
    assert held_out[-1]["agreement"] == pytest.approx([after[2], after[4]], abs=1e-4)
    assert list((trained.parent / "tensorboard").iterdir())


def test_the_card_says_what_the_file_is_for(trained: Path, tiny_folder: Path, own_text: Path) -> None:
    source = open_model(str(tiny_folder))
    card = read_card(trained)
    assert (card.base, card.exits, card.recipe, card.kind, card.inner) == (source.fingerprint(), (2, 4), "heads", "mlp", 48)
    assert card.data == str(own_text)
    lines = [json.loads(line) for line in own_text.read_text().splitlines()]
    assert 0.8 < card.tokens / sum(len(line["ids"]) - line["learn_from"] for line in lines) < 1
    heads = load_heads(trained, source.fingerprint(), needed=[2, 4], architecture=source.architecture, dtype=torch.float32)
    assert heads.vocabulary is not None
    assert len(heads.vocabulary) == card.vocabulary
    assert 259 <= len(heads.vocabulary) < 300


def test_the_engine_writes_the_same_text_with_trained_exits_and_guesses_better(trained: Path, tiny_folder: Path) -> None:
    plain = LLM({"model": {"path": str(tiny_folder), "dtype": "float32", "threads": 1}, "speculation": {"method": "plain"}})
    engines = {"plain": plain, "untrained": llm_with(tiny_folder, None), "trained": llm_with(tiny_folder, trained)}
    prompts = ["ab cd", "the tt", "unseen words"]
    texts = {}
    for name, llm in engines.items():
        greedy = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
        drawn = llm.generate(prompts, SamplingParams(temperature=0.8, seed=5, max_tokens=40))
        texts[name] = [completion.choices[0].token_ids for completion in greedy + drawn]
    assert texts["trained"] == texts["plain"]
    assert texts["untrained"] == texts["plain"]
    kept = {name: llm.engine.counts[1].accepted / llm.engine.counts[1].seen for name, llm in engines.items() if name != "plain"}
    assert kept["trained"] > kept["untrained"]
    assert engines["trained"].engine.counts[-1].passes < engines["untrained"].engine.counts[-1].passes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_learn_to_say_what_the_full_depth_says(dtype: str, tiny_folder: Path, own_text: Path, tmp_path: Path) -> None:
    """From the exit one layer deeper on; and the engine reads what was trained."""
    from hispec_ray.training.exits import train_exits  # noqa: PLC0415

    settings = {"model": str(tiny_folder), "data": (str(own_text),), "line_tokens": 64, "held_out": 0.1, "threads": 1, "dtype": dtype}
    begun, done = (
        train_exits(ExitTrainingSettings(**settings, kind="block", exits=(2, 4), out=str(tmp_path / name), steps=steps, learning_rate=rate))
        for name, steps, rate in (("begun", 1, 1e-12), ("done", 40, 3e-3))
    )
    before, card = read_card(begun).acceptance, read_card(done)
    assert (card.kind, card.inner) == ("block", None)
    assert card.acceptance[2] > before[2] + 0.05
    assert card.acceptance[4] > before[4] + 0.05

    engines = {name: llm_with(tiny_folder, path) for name, path in (("begun", begun), ("done", done))}
    params = [SamplingParams(temperature=1.2, seed=seed, max_tokens=40) for seed in range(len(PROMPTS))]
    texts = [[one.choices[0].token_ids for one in llm.generate(PROMPTS, params)] for llm in engines.values()]
    assert texts[0] == texts[1]
    kept = [llm.engine.counts[-1].accepted / llm.engine.counts[-1].seen for llm in engines.values()]
    assert kept[1] > kept[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor[:, :-1], "exits.2.block.qkv.weight has shape [80, 47]; the model asks for [80, 48]"),
        (lambda tensor: None, "it has no exits.2.block.qkv.weight; expected one of shape [80, 48]"),
    ],
)
def test_a_block_of_another_shape_is_refused_in_one_line(
    change: Callable[[torch.Tensor], torch.Tensor | None], message: str, block_heads: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(block_heads)
    changed = change(tensors.pop("exits.2.block.qkv.weight"))
    path = tmp_path / "exits.safetensors"
    save_file(tensors | ({} if changed is None else {"exits.2.block.qkv.weight": changed.contiguous()}), path)
    shutil.copyfile(card_path(block_heads), card_path(path))
    with pytest.raises(ValueError, match="exits") as refused:
        llm_with(tiny_folder, path)
    assert str(refused.value) == f"speculation.exits.heads is '{path}': {message}"


DEPLOYMENT = """
applications:
  - name: hispec
    import_path: hispec_ray.serving.app:build
    args:
      model: {{path: {folder}, dtype: float32, threads: 1}}
      speculation: {{method: hispec, exits: {{draft: {draft}, check: 4, heads: {heads}}}}}
      cache: {{blocks: 64}}
"""


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The trained exits, to be damaged."""
    path = tmp_path / "copied" / "exits.safetensors"
    path.parent.mkdir()
    shutil.copyfile(trained, path)
    shutil.copyfile(card_path(trained), card_path(path))
    return path


def other_base(heads: Path) -> str:
    card = read_card(heads)
    card_path(heads).write_text(card.model_copy(update={"base": "0" * 64}).model_dump_json())
    return f"it was trained for weights with sha256 {'0' * 64}; this model's have {card.base}"


def unknown_ids(heads: Path) -> str:
    tensors = load_file(heads)
    save_file({**tensors, "vocabulary": torch.cat((tensors["vocabulary"], torch.tensor([300], dtype=torch.int32)))}, heads)
    return "its vocabulary must be ascending ids from 0 to 299"


def half_a_file(heads: Path) -> str:
    heads.write_bytes(heads.read_bytes()[:1000])
    return "it cannot be read: "


def no_card(heads: Path) -> str:
    card_path(heads).unlink()
    return f"its card {card_path(heads)} cannot be read: "


def nothing(heads: Path) -> str:
    return "it has no exit at depth 3; it was trained for 2, 4"


@pytest.mark.parametrize(("damage", "draft"), [(other_base, 2), (unknown_ids, 2), (half_a_file, 2), (no_card, 2), (nothing, 3)])
def test_exits_that_do_not_fit_are_refused_in_one_line(
    damage: Callable[[Path], str], draft: int, copied: Path, tiny_folder: Path, tmp_path: Path, hispec: Run
) -> None:
    message = damage(copied)
    config = tmp_path / "deployment.yaml"
    config.write_text(DEPLOYMENT.format(folder=tiny_folder, heads=copied, draft=draft))
    status, out, err = hispec("generate", "ab", "--config", config)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"hispec: error: speculation.exits.heads is '{copied}': {message}")


@pytest.mark.parametrize("family", ["llama2", "opt"])
def test_adapters_are_merged_into_a_model_folder(family: str, tiny_folder: Path, own_text: Path, tmp_path: Path, hispec: Run) -> None:
    base = make_checkpoint(tmp_path / "base", family)
    before = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(before, base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text((base / "config.json").read_text().replace('"float32"', '"bfloat16"'))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_folder / name, base / name)
    words = ["--recipe", "layerskip", "--lora-rank", 4, "--learning-rate", 3e-3, "--steps", 6, "--line-tokens", 64, "--threads", 1]
    status, out, err = hispec("train-exits", "--model", base, "--data", own_text, "--exits", "1,2", "--out", tmp_path / "out", *words)
    assert (status, out) == (0, f"{tmp_path / 'out' / 'model'}\n")
    assert "text " in err
    after = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all("layers." in name and "norm" not in name for name in changed)

    source = open_model(str(tmp_path / "out" / "model"))
    assert source.weights(torch.float32).keys()
    card = Card.model_validate_json((source.folder / "exits.json").read_text())
    assert (card.base, card.recipe) == (open_model(str(base)).fingerprint(), "layerskip")
    llm = LLM({"model": {"path": str(source.folder), "threads": 1}, "cache": {"blocks": 32}})
    assert len(llm.generate("ab", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0].choices[0].token_ids) == 5


def test_the_same_command_goes_on_and_another_is_refused(words: Words, tmp_path: Path, hispec: Run) -> None:
    assert hispec(*words)[0] == 0
    first = load_file(tmp_path / "out" / "exits.safetensors")
    log = (tmp_path / "out" / "log.jsonl").read_text()
    status, out, _ = hispec(*words, "--save-every", 2)
    assert (status, out) == (0, f"{tmp_path / 'out' / 'exits.safetensors'}\n")
    again = load_file(tmp_path / "out" / "exits.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert (tmp_path / "out" / "log.jsonl").read_text() != log  # measured again, not trained again

    for option, value, there, here in (("--seed", 3, "seed 0", "3"), ("--exits", "2,5", "exits [2, 4]", "[2, 5]")):
        status, out, err = hispec(*words, option, value)
        assert (status, out) == (2, "")
        assert one_error(out, err) == (
            f"out is '{tmp_path / 'out'}', where a training with {there} has begun; this one has {here}. "
            "Give the same settings to go on, or another folder"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--exits", "2,x"], "exits is '2,x'; it must be numbers of layers with commas between them, for example 4,8"),
        (["--exits", "0,2"], "exits is 0,2; each must be from 1 to 7 (the model has 8 layers)"),
        (["--exits", "4,2"], "exits is 4,2; they must ascend"),
        (["--exits", "2,8"], "exits is 2,8; each must be from 1 to 7 (the model has 8 layers)"),
        (["--recipe", "tails"], "recipe is 'tails'; it must be 'heads' or 'layerskip'"),
        (["--kind", "cubic"], "kind is 'cubic'; it must be 'linear', 'mlp' or 'block'"),
        (["--kind", "linear", "--inner", "9"], "inner is 9 and kind is 'linear'; it goes with 'mlp' alone"),
        (["--kind", "block", "--inner", "9"], "inner is 9 and kind is 'block'; it goes with 'mlp' alone"),
        (["--lora-rank", "4"], "lora_rank is 4 and recipe is 'heads'; it goes with the other recipe alone"),
        (["--layer-dropout", "0.2"], "layer_dropout is 0.2 and recipe is 'heads'; it goes with the other recipe alone"),
        (["--recipe", "layerskip", "--layer-dropout", "1"], "layer_dropout is 1.0; it must be less than 1"),
        (["--recipe", "layerskip", "--vocabulary", "40"], "vocabulary is 40 and recipe is 'layerskip'; it goes with"),
        (["--recipe", "layerskip", "--kind", "block"], "kind is 'block' and recipe is 'layerskip'; it goes with the other recipe alone"),
        (["--seed", str(2**40 + 1)], "seed is 1099511627777; it must be less than or equal to 1099511627776"),
        (["--threads", "1025"], "threads is 1025; it must be less than or equal to 1024"),
        (["--inner", "1048577"], "inner is 1048577; it must be less than or equal to 1048576"),
        (["--recipe", "layerskip", "--dtype", "bfloat16"], "dtype is 'bfloat16' and recipe is 'layerskip'; it goes with heads alone"),
        (["--dtype", "float16"], "dtype is 'float16'; it must be 'bfloat16' or 'float32'"),
        (["--zero", "4"], "zero is 4; it must be 1, 2 or 3"),
        (["--steps", "0"], "steps is 0; it must be greater than or equal to 1"),
        (["--line-tokens", "513"], "line_tokens is 513; it must be from 2 to 512 (the model's context)"),
        (["--held-out", "1"], "held_out is 1.0; it must be less than 1"),
        (["--workers", "3"], "lines_per_step is 16; it must be a multiple of workers, 3"),
        (["--lines-per-step", "4096"], "the data has "),
        (["--device", "cuda"], "device is 'cuda' and torch sees no CUDA device here; it must be 'cpu'"),
        (["--model", "/no/such"], "model.path is '/no/such': there is no such file or folder"),
        (["--data", "/no/such.txt"], "/no/such.txt does not exist; a file or folder is needed"),
    ],
)
def test_bad_input_is_one_line_that_names_it(words: Words, options: list[str], message: str, hispec: Run, tmp_path: Path) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    status, out, err = hispec(*words, *options)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert one_error(out, err).startswith(message)
    assert not (tmp_path / "out").exists()


def test_data_with_no_text_is_refused_in_one_line(words: Words, tmp_path: Path, hispec: Run) -> None:
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n{"ids": [7]}\n')
    words[words.index("--data") + 1] = tmp_path / "blank.jsonl"
    status, out, err = hispec(*words)
    assert status == 2
    assert one_error(out, err).startswith(f"{tmp_path / 'blank.jsonl'}: no text to learn from; valid are .txt files, and .jsonl files with")


def test_a_file_for_out_is_refused_and_stays(words: Words, tmp_path: Path, hispec: Run) -> None:
    (tmp_path / "out").write_text("mine")
    status, out, err = hispec(*words)
    assert (status, out) == (2, "")
    assert err == f"hispec: error: out is '{tmp_path / 'out'}', which is a file; it must be a folder\n"
    assert (tmp_path / "out").read_text() == "mine"


def test_a_loss_that_is_not_finite_ends_without_a_result(words: Words, tmp_path: Path, hispec: Run) -> None:
    status, out, err = hispec(*words, "--learning-rate", 1e30)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"the loss is not finite at step \d; lower learning_rate \(1e\+30\)", one_error(out, err))
    assert not (tmp_path / "out" / "exits.safetensors").exists()


@pytest.mark.parametrize("content", ["[1]", "{", "1" * 5000, "[" * 99999])
def test_damaged_settings_of_a_training_are_one_line(content: str, words: Words, tmp_path: Path, hispec: Run) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text(content)
    status, out, err = hispec(*words)
    assert (status, out) == (2, "")
    assert one_error(out, err).startswith(f"{tmp_path / 'out' / 'settings.json'} is damaged (")
    assert one_error(out, err).endswith("; name another folder with --out")


def full(path: object) -> None:
    """Write half a file, as on a disk that is full."""
    Path(str(path)).write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    words: Words, tmp_path: Path, hispec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda path, text: full(path))
        status, out, err = hispec(*words)
    assert status == 1
    assert one_error(out, err).startswith(
        f"out is '{out_folder}': {out_folder / 'settings.json'} cannot be written: [Errno 28] No space left"
    )
    assert list(out_folder.iterdir()) == []

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda state, path, **_: full(path))
        status, out, err = hispec(*words)
    assert status == 1
    no_room = "[Errno 28] No space left on device"
    assert one_error(out, err) == f"the checkpoint of step 4 cannot be saved in {out_folder / 'checkpoints'}: {no_room}"
    assert list((out_folder / "checkpoints").glob("s*-*")) == []

    with monkeypatch.context() as patch:
        patch.setattr(output, "save_file", lambda tensors, path, **_: full(path))
        status, out, err = hispec(*words)
    assert status == 1
    assert one_error(out, err) == f"{out_folder / 'exits.safetensors'} cannot be written: {no_room}"
    assert sorted(path.name for path in out_folder.iterdir()) == ["checkpoints", "log.jsonl", "settings.json", "tensorboard"]

    assert hispec(*words)[0] == 0  # with room again it goes on from the checkpoint
    assert (out_folder / "exits.safetensors").is_file()


def test_a_full_disk_leaves_the_model_folder_that_was_there(
    words: Words, tmp_path: Path, hispec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    words += ["--recipe", "layerskip", "--lora-rank", 2]
    assert hispec(*words)[0] == 0
    before = (tmp_path / "out" / "model" / "model.safetensors").read_bytes()

    def save(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", save)
    status, out, err = hispec(*words)
    assert status == 1
    assert one_error(out, err) == f"{tmp_path / 'out' / 'model'} cannot be written: I/O error: No space left on device (os error 28)"
    assert not list((tmp_path / "out").glob("*.writing"))
    assert (tmp_path / "out" / "model" / "model.safetensors").read_bytes() == before


def test_ctrl_c_says_how_to_go_on(words: Words, tmp_path: Path, hispec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hispec_ray.training.exits.train", interrupted)
    status, out, err = hispec(*words)
    assert (status, out) == (130, "")
    assert err.endswith(f"stopped; the same command goes on from the last checkpoint in {tmp_path / 'out'}\n")


@pytest.mark.parametrize(
    ("lines", "scored", "at_once"),
    [(16, 512, 8), (16, 49_152, 4), (4, 49_152, 4), (16, 128_256, 8), (7, 49_152, 7), (1, 128_256, 1), (6, 49_152, 3)],
)
def test_lines_are_read_together_as_far_as_their_logits_fit_at_once(lines: int, scored: int, at_once: int) -> None:
    """Of 256 tokens, on a CPU: 8 at most, and 5 whose logits fit; not where that would halve them twice."""
    assert _lines_at_once(lines, 256, scored, "cpu") == at_once


def test_the_help_shows_the_settings_own_defaults() -> None:
    for name, parameter in inspect.signature(commands.train_exits, eval_str=True).parameters.items():
        (option,) = parameter.annotation.__metadata__
        default = ExitTrainingSettings.model_fields[name].default
        if parameter.default is None and default is not None:
            assert option.show_default == str(default), name
    assert RATES == {"heads": 0.001, "layerskip": 0.0001}  # as the help of --learning-rate has it


@pytest.mark.slow
def test_two_workers_in_ray_train_give_what_one_process_gives(words: Words, tmp_path: Path, hispec: Run) -> None:
    assert hispec(*words)[0] == 0
    words[words.index("--out") + 1] = tmp_path / "ray"
    status, out, err = hispec(*words, "--workers", 2, "--zero", 2)
    assert (status, out) == (0, f"{tmp_path / 'ray' / 'exits.safetensors'}\n"), err
    alone, together = ([json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()] for name in ("out", "ray"))
    assert [line["step"] for line in together] == [line["step"] for line in alone]
    assert [line["loss"] for line in together] == pytest.approx([line["loss"] for line in alone], abs=1e-3)
    one, two = load_file(tmp_path / "out" / "exits.safetensors"), load_file(tmp_path / "ray" / "exits.safetensors")
    torch.testing.assert_close(two, one, atol=1e-2, rtol=0)
