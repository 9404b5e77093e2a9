"""What a policy may be told: frozen dataclasses. Knows nothing about what the engines do with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from vla_accel.config.mapping import Checked, from_mapping, read_mapping
from vla_accel.errors import ConfigError, unknown
from vla_accel.files import user_path

Precision = Literal["auto", "fp32", "bf16"]
EngineName = Literal["auto", "eager", "native", "torch_tensorrt", "tensorrt", "tensorrt_rtx"]
EnginePrecision = Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8"]
Attention = Literal["auto", "own", "sdpa", "flash_attn", "fastest"]
Schedule = Literal["zeros", "ones", "linear", "exp"]
AUTO = "auto"
"""The name of a configuration that leaves everything as it is by default."""

LARGEST = 4096
"""Of sizes that no weight shows (actions of a chunk, tokens of a prompt, numbers of a state, pixels of an edge): more
are a mistake, which would take all the memory that there is."""

TENSORRT = ("tensorrt", "tensorrt_rtx", "torch_tensorrt")
PRECISIONS: Mapping[str, tuple[EnginePrecision, ...]] = {
    "eager": ("auto", "fp32", "bf16"),
    **dict.fromkeys(TENSORRT, ("auto", "fp32", "bf16", "fp16", "fp8")),
}
"""The precisions of `EngineSpec` that an engine has for some component; an engine that is not listed has all."""


def _read_by(*engines: str) -> Mapping[str, Any]:
    """Metadata of a field that only these engines read: `EngineSpec` refuses a value that no engine would read."""
    return {"engines": engines}


@dataclass(frozen=True)
class TensorrtOptions(Checked):
    """How engines of `tensorrt`, `tensorrt_rtx` and `torch_tensorrt` are built, kept and run.

    `targets`: compute capabilities to build for ahead of time ("sm89"); empty means the GPU at hand. `profiles`: one
    string a profile, "images.1=1:2:4, …" giving minimum, optimum and maximum of a dynamic dimension; a dimension not
    named takes its whole range, with the largest as the optimum; empty means one such profile. `optimization_level`:
    the builder's, 0 to 5. `workspace_mb`: the most scratch memory a kernel may ask for. `weight_streaming`: weights
    stay in host memory as far as the GPU's is short. `refit`: weights can be exchanged later. `version_compatible`:
    later library versions run the engine, too. `hardware_compatible`: other GPUs (Ampere and newer) do, too.
    `timing_cache`: reuse kernel timings of earlier builds. `whole`: torch_tensorrt builds the whole component, not
    only its marked parts. `verify`: compare the ONNX graph with the module, and the engine's first output with it.
    `cache`: folder of built engines, by default the user's cache folder; `cache_gb`: its size limit.
    """

    where = "tensorrt."

    targets: tuple[str, ...] = field(default=(), metadata=_read_by("tensorrt_rtx"))
    profiles: tuple[str, ...] = field(default=(), metadata=_read_by("tensorrt", "tensorrt_rtx"))
    optimization_level: int | None = field(default=None, metadata=_read_by(*TENSORRT))
    workspace_mb: int | None = field(default=None, metadata=_read_by(*TENSORRT))
    weight_streaming: bool = field(default=False, metadata=_read_by(*TENSORRT))
    refit: bool = field(default=False, metadata=_read_by(*TENSORRT))
    version_compatible: bool = field(default=False, metadata=_read_by(*TENSORRT))
    hardware_compatible: bool = field(default=False, metadata=_read_by(*TENSORRT))
    timing_cache: bool = field(default=True, metadata=_read_by("tensorrt", "tensorrt_rtx"))
    whole: bool = field(default=False, metadata=_read_by("torch_tensorrt"))
    verify: bool = field(default=True, metadata=_read_by(*TENSORRT))
    cache: str | None = field(default=None, metadata=_read_by(*TENSORRT))
    cache_gb: float = field(default=20.0, metadata=_read_by(*TENSORRT))

    def __post_init__(self) -> None:
        super().__post_init__()
        level = self.optimization_level
        if level is not None and not 0 <= level <= 5:
            raise ConfigError(f"tensorrt.optimization_level: expected 0 to 5, got {level}")
        if self.workspace_mb is not None and self.workspace_mb < 1:
            raise ConfigError(f"tensorrt.workspace_mb: expected at least 1, got {self.workspace_mb}")
        if not self.cache_gb > 0:
            raise ConfigError(f"tensorrt.cache_gb: expected more than 0, got {self.cache_gb}")


@dataclass(frozen=True)
class NativeOptions(Checked):
    """How the native engine runs. `kernels`: "portable" switches off what only Hopper has (own GEMM and attention in
    CUDA C++, the streamed denoise loop, dependent launches), so that an Ampere or Ada GPU would run the same; "auto"
    takes the fastest. `embeddings`: where the table of token embeddings lies; "host" is page-locked memory, from which
    a kernel reads a prompt's few rows at each call: 1 GB less on the GPU for the large models, the same result."""

    where = "native."

    kernels: Literal["auto", "portable"] = field(default="auto", metadata=_read_by("native"))
    embeddings: Literal["gpu", "host"] = field(default="gpu", metadata=_read_by("native"))


