"""What the commands of a policy and its checkpoint may be asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from vla_accel.cli.options import Argument, Count, Folder, Number, OutputFile, OutputFolder, Seed, Within, Written
from vla_accel.config import AUTO, PolicyConfig, load_config
from vla_accel.errors import ConfigError

Checkpoint = Annotated[str | None, Argument("[CHECKPOINT]", positional=True)]
"""Of a command that does something else where none is given."""
_OPTIONS = {".yaml": "config", ".yml": "config", ".npz": "observations"}
"""What takes a file that stands in the checkpoint's place, by its ending."""


def check_checkpoint(options: Any) -> None:
    """Raise ConfigError for what stands in the checkpoint's place of a command's options and is none."""
    given = options.checkpoint
    if given == "":  # a variable of the shell that is not set, not the wish for the demo
        raise ConfigError("checkpoint: expected a folder or a name, got ''")
    option = _OPTIONS.get(Path(given or "").suffix)
    if option and hasattr(options, option):
        raise ConfigError(f"checkpoint: expected a folder or a name, got {given}: type --{option} {given}")


@dataclass(frozen=True)
class CheckpointSource:
    """What a command of a checkpoint works on."""

    checkpoint: Annotated[str | None, Argument("[CHECKPOINT]", default="demo", positional=True)] = None
    """A folder, a bundled checkpoint's name, or owner/name[@revision][/folder] on the hub."""

    def check(self) -> None:
        """Raise ConfigError for what stands in the checkpoint's place and is none."""
        check_checkpoint(self)


@dataclass(frozen=True)
class PolicySource(CheckpointSource):
    """What a command of policies works on."""

    config: Annotated[str | None, Argument("CONFIG", default="auto")] = None
    """How it runs: a shipped configuration's name (native_fp8), or a YAML or JSON file. auto takes the fastest engines
    that lose nothing on this machine."""
    lora: str | None = None
    """A LoRA adapter to fold into the checkpoint's weights: a folder, or owner/name[@revision][/folder] on the hub."""

    def settings(self) -> PolicyConfig:
        """The configuration, with what the options say beside it."""
        settings = load_config(self.config)
        return settings if self.lora is None else settings.with_lora(self.lora)


@dataclass(frozen=True)
class Bench:
    """Time whole calls of a checkpoint's policy in several configurations, or with --model (pi05, if no checkpoint is
    given) of policies of a family's published size with random weights, beside openpi's or lerobot's own code."""

    checkpoint: Checkpoint = None
    """A folder, a bundled checkpoint's name, or owner/name[@revision][/folder] on the hub."""
    config: tuple[str, ...] = (AUTO,)
    """Of a checkpoint: the configurations to time beside eager, names of shipped ones or files."""
    model: str | None = None
    """Random weights of a model family's published size: pi05, pi0, pi0_fast, smolvla or groot."""
    systems: tuple[str, ...] = ()
    """Of random weights: some of eager, native-bf16, native-fp8 and -int8, each also with -vision, native-int8-denoise,
    native-fp8-int8-denoise (of pi0_fast native-fp8, native-fp8-decode, native-int8-decode); portable- instead of
    native-, what a GPU without Hopper's kernels runs; openpi-eager, openpi-compile, openpi-max-autotune; for SmolVLA
    and GR00T lerobot-eager, lerobot-compile; a wrong name lists the model's own. If not given: eager, native's but
    INT8, and the other project's eager code, which is left out, loudly, where it is not installed."""
    realtime_vla: Folder = None
    """Of random weights: a checkout of realtime-vla, whose code takes its turns, too, at ten steps: both its kinds, or
    those that --systems names."""
    prompt_tokens: Number = None
    """Length of the prompt in tokens; an ordinary one of about 20 if not given."""
    steps: Annotated[tuple[int, ...], Within(1)] = ()
    """Denoising steps, one run after the other; if not given, those that the configurations name, else the family's
    sweep (10,3,1, GR00T's 4,2,1) and before it a checkpoint's own number; of pi0_fast tokens, 64. What torch.compile
    compiles is timed at the first alone."""
    camera: Annotated[str | None, Argument("HEIGHTxWIDTH")] = None
    """Of our systems alone: size of the cameras' images, e.g. 480x640, which a policy fits to its own; if not given
    they come fitted."""
    views: Number = None
    """Of random weights: images a call; the family's own if not given: 2 for π0.5, 3 for π0."""
    horizon: Number = None
    """Of random weights: actions a chunk; the family's own if not given: 10 for π0.5, 50 for π0."""
    batch: Annotated[tuple[int, ...], Within(1)] = ()
    """Batch sizes whose throughput is measured besides, at the first of --steps, e.g. 1,2,4,8,16."""
    hz: Annotated[float | None, Argument("HZ"), Within(0, above=True)] = None
    """Besides, time calls that come at this rate, as a robot makes them, with the GPU's power."""
    starts: bool = False
    """Besides, time two starts of each of our systems up to the first action, in processes of their own: without and
    with what an earlier one left in the caches."""
    calls: Count = 100
    """Timed calls of each system."""
    profile: bool = False
    """Besides, list the GPU's kernels of one call of each of our systems, its graph replayed: how long each ran, what
    of that lay beside others, and how long the GPU was idle before it."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configurations'."""
    output: OutputFile = None
    """JSON file."""
    report: OutputFile = None
    """HTML file that opens offline: pictures, tables, engines, conditions."""

    def check(self) -> None:
        """Raise ConfigError for what stands in the checkpoint's place and is none."""
        check_checkpoint(self)


