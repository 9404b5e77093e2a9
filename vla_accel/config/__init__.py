"""The configuration of a policy and its engines, as frozen dataclasses, and its reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from vla_accel.config.mapping import Checked, Within, from_mapping, read_mapping
from vla_accel.errors import ConfigError, unknown
from vla_accel.files import user_path

Precision = Literal["auto", "fp32", "bf16"]
EngineName = Literal["auto", "eager", "native", "torch_tensorrt", "tensorrt", "tensorrt_rtx"]
EnginePrecision = Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8"]
Attention = Literal["auto", "own", "sdpa", "flash_attn", "fastest"]
Kernels = Literal["auto", "portable", "triton"]
GuidanceSchedule = Literal["zeros", "ones", "linear", "exp"]
NamedSchedule = Literal["uniform", "cubic"]
AUTO = "auto"
"""The name of the default configuration."""

LARGEST = 4096
"""Upper bound of sizes that a checkpoint's config states and no weight confirms: actions of a chunk, prompt tokens,
state dimensions, pixels of an edge. Larger values are refused, because they would exhaust the memory."""

TENSORRT = ("tensorrt", "tensorrt_rtx", "torch_tensorrt")
PRECISIONS: Mapping[str, tuple[EnginePrecision, ...]] = {
    "eager": ("auto", "fp32", "bf16"),
    **dict.fromkeys(TENSORRT, ("auto", "fp32", "bf16", "fp16", "fp8")),
}
"""The precisions that each engine supports for at least one component. An engine that is not listed supports all."""


def _read_by(*engines: str) -> Mapping[str, Any]:
    """Return metadata of a field that only these engines read. `EngineSpec` refuses values that no engine reads."""
    return {"engines": engines}


@dataclass(frozen=True)
class TensorrtOptions(Checked):
    """How `tensorrt`, `tensorrt_rtx` and `torch_tensorrt` engines are built, cached and run.

    Attributes:
        targets: compute capabilities to build for ("sm89"). Empty: the GPU of this machine.
        profiles: one string for each profile, "images.1=1:2:4, …", with minimum, optimum and maximum of each dynamic
            dimension. A dimension that is not named gets its whole range, with the maximum as the optimum. Empty: one
            profile of whole ranges.
        optimization_level: of the builder, 0 to 5.
        workspace_mb: limit of the scratch memory of one kernel.
        weight_streaming: keep weights in host memory if the GPU has too little.
        refit: allow to replace the weights later.
        version_compatible: also run with later versions of the library.
        hardware_compatible: also run on other GPUs (Ampere and newer).
        timing_cache: reuse kernel timings of earlier builds.
        whole: torch_tensorrt builds the whole component, not only its marked parts.
        verify: compare the ONNX graph, and the first output of the engine, with the module.
        cache: folder of built engines. Default: the user's cache folder.
        cache_gb: size limit of that folder.
    """

    where = "tensorrt."

    targets: tuple[str, ...] = field(default=(), metadata=_read_by("tensorrt_rtx"))
    profiles: tuple[str, ...] = field(default=(), metadata=_read_by("tensorrt", "tensorrt_rtx"))
    optimization_level: Annotated[int | None, Within(0, 5)] = field(default=None, metadata=_read_by(*TENSORRT))
    workspace_mb: Annotated[int | None, Within(1)] = field(default=None, metadata=_read_by(*TENSORRT))
    weight_streaming: bool = field(default=False, metadata=_read_by(*TENSORRT))
    refit: bool = field(default=False, metadata=_read_by(*TENSORRT))
    version_compatible: bool = field(default=False, metadata=_read_by(*TENSORRT))
    hardware_compatible: bool = field(default=False, metadata=_read_by(*TENSORRT))
    timing_cache: bool = field(default=True, metadata=_read_by("tensorrt", "tensorrt_rtx"))
    whole: bool = field(default=False, metadata=_read_by("torch_tensorrt"))
    verify: bool = field(default=True, metadata=_read_by(*TENSORRT))
    cache: str | None = field(default=None, metadata=_read_by(*TENSORRT))
    cache_gb: Annotated[float, Within(0, above=True)] = field(default=20.0, metadata=_read_by(*TENSORRT))


@dataclass(frozen=True)
class NativeOptions(Checked):
    """How the native engine runs.

    Attributes:
        kernels: "auto" takes the fastest kernels. "portable" runs what an Ampere or Ada GPU would run: no kernels that
            need Hopper (GEMM and attention in CUDA C++, the streamed denoise loop, dependent launches), and no more
            shared memory than 99 KB. "triton" runs the same without the persistent denoise kernels: no CUDA C++ of this
            package, and no kernel whose blocks wait for each other.
        embeddings: where the table of token embeddings is. With "host" it is in page-locked memory, from which a kernel
            reads the rows of each prompt: the same result with 1 GB less GPU memory for the large models.
    """

    where = "native."

    kernels: Kernels = field(default="auto", metadata=_read_by("native"))
    embeddings: Literal["gpu", "host"] = field(default="gpu", metadata=_read_by("native"))


@dataclass(frozen=True)
class EngineSpec(Checked):
    """The engine of a component.

    Attributes:
        engine: "auto" takes the fastest engine that loses no accuracy on this machine (`engines.auto`).
        fallback: engines to try, in order, if `engine` cannot be built. Empty: a failed build is an error. "auto" has
            its own fallbacks.
        precision: of the large products. "auto" is the precision of the policy.
        keep: products, by their names in a layer, that are not quantised if `precision` is FP8 or INT8 (native engine).
        attention: of the vision and kv_cache components in the native engine: its own kernels, torch's SDPA,
            flash-attn, or the fastest one as measured during the build. "auto" takes the own kernels for shapes with a
            CUDA C++ kernel, otherwise the fastest, which it caches. With "own", results repeat bit for bit.
        native: options of the native engine.
        tensorrt: options of the TensorRT engines.

    Raises:
        ConfigError: neither `engine` nor an engine of `fallback` supports the precision or reads an option.
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
        # An engine that a program registers itself (`engines.ENGINES`) may support any precision and option.
        known = {*get_args(EngineName)}
        able = {"native", "eager"} if self.engine == "auto" else {*chain}
        if able <= known:
            self._refuse_unread(able)

    def _refuse_unread(self, able: set[str]) -> None:
        """Raise ConfigError for a precision or option that no engine of `able` reads."""
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
    """Yield the dotted name of each field that differs from its default, and the engines that read it."""
    for one in dataclasses.fields(options):
        value = getattr(options, one.name)
        if dataclasses.is_dataclass(value):
            yield from _changed(value, f"{before}{one.name}.")
        elif "engines" in one.metadata and value != one.default:
            yield f"{before}{one.name}", one.metadata["engines"]