@dataclass(frozen=True)
class EngineSpec(Checked):
    """Which engine a component gets.

    `engine`: the engine asked for; "auto" takes the fastest one that loses nothing on this machine (`engines.auto`).
    `fallback`: engines to try, in order, if it cannot be built; empty means that failing to build is an error; "auto"
    steps down by itself. `precision`: of the large products inside the engine; "auto" is the policy's.
    `keep`: products, by their names in a layer, that stay as they are where `precision` is FP8 or INT8 (native engine).
    `attention`: of the native engine's vision and kv_cache: its own kernels, torch's SDPA, flash-attn, or the one that
    is measured to be the fastest when the engine is built; "auto" takes its own where they were written for the shape
    (CUDA C++), elsewhere the fastest, which it remembers. With "own" results repeat bit for bit.
    `native`, `tensorrt`: options of these engines.

    Raises ConfigError for a precision or an option that neither `engine` nor one of `fallback` has.
    """

    alone = "engine"

    engine: EngineName = "auto"
    fallback: tuple[EngineName, ...] = ()
    precision: EnginePrecision = "auto"
    keep: tuple[str, ...] = field(default=(), metadata=_read_by("native"))
    attention: Attention = field(default="auto", metadata=_read_by("native"))
    native: NativeOptions = field(default_factory=NativeOptions)
    tensorrt: TensorrtOptions = field(default_factory=TensorrtOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        chain = (self.engine, *self.fallback)
        if "auto" in self.fallback or (self.engine == "auto" and self.fallback):
            raise ConfigError(f"fallback: engine auto steps down by itself, got {self.engine} with {self.fallback}")
        if len({*chain}) < len(chain):
            raise ConfigError(f"fallback: expected other engines than {self.engine}, each once, got {chain[1:]}")
        if self.keep and (self.precision not in ("fp8", "int8") or self.engine != "native"):
            what = f"{', '.join(self.keep)} for {self.precision} in engine {self.engine}"
            raise ConfigError(f"keep: expected products of the native engine in FP8 or INT8, got {what}")
        # An engine that a program registers itself (`engines.ENGINES`) may have any of them.
        known = {*get_args(EngineName)}
        able = {"native", "eager"} if self.engine == "auto" else {*chain}
        if able <= known:
            self._refuse_unread(able)

    def _refuse_unread(self, able: set[str]) -> None:
        """Raise ConfigError for what no engine of `able` would read."""
        got = ", ".join((self.engine, *self.fallback))
        having = [name for name in get_args(EngineName) if self.precision in PRECISIONS.get(name, (self.precision,))]
        if not able.intersection(having):
            having.remove("auto")
            expected = f"an engine that has {self.precision} ({', '.join(having)})"
            raise ConfigError(f"precision: expected {expected}, got {got}")
        for name, engines in _changed(self):
            if not able.intersection(engines):
                raise ConfigError(f"{name}: only engine {' or '.join(engines)} reads it, got {got}")


def _changed(options: Any, before: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each field of a spec or its options that differs from its default, by its dotted name, and the engines that read
    it."""
    for one in dataclasses.fields(options):
        value = getattr(options, one.name)
        if dataclasses.is_dataclass(value):
            yield from _changed(value, f"{before}{one.name}.")
        elif "engines" in one.metadata and value != one.default:
            yield f"{before}{one.name}", one.metadata["engines"]


@dataclass(frozen=True)
class CheckpointSpec(Checked):
    """What a checkpoint does not say of itself, or not rightly; None: as the checkpoint says, or the usual.

    `asset_id`: which of the folders below `assets/` holds the statistics, where there are several. `tokenizer`: a
    file, folder or hub name to take the tokenizer from. `action_horizon`, `max_token_len`: sizes of the model that no
    weight shows. `discrete_state_input`: whether π0.5 reads the state in its prompt. `embodiment`: which of a GR00T
    checkpoint's robots, by its tag. `lora`: folder or hub name of an adapter that is folded into the weights.
    `action_tokenizer`: a folder or hub name to take π0-FAST's FAST from; `relaxed_actions`: tokens of π0-FAST that are
    no whole chunk are filled up, or cut, as lerobot does, instead of being an error.
    """

    where = "checkpoint."

    asset_id: str | None = None
    tokenizer: str | None = None
    action_horizon: int | None = None
    max_token_len: int | None = None
    discrete_state_input: bool | None = None
    embodiment: str | None = None
    lora: str | None = None
    action_tokenizer: str | None = None
    relaxed_actions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("action_horizon", "max_token_len"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= LARGEST:
                raise ConfigError(f"checkpoint.{name}: expected 1 to {LARGEST}, got {value}")


@dataclass(frozen=True)
class RtcConfig(Checked):
    """Real-time chunking: how strongly, and how far, a new chunk follows the previous one.

    `schedule`: of the weights between the delay and the execution horizon. `max_guidance_weight`: bound of w(t); None
    is the number of steps, because one Euler step moves x by w / steps of the error, so that more overshoots at t = 1
    (lerobot: 10, for 10 steps). `execution_horizon`: the action up to which the previous chunk counts; None is all of
    it (lerobot: 10). `trained`: the checkpoint was trained with clean prefixes, each action with its own flow time:
    the actions up to the delay are pinned, and nothing is guided. `max_delay`: the longest that it was trained with
    (lerobot: `rtc_training_max_delay`); None leaves it unchecked. A checkpoint of lerobot that says so is run as it was
    trained, unless `rtc` says otherwise.
    """

    where = "rtc."

    schedule: Schedule = "linear"
    max_guidance_weight: float | None = None
    execution_horizon: int | None = None
    trained: bool = False
    max_delay: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        guided = {"max_guidance_weight": self.max_guidance_weight, "execution_horizon": self.execution_horizon}
        guided["schedule"] = None if self.schedule == type(self).schedule else self.schedule
        if self.trained and any(value is not None for value in guided.values()):
            raise ConfigError(f"rtc.trained: expected no guidance beside it, got {guided}")
        if self.max_delay is not None and (self.max_delay < 1 or not self.trained):
            raise ConfigError(f"rtc.max_delay: expected at least 1, beside trained: true, got {self.max_delay}")
        most = self.max_guidance_weight
        if most is not None and not 0 <= most < float("inf"):
            raise ConfigError(f"rtc.max_guidance_weight: expected a number of 0 or more, got {most}")
        if self.execution_horizon is not None and self.execution_horizon < 1:
            raise ConfigError(f"rtc.execution_horizon: expected at least 1, got {self.execution_horizon}")

    def longest_delay(self, horizon: int) -> int | None:
        """The largest `inference_delay` of a call for a chunk of `horizon` actions; None if any is accepted."""
        if not self.trained:
            return None
        return horizon - 1 if self.max_delay is None else self.max_delay


@dataclass(frozen=True)
class PolicyConfig(Checked):
    """How a policy runs. What it computes is decided by the checkpoint and by `num_steps`.

    `num_steps`: denoising steps; None is what the checkpoint says (lerobot's `num_inference_steps`, `num_steps`), else
    what the model was made for (π0, π0.5, SmolVLA: 10; GR00T: 4); of π0-FAST the tokens that it writes at most.
    `precision`: dtype of the large products; "auto" is BF16 on a GPU and FP32 on a CPU.
    `device`: "auto", "cpu", "cuda" or "cuda:N". `strict`: a fallback raises instead of being recorded. `seed`: of the
    noise, where the caller passes none; π0-FAST draws none. `deterministic`: nothing is chosen by measuring which is
    the fastest, so that the same call gives the same bits after every start on the same kind of GPU. `default_prompt`:
    used when an observation carries none. `cuda_graph`: on a GPU, record a whole call into CUDA graphs where every
    engine allows it.
    `pipeline_memory_gib`: device memory for the buffers and graphs of all shapes together; the least recently used go
    first. `preset`: the robot's conventions (a name of `vla_accel.transforms.robots` or a YAML file), by default
    decided from the checkpoint. `checkpoint`: what the checkpoint does not say of itself. `rtc`: how a call that brings
    the previous chunk is guided by it. `warm_up`: prompts whose engines are built when the policy is loaded, besides
    those of an ordinary one. `vision`, `kv_cache`, `denoise`: engines of components of these names, and `denoise` of
    π0-FAST's `decode`, too; `engines`: of any component, by name. `native`: options of every native engine.
    """

    num_steps: int | None = None
    precision: Precision = "auto"
    device: str = "auto"
    strict: bool = False
    seed: int = 0
    deterministic: bool = False
    default_prompt: str | None = None
    cuda_graph: bool = True
    pipeline_memory_gib: float = 8.0
    preset: str | None = None
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    rtc: RtcConfig = field(default_factory=RtcConfig)
    warm_up: tuple[str, ...] = ()
    vision: EngineSpec = field(default_factory=EngineSpec)
    kv_cache: EngineSpec = field(default_factory=EngineSpec)
    denoise: EngineSpec = field(default_factory=EngineSpec)
    engines: Mapping[str, EngineSpec] = field(default_factory=dict)
    native: NativeOptions = field(default_factory=NativeOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed: expected 0 to 2**63 - 1, got {self.seed}")
        if not 0 <= self.pipeline_memory_gib < float("inf"):
            raise ConfigError(f"pipeline_memory_gib: expected 0 or more, got {self.pipeline_memory_gib}")
        # Each step's conditions are computed beforehand and kept.
        if self.num_steps is not None and not 1 <= self.num_steps <= 1000:
            raise ConfigError(f"num_steps: expected 1 to 1000, got {self.num_steps}")
        given = {name: getattr(self, name) for name in _FIELDS} | dict(self.engines)
        if self.deterministic and (timed := [name for name, spec in given.items() if spec.attention == "fastest"]):
            raise ConfigError(f"deterministic: expected an attention of {timed[0]} that is not measured, got fastest")

    def specs(self, parts: Sequence[str]) -> dict[str, EngineSpec]:
        """The engine of each component of a model, `parts`. Raises ConfigError for a component that it lacks."""
        given = {name: getattr(self, name) for name in _FIELDS if getattr(self, name) != EngineSpec()}
        twice = sorted(given.keys() & self.engines.keys())
        if twice:
            raise ConfigError(f"engines.{twice[0]}: given twice, as {twice[0]}, too")
        given |= self.engines
        for part, other in _INSTEAD.items():
            # What a file says of the one is meant of the other, so that the shipped files suit every model.
            if part in parts and other in given and other not in parts and part not in given:
                given[part] = given.pop(other)
        others = [name for name in given if name not in parts]
        if others:
            raise ConfigError(f"{others[0]}: the model has no such component; it has {', '.join(parts)}")
        specs = {name: given.get(name, EngineSpec()) for name in parts}
        if self.native == NativeOptions():
            return specs
        if own := [name for name, spec in specs.items() if spec.native != NativeOptions()]:
            raise ConfigError(f"{own[0]}.native: given twice, as native of every component, too")
        if not any(map(_may_be_native, specs.values())):
            engines = ", ".join(f"{name} {spec.engine}" for name, spec in specs.items())
            raise ConfigError(f"native: expected a component in engine native, got {engines}")
        return {
            name: dataclasses.replace(spec, native=self.native) if _may_be_native(spec) else spec
            for name, spec in specs.items()
        }

    def with_lora(self, lora: str) -> PolicyConfig:
        """The same with an adapter folded into the checkpoint's weights."""
        return dataclasses.replace(self, checkpoint=dataclasses.replace(self.checkpoint, lora=lora))

    def with_specs(self, specs: Mapping[str, EngineSpec]) -> PolicyConfig:
        """This configuration with these engines and no others; without `native` where none of them could read it."""
        fields: dict[str, Any] = {name: specs.get(name, EngineSpec()) for name in _FIELDS}
        rest = {name: spec for name, spec in specs.items() if name not in _FIELDS}
        native = self.native if any(map(_may_be_native, (*fields.values(), *rest.values()))) else NativeOptions()
        return dataclasses.replace(self, **fields, engines=rest, native=native)


def _may_be_native(spec: EngineSpec) -> bool:
    return not {"auto", "native"}.isdisjoint((spec.engine, *spec.fallback))


_FIELDS = ("vision", "kv_cache", "denoise")
_INSTEAD = {"decode": "denoise"}
"""Components of some models that stand where others have another one."""


def load_config(source: str | Path | Mapping[str, Any] | PolicyConfig | None) -> PolicyConfig:
    """A `PolicyConfig` from a YAML or JSON file, a mapping, or as it is; None gives the defaults.

    A file may be given as a path or, where it comes with the package, by its name: "native_fp8"; "auto" is the name
    of the defaults. Raises ConfigError for an unknown name, an unreadable file, an unknown key or a value of the wrong
    kind.
    """
    if source is None or source == AUTO:
        return PolicyConfig()
    if isinstance(source, PolicyConfig):
        return source
    if isinstance(source, Mapping):
        return from_mapping(PolicyConfig, source)
    path = find_config(source)
    content = read_mapping(path)
    try:
        return from_mapping(PolicyConfig, content)
    except ConfigError as error:
        raise ConfigError(f"config {path}: {error}") from error


def shipped_configs() -> dict[str, Path]:
    """The configurations that come with the package: name to file."""
    return {path.stem: path for path in sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))}


def find_config(name_or_path: str | Path) -> Path:
    """The file of a shipped configuration's name, or the path itself. Raises ConfigError for an unknown name; whether
    a file with a suffix exists is for its reader to say."""
    if not isinstance(name_or_path, (str, Path)):
        raise ConfigError(f"config: expected a name, a file, a mapping or a PolicyConfig, got {name_or_path!r:.60}")
    shipped, name = shipped_configs(), str(name_or_path)
    path = shipped.get(name, user_path(name_or_path))
    if path.suffix or (name and path.exists()):
        return path
    raise ConfigError(unknown("config", name, (AUTO, *shipped), "a file or "))