@dataclass(frozen=True)
class Parity(PolicySource):
    """Compare final actions with the FP32 eager reference: same observations, same noise."""

    observations: Path | None = None
    """Observations that vla_accel.measure.recording.save_observations wrote; random images if not given."""
    model: str | None = None
    """Instead of a checkpoint: random weights of a model family's published size: pi05, pi0, smolvla or groot."""
    count: Count = 64
    """Observations at most."""
    draws: Count = 1
    """Noises of each observation. Where noise decides a command, one draw of few observations says little."""
    num_steps: Number = None
    """Denoising steps instead of the configuration's."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configuration's."""
    threshold: Annotated[float | None, Argument("COSINE"), Within(-1, 1)] = None
    """Smallest cosine of the final actions; by precision if not given (BF16 0.9995, FP8 0.998). What else is asked
    stays: the error beside what another observation changes, and commands that fell the other way."""
    seed: Seed = 0
    """Of noise and random observations."""
    output: OutputFile = None
    """JSON report."""
    report: OutputFile = None
    """HTML file that opens offline: pictures, tables, engines, conditions."""
    keep: bool = False
    """Keep the report beside the checkpoint, where engine auto believes it. Needs recorded observations and the usual
    threshold."""


@dataclass(frozen=True)
class Tune(PolicySource):
    """Find the fastest configuration of a checkpoint on this machine that agrees with FP32 eager and, with a benchmark,
    succeeds as often. Writes tuned.yaml, tune.json and a report; the same command continues an interrupted search."""

    config: Annotated[str | None, Argument("CONFIG")] = None
    """What the search starts from: a shipped configuration's name, or a YAML or JSON file. Its engines and
    precision are what is searched; the rest (steps, prompt, robot, real-time chunking) holds for every candidate."""
    observations: Path | None = None
    """Observations that vla_accel.measure.recording.save_observations wrote, for gate one, agreement. With --quick,
    random ones if not given."""
    benchmark: str | None = None
    """Benchmark for gate two, success on paired episodes: libero, or MODULE:FUNCTION of your own."""
    suite: str | None = None
    """Of the benchmark; its first if not given."""
    tasks: str | None = None
    """Of the suite, such as 0-2,5; all if not given."""
    margin: Annotated[float, Within(0, 99, above=True)] = 2.0
    """Points of success within which a candidate counts as not worse."""
    confidence: Annotated[float, Within(50, 99.99)] = 95.0
    """Of the two-sided interval of the difference, in percent: 95 means that the whole search calls a worse candidate
    "not worse" with a probability of 2.5 percent at most."""
    finalists: Count = 3
    """Candidates, the fastest first, that may play episodes until one passes; they share the error rate."""
    episodes: Count = 1000
    """Pairs of episodes that a candidate plays at most. Clear cases stop early."""
    workers: Count = 1
    """Simulator processes."""
    no_films: bool = False
    """Do not film episodes: the report has no films of lost ones then, and each episode takes a second or so less."""
    num_steps: Number = None
    """Denoising steps instead of the configuration's."""
    allow_steps: Annotated[tuple[int, ...], Within(1)] = ()
    """Also try these numbers of denoising steps. That is another policy: needs a benchmark, success alone judges it."""
    count: Count = 64
    """Observations at most."""
    draws: Count = 4
    """Noises of each observation."""
    calls: Count = 100
    """Timed calls of each candidate."""
    quick: bool = False
    """At most 8 observations with one noise each, and 10 timed calls."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configuration's."""
    seed: Seed = 0
    """Of noise and of the order of episodes."""
    output: Annotated[Path, Written(folder=True)] = Path("runs/tune")
    """Folder of tuned.yaml, tune.json, report.html, the journal, and a file for each candidate."""
    report: OutputFile = None
    """HTML file; report.html in the output folder if not given."""
    overwrite: bool = False
    """Start afresh instead of continuing."""