@dataclass(frozen=True)
class CheckpointSpec(Checked):
    """Settings that a checkpoint lacks or states wrongly. None: the checkpoint's own, or the family's default.

    Attributes:
        asset_id: the folder below `assets/` with the statistics, if there are several.
        tokenizer: file, folder or hub name of the tokenizer.
        action_horizon: actions of a chunk.
        max_token_len: tokens of a prompt.
        discrete_state_input: whether π0.5 reads the state in its prompt.
        embodiment: tag of the robot, for a checkpoint of GR00T, starVLA or MolmoAct2 with several.
        lora: folder or hub name of an adapter, which is merged into the weights.
        action_tokenizer: folder or hub name of π0-FAST's action tokenizer (FAST).
        relaxed_actions: pad or truncate π0-FAST's output to a chunk, as lerobot does, instead of raising an error.
        wan: folder or hub name of Wan 2.2 in diffusers' layout, with FastWAM's image and text encoders.
        text_encoder: load FastWAM's text encoder (11 GB in BF16), so that instructions need not be encoded in advance.
        domain: number of the robot's domain, whose weights of X-VLA are used.
    """

    where = "checkpoint."

    asset_id: str | None = None
    tokenizer: str | None = None
    action_horizon: Annotated[int | None, Within(1, LARGEST)] = None
    max_token_len: Annotated[int | None, Within(1, LARGEST)] = None
    discrete_state_input: bool | None = None
    embodiment: str | None = None
    lora: str | None = None
    action_tokenizer: str | None = None
    relaxed_actions: bool = False
    wan: str | None = None
    text_encoder: bool = False
    domain: Annotated[int | None, Within(0, LARGEST)] = None


