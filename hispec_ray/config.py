"""The settings tree: everything that a deployment file may say."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_MODEL = "smollm2-135m-instruct"
ABACUS_MODEL = "abacus"
"""A model of 7 million parameters for word problems, part of this package: for tests, benchmarks and first steps."""

Positive = Annotated[int, Field(ge=1)]


class Group(BaseModel):
    """A group of settings: unknown keys are errors, values do not change after the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(Group):
    """Which model, in which precision, on what."""

    path: str = DEFAULT_MODEL
    """A folder with a Hugging Face checkpoint, a .gguf file, a Hugging Face id, the default's name, or abacus."""
    served_name: str | None = None
    """The id that clients use; the path where unset."""
    chat_template: str | None = None
    """A file with a Jinja chat template, in place of the checkpoint's own."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_model_len: Positive | None = None
    """Most tokens of prompt and answer together; the model's own limit where unset."""
    device: Literal["cpu", "cuda"] = "cpu"
    kernels: Literal["auto", "native", "torch"] = "auto"
    """auto takes the native CPU kernels where a C++ compiler is found, torch elsewhere."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of the model's process; every core it may use where unset."""

    def thread_count(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


class ExitSettings(Group):
    """The depths that guess and check, in layers from the bottom; an eighth and a quarter of the depth where unset."""

    draft: Positive | None = None
    check: Positive | None = None
    heads: str | None = None
    """A file of trained exits (`hispec train-exits`) for these depths; the shared norm and head alone where unset."""


class SpeculationSettings(Group):
    """How tokens are decoded. The text is the same whatever stands here."""

    method: Literal["plain", "single", "hispec"] = "hispec"
    drafter: Literal["exit", "lookup", "mixed"] = "exit"
    """Who guesses: the draft exit; a lookup of what followed the same words before, which costs no layer; or both, the lookup first."""
    phrases: Annotated[str, Field(min_length=1)] | None = None
    """A file of what usually follows what (`hispec phrases`), for a lookup to begin with; smollm2-135m-instruct names the package's own."""
    exits: ExitSettings = ExitSettings()
    draft_tokens: Positive = 2
    """N_d: guesses before a deeper level looks."""
    window: Positive = 4
    """N_i: tokens kept by the check exit before the full depth looks."""
    lookup_confidence: Annotated[float, Field(gt=0, le=1)] = 0.4
    """With pace fixed, the least chance of being right at which the lookup guesses; the pace asks for what pays."""
    stop_below: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """An exit whose first choice leads its second by less (logit / temperature) lets the next level look; 0 is never."""
    branch_below: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """An exit whose first choice leads its second by less offers the second too; 0 is never."""
    pace: Literal["auto", "fixed"] = "auto"
    """auto: each sequence guesses as far as that has lately paid, at most draft_tokens and window, down to not at all; fixed: that far."""
    branches: Annotated[int, Field(ge=0, le=8)] = 0
    """Most second candidates of a sequence at a time, of exits (branch_below) and a lookup; each holds a block of the cache."""


class StageSettings(Group):
    """A run of layers, and over how many processes each of them is cut."""

    layers: Positive | None = None
    """May be left out where there is one stage, which has them all."""
    tp: Positive = 1
    """Ranks of tensor parallelism."""


class ParallelSettings(Group):
    """The model over several processes, which are Ray actors. Each takes model.threads threads on a CPU (1 where unset), or one GPU."""

    stages: Annotated[tuple[StageSettings, ...], Field(min_length=1)]
    """From the bottom up. The first holds at least the check exit."""
    patience_s: Annotated[float, Field(ge=1, le=600)] = 4.0
    """A process that waits longer than this for others in a collective, or does not answer, is taken for dead, and all start anew."""
    shared_memory: bool = True
    """On the CPUs of one machine, ranks add up in DeepSpeed's shared memory; false takes gloo."""


class CacheSettings(Group):
    """The paged key-value cache."""

    block_size: Literal[16, 32, 64] = 16
    """Tokens a block holds."""
    blocks: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Blocks in the pool; as many as memory_gib holds where unset."""
    memory_gib: Annotated[float, Field(gt=0, le=2**20, allow_inf_nan=False)] | None = None
    """Of each process. Where unset 1 on a CPU, and on a GPU nine tenths of what the weights leave free, less 1 for what a pass needs."""
    prefix_caching: bool = True


class SchedulerSettings(Group):
    """How many requests run and wait."""

    max_sequences: Positive = 16
    """Sequences that run at once."""
    max_batch_rows: Positive = 512
    """Most prompt tokens that one step reads."""
    max_queued: Positive = 256
    """Sequences that may wait (each choice of a request is one); others are refused with 429, a request of more choices with 400."""


class ServerSettings(Group):
    """The HTTP side."""

    api_keys_file: str | None = None
    """A file with API keys, one a line, read at the start: clients must send one of them."""
    api_keys_variable: str | None = None
    """An environment variable with API keys, separated by commas. Without this and api_keys_file everybody may ask."""
    max_body_mib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 4.0
    """Larger request bodies are refused with 413."""
    stream_interval_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 50.0
    """Least time between two events of a stream, in which tokens gather; the first and the last come at once. 0 leaves it to
    stream_events_per_s alone."""
    stream_events_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Most events of all running streams of a replica together, whatever stream_interval_ms is: among many streams each waits longer.
    An event costs about 1.5 ms of CPU time over all processes, whatever it carries."""


class Settings(Group):
    """The whole tree, as it stands under `args:` in a deployment file."""

    model: ModelSettings = ModelSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    parallel: ParallelSettings | None = None
    """None: the model in the engine's own process."""
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    server: ServerSettings = ServerSettings()

    @model_validator(mode="after")
    def _kernels_for_device(self) -> Settings:
        if self.model.kernels == "native" and self.model.device != "cpu":
            raise ValueError(f"model.kernels is 'native' and model.device is {self.model.device!r}; native kernels run on 'cpu' only")
        return self

    @model_validator(mode="after")
    def _exits_in_order(self) -> Settings:
        exits = self.speculation.exits
        if self.speculation.method == "hispec" and exits.draft and exits.check and exits.draft > exits.check:
            raise ValueError(
                f"speculation.exits.draft is {exits.draft} and speculation.exits.check is {exits.check}; "
                "the draft exit must not be deeper than the check exit"
            )
        return self