@dataclass(frozen=True)
class Calibrate(PolicySource):
    """Measure the largest inputs of what FP8 may compute through NVIDIA ModelOpt; store them beside the checkpoint."""

    config: Annotated[str | None, Argument("CONFIG")] = None
    """A YAML or JSON file with what the checkpoint does not say of itself: preset, tokenizer, embodiment."""
    observations: Path | None = None
    """Observations that vla_accel.measure.recording.save_observations wrote, which must be given: real ones, never
    noise."""
    output: OutputFolder = None
    """Folder for the scales, made as needed; the checkpoint's own, or its LoRA adapter's, if not given."""
    count: Count = 256
    """Observations at most, spread over the file."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configuration's."""


@dataclass(frozen=True)
class Build(PolicySource):
    """Build the TensorRT engines of a configuration ahead of time."""

    config: Annotated[str | None, Argument("CONFIG", default="tensorrt_rtx")] = None
    """A shipped configuration's name (tensorrt, tensorrt_rtx, ...), or a YAML or JSON file, as for a policy."""
    targets: tuple[str, ...] = ()
    """Compute capabilities, as in sm89,sm120: needs no GPU (TensorRT-RTX only). If not given: those in the
    configuration, else this machine's GPU."""
    model: str | None = None
    """Instead of a checkpoint: random weights of a named size, such as pi05 or pi05_demo, for measuring builds."""
    depth: Number = None
    """With --model: this many layers in the large stacks (of π0 prefix and expert), at full width."""
    cache: OutputFolder = None
    """Folder of the engines; the configuration's if not given."""
    manifest: OutputFile = None
    """Where the manifest goes; beside the engines if not given."""
    no_verify: bool = False
    """Do not compare the exported graphs with the modules."""
    dry_run: bool = False
    """Only say what would be built, and what is in the cache already."""


@dataclass(frozen=True)
class Convert:
    """Convert an openpi JAX checkpoint (orbax) to a folder with model.safetensors, config.json and the statistics.

    Runs on the CPU, one parameter at a time; needs pip install 'vla_accel[jax]'. conversion.json in the output lists
    every parameter, and a JSON line ends the command.
    """

    checkpoint: Annotated[Path, Argument("CHECKPOINT", positional=True)]
    """The checkpoint's folder: the one that holds params/ and assets/, or params/ itself."""
    output: Annotated[Path, Argument("OUTPUT", positional=True), Written(folder=True)]
    """Folder to write; made as needed."""
    config: str | None = None
    """openpi's training config of the checkpoint (pi05_libero, pi0_droid, …): fixes horizon, preset and prompt."""
    action_horizon: Number = None
    """Actions in a chunk, where no config is named."""
    precision: Literal["mixed", "bfloat16", "float32"] = "mixed"
    """mixed: float32 for what openpi computes in float32, bfloat16 for the rest; or everything in one."""
    assets: Folder = None
    """Folder of the statistics, if it is not beside params/."""
    lora_scale: Annotated[float, Within(0, above=True)] = 1.0
    """alpha / rank of the attention's LoRA adapters, which are folded in; openpi's variants have alpha = rank."""
    unused_head: bool = False
    """Also write the expert's output head, which nothing reads: openpi's own loader insists on it."""