@dataclass(frozen=True)
class RtcConfig(Checked):
    """Real-time chunking: how a new chunk continues the previous one.

    A lerobot checkpoint that was trained for real-time chunking runs as it was trained, unless this says otherwise.

    Attributes:
        schedule: of the guidance weights between the delay and the execution horizon.
        max_guidance_weight: upper bound of w(t). None: for each Euler step one over its size (the number of steps if
            they are equal), because the step moves x by w times its size of the error, and more would overshoot
            (lerobot: 10, for 10 steps).
        execution_horizon: actions of the previous chunk that guide. None: all (lerobot: 10).
        trained: the checkpoint was trained with clean prefixes, with a flow time for each action. The actions up to
            the delay are copied from the previous chunk, without guidance.
        max_delay: the longest delay of the training (lerobot: `rtc_training_max_delay`). None: unchecked.
    """

    where = "rtc."

    schedule: GuidanceSchedule = "linear"
    max_guidance_weight: Annotated[float | None, Within(0)] = None
    execution_horizon: Annotated[int | None, Within(1)] = None
    trained: bool = False
    max_delay: Annotated[int | None, Within(1)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        guided = {"max_guidance_weight": self.max_guidance_weight, "execution_horizon": self.execution_horizon}
        guided["schedule"] = None if self.schedule == type(self).schedule else self.schedule
        if self.trained and any(value is not None for value in guided.values()):
            raise ConfigError(f"rtc.trained: expected no guidance with it, got {guided}")
        if self.max_delay is not None and not self.trained:
            raise ConfigError(f"rtc.max_delay: expected trained: true with it, got {self.max_delay} alone")

    def longest_delay(self, horizon: int) -> int | None:
        """Return the largest valid `inference_delay` for a chunk of `horizon` actions; None if there is no limit."""
        if not self.trained:
            return None
        return horizon - 1 if self.max_delay is None else self.max_delay


@dataclass(frozen=True)
class PolicyConfig(Checked):
    """How a policy runs.

    Attributes:
        num_steps: denoising steps; for π0-FAST the maximum number of tokens it writes. None: the checkpoint's own
            (lerobot's `num_inference_steps`, `num_steps`), otherwise the family's default (π0, π0.5, SmolVLA: 10;
            GR00T: 4).
        schedule: flow times of the steps. "uniform": equal steps, the default; "cubic": t_k = (1 - k / n)^3; or a list
            of n + 1 times that fall from 1 (noise) to 0 (actions), which sets `num_steps` to n.
        warm_start: flow time t at which a call with a previous chunk starts, from t * noise + (1 - t) * chunk; all
            times of `schedule` are multiplied by it. None: every call starts from noise.
        precision: dtype of the large products. "auto": BF16 on a GPU, FP32 on a CPU.
        device: "auto", "cpu", "cuda" or "cuda:N".
        strict: raise an error instead of falling back to another engine.
        seed: of the noise, if the caller passes none. π0-FAST draws no noise.
        deterministic: never choose kernels by measurement, so that calls repeat bit for bit after every start on the
            same kind of GPU.
        default_prompt: for observations without a prompt.
        cuda_graph: on a GPU, capture the whole call into CUDA graphs if every engine supports it.
        pipeline_memory_gib: device memory for the buffers and graphs of all shapes. The least recently used shapes are
            released first.
        preset: the robot's conventions: a name of `vla_accel.transforms.robots` or a YAML file. None: decided from the
            checkpoint.
        checkpoint: settings that the checkpoint lacks.
        rtc: real-time chunking, for calls with a previous chunk.
        warm_up: further prompts to build engines for when the policy is loaded.
        vision, kv_cache, denoise: engines of these components. `denoise` also configures π0-FAST's `decode` and ACT's
            `transformer`.
        engines: engines of other components, by name.
        native: options of all native engines.
    """

    num_steps: Annotated[int | None, Within(1, 1000)] = None
    schedule: NamedSchedule | tuple[float, ...] | None = None
    warm_start: Annotated[float | None, Within(0, 1, above=True, below=True)] = None
    precision: Precision = "auto"
    device: str = "auto"
    strict: bool = False
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0
    deterministic: bool = False
    default_prompt: str | None = None
    cuda_graph: bool = True
    pipeline_memory_gib: Annotated[float, Within(0)] = 8.0
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
        if isinstance(self.schedule, tuple):
            check_times(self.schedule, self.num_steps)
            object.__setattr__(self, "num_steps", len(self.schedule) - 1)
        given = {name: getattr(self, name) for name in _FIELDS} | dict(self.engines)
        if self.deterministic and (timed := [name for name, spec in given.items() if spec.attention == "fastest"]):
            raise ConfigError(f"deterministic: expected an attention of {timed[0]} that is not measured, got fastest")

    def specs(self, parts: Sequence[str]) -> dict[str, EngineSpec]:
        """Return the engine of each component of a model. Raises ConfigError for a component that the model lacks."""
        given = {name: getattr(self, name) for name in _FIELDS if getattr(self, name) != EngineSpec()}
        twice = sorted(given.keys() & self.engines.keys())
        if twice:
            raise ConfigError(f"engines.{twice[0]}: configured twice, as field and in engines")
        # Shipped configurations fit every model. Equal fields configure the whole model, whatever its components are.
        if len(given) == len(_FIELDS) and all(spec == self.denoise for spec in given.values()):
            given = dict.fromkeys(parts, self.denoise)
        # A component that the model lacks may have the engine of one that it has.
        kept = {name: spec for name, spec in given.items() if name in parts or name in _INSTEAD.values()}
        given = {name: spec for name, spec in given.items() if name in kept or spec not in kept.values()}
        given |= self.engines
        for part, other in _INSTEAD.items():
            # Shipped configurations name `denoise` and must fit every model.
            if part in parts and other in given and other not in parts and part not in given:
                given[part] = given.pop(other)
        others = [name for name in given if name not in parts]
        if others:
            raise ConfigError(
                f"engines: expected components of the model ({', '.join(parts)}), got {others[0]}; "
                "remove it, or use a configuration without special settings for it, such as native"
            )
        specs = {name: given.get(name, EngineSpec()) for name in parts}
        if self.native == NativeOptions():
            return specs
        if own := [name for name, spec in specs.items() if spec.native != NativeOptions()]:
            raise ConfigError(f"{own[0]}.native: configured twice, also as native of every component")
        if not any(map(_may_be_native, specs.values())):
            engines = ", ".join(f"{name} {spec.engine}" for name, spec in specs.items())
            raise ConfigError(f"native: expected a component in engine native, got {engines}")
        return {
            name: dataclasses.replace(spec, native=self.native) if _may_be_native(spec) else spec
            for name, spec in specs.items()
        }

    def with_steps(
        self, num_steps: int | None = None, schedule: NamedSchedule | Sequence[float] | None = None
    ) -> PolicyConfig:  # fmt: skip
        """Return a copy with other denoising steps. None keeps a setting, except that a list of times sets `num_steps`.
        Raises ConfigError if they contradict each other."""
        if num_steps is None and (schedule is None or isinstance(schedule, str)):
            num_steps = self.num_steps
        schedule = self.schedule if schedule is None else schedule
        return dataclasses.replace(self, num_steps=num_steps, schedule=schedule)  # type: ignore[arg-type]

    def with_lora(self, lora: str) -> PolicyConfig:
        """Return a copy that merges an adapter into the checkpoint's weights."""
        return dataclasses.replace(self, checkpoint=dataclasses.replace(self.checkpoint, lora=lora))

    def with_specs(self, specs: Mapping[str, EngineSpec]) -> PolicyConfig:
        """Return a copy with exactly these engines. Drops `native` if none of them reads it."""
        fields: dict[str, Any] = {name: specs.get(name, EngineSpec()) for name in _FIELDS}
        rest = {name: spec for name, spec in specs.items() if name not in _FIELDS}
        native = self.native if any(map(_may_be_native, (*fields.values(), *rest.values()))) else NativeOptions()
        return dataclasses.replace(self, **fields, engines=rest, native=native)


def check_times(times: Sequence[float], num_steps: int | None = None, *, warm_start: bool = False) -> None:
    """Raise ConfigError unless flow times fall strictly from 1, or with `warm_start` from less, to 0 in `num_steps`."""
    starts = bool(times) and (times[0] == 1.0 or (warm_start and times[0] < 1.0))
    if not (starts and times[-1] == 0.0 and all(before > after for before, after in pairwise(times))):
        expected = "times that fall from 1 to 0, such as [1.0, 0.3, 0.01, 0.0]"
        raise ConfigError(f"schedule: expected {expected}, got {[*times]}")
    if num_steps not in (None, len(times) - 1):
        raise ConfigError(f"schedule: expected {num_steps + 1} times for {num_steps} steps, got {len(times)}")


def _may_be_native(spec: EngineSpec) -> bool:
    return not {"auto", "native"}.isdisjoint((spec.engine, *spec.fallback))


_FIELDS = ("vision", "kv_cache", "denoise")
_INSTEAD = {"decode": "denoise", "transformer": "denoise"}
"""Components that take the engine of another component's field."""


def load_config(source: str | Path | Mapping[str, Any] | PolicyConfig | None) -> PolicyConfig:
    """Load a configuration.

    Args:
        source: a YAML or JSON file, the name of a shipped configuration ("native_fp8"), "auto" or None for the
            defaults, a mapping, or a `PolicyConfig`, which is returned as it is.

    Raises:
        ConfigError: the name or a key is unknown, the file is unreadable, or a value has the wrong type.
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
    """Return the files of the configurations that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))}


def find_config(name_or_path: str | Path) -> Path:
    """Return the file of a shipped configuration, or the path itself, unchecked. Raises ConfigError for an unknown
    name."""
    if not isinstance(name_or_path, (str, Path)):
        raise ConfigError(f"config: expected a name, a file, a mapping or a PolicyConfig, got {name_or_path!r:.60}")
    shipped, name = shipped_configs(), str(name_or_path)
    path = shipped.get(name, user_path(name_or_path))
    if path.suffix or (name and path.exists()):
        return path
    raise ConfigError(unknown("config", name, (AUTO, *shipped), "a file or "))
