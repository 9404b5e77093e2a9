"""The command that makes each stored run of benchmarks/results (`python -m benchmarks.measure`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

STORED_GPU = "H200"
"""Runs whose name ends in this GPU are stored only when they come from one."""


@dataclass(frozen=True)
class Job:
    """A command that writes one JSON file, which is stored as NAME.json, or not stored if the name has a folder.

    Attributes:
        command: as typed, with placeholders: {json}, the file to write, or {folder}, a folder to write to;
            {work}/NAME.json, the result of job NAME, which then runs first; {workers}, simulators for the cores;
            {observations}, {realtime_vla}, {stress}, {starts}, options of `benchmarks.measure`.
        whole_machine: nothing else may run at the same time.
        needs: packages to import, and options of `benchmarks.measure`.
        file: what it writes within {folder}.
        only: the GPU model that it needs, in place of `STORED_GPU`.
        checkpoint: a bundled checkpoint that it needs in addition to `demo`.
    """

    name: str
    command: str
    gpus: int = 1
    whole_machine: bool = False
    needs: tuple[str, ...] = ()
    file: str = ""
    only: str = ""
    checkpoint: str = ""

    @property
    def after(self) -> tuple[str, ...]:
        """The jobs whose results it reads."""
        return tuple(re.findall(r"\{work\}/(\S+?)\.json", self.command))

    @property
    def stored(self) -> bool:
        """Whether its result belongs in benchmarks/results."""
        return "/" not in self.name


def on_gpu(name: str, only: str = "") -> str:
    """The name of a run on the GPU that it needs."""
    return f"{name}_{(only or STORED_GPU).lower()}"


def bench(name: str, options: str, *needs: str, only: str = "") -> Job:
    """Whole calls of a published size with random weights."""
    return Job(on_gpu(f"bench_{name}", only), f"vla-accel bench {options} --output {{json}}", needs=needs, only=only)


def stem(config: str) -> str:
    """The name of a configuration."""
    return config.rpartition("/")[2].removesuffix(".yaml")


def parity(config: str) -> Job:
    """Agreement of a configuration of the bundled checkpoint on recorded observations."""
    command = f"vla-accel parity demo --config {config} --observations {{observations}} --count 120 --draws 8"
    return Job(f"parity_{stem(config)}", f"{command} --output {{json}}", needs=("observations",))


def synthetic(family: str, config: str) -> Job:
    """Agreement of a configuration with random weights of a published size."""
    command = f"vla-accel parity --model {family} --config {config} --count 16 --output {{json}}"
    return Job(f"parity_{family}_{config}", command)


def serving(name: str, policy: str, replicas: int, host: int = 2, only: str = "") -> Job:
    """Calls over a server with a process for each of the first `replicas` GPUs of a machine that has `host`. Runs that
    are compared use the same machine."""
    devices = ",".join(f"cuda:{index}" for index in range(replicas))
    options = f"{policy} --config native --devices {devices} --clients 1,4,16,64 --seconds 2"
    command = f"vla-accel bench-server {options} --output {{json}}"
    return Job(on_gpu(f"bench_server_{name}_{replicas}", only), command, gpus=host, whole_machine=True, only=only)


def played(folder: str, config: str, options: str = "--steps 10 --trials 50", *needs: str, checkpoint: str = "") -> Job:
    """Episodes of one configuration, for `paired`."""
    command = f"python -m eval.libero --config {config} {options} --workers {{workers}} --device cuda"
    command += f" --retry-errors{checkpoint and f' --policy {checkpoint}'} --output {{json}}"
    return Job(f"{folder}/{stem(config)}", command, needs=("libero", *needs), checkpoint=checkpoint)


def paired(name: str, runs: Sequence[Job]) -> Job:
    """A comparison of runs of `played` with the first of them."""
    files = " ".join(f"{{work}}/{run.name}.json" for run in runs)
    note = "The simulators of a run shared one policy and its GPU, which also rendered."
    return Job(name, f'python -m eval.paired {files} --note "{note}" --output {{json}}', gpus=0)


def stored(name: str, options: str, gpus: int, whole_machine: bool = False) -> tuple[Job, Job]:
    """Episodes of the bundled checkpoint by step count, and the part of the result that is stored."""
    play = f"python -m eval.libero {options} --output {{json}}"
    keep = f"python -m benchmarks.store {{work}}/steps/{name}.json --name {name} --folder {{folder}}"
    return (
        Job(f"steps/{name}", play, gpus=gpus, whole_machine=whole_machine, needs=("libero",)),
        Job(name, keep, gpus=0, file=f"{name}.json"),
    )


def late(chunking: str) -> Job:
    """Success against latency with one kind of chunks; openpi's call on an H200 is six ticks late."""
    command = f"python -m eval.libero.late --config native --trials 30 --steps 10 --chunkings {chunking}"
    options = "--ticks 0,1,2,4,5,6,8 --workers {workers} --device cuda --output {json}"
    return Job(f"libero_late_{chunking}", f"{command} {options}", needs=("libero",))


def throughput(name: str, cases: str, gpus: int, *needs: str, only: str = "") -> Job:
    """Episodes an hour; it watches the cores of the whole machine."""
    command = f'python -m eval.throughput --case {cases} --options="--config native_fp8" --output {{json}}'
    needs = ("libero", *needs)
    return Job(on_gpu(f"throughput_{name}", only), command, gpus=gpus, whole_machine=True, needs=needs, only=only)


OURS = "native-bf16,native-fp8,native-fp8-vision"
INT8_EXPERT = "native-int8-denoise,native-fp8-int8-denoise,native-fp8-vision-int8-denoise"
SHAPE = "--views 3 --horizon 50 --steps 10 --calls 60"
PORTABLE = "portable-bf16,portable-fp8,portable-int8"
WITH_REALTIME = f"--systems native-bf16,native-fp8,{PORTABLE} {SHAPE} --realtime-vla {{realtime_vla}}"
UNDER_STRESS = "--steps 10 --starts {starts} --stress {stress} --trials 100"
"""A thousand pairs need more start states than LIBERO ships."""
COMPARED = ("eager_fp32", "native", "native_fp8", "native_fp8_vision", "native_int8_denoise")
"""Hopper's kernels, the reference first."""
ELSEWHERE = ("native_int8", "benchmarks/configs/native_portable.yaml", "benchmarks/configs/native_portable_int8.yaml")
"""The configurations for GPUs without FP8 or without Hopper's kernels."""
PAIRED, PAIRED_ELSEWHERE = ([played("paired", config) for config in configs] for configs in (COMPARED, ELSEWHERE))
SMOLVLA = [
    played("paired_smolvla", config, checkpoint="smolvla_demo") for config in ("eager_fp32", "native", "native_fp8")
]
STRESSED, STRESSED_ELSEWHERE = (
    [played("stress", config, UNDER_STRESS, "stress", "starts") for config in configs]
    for configs in (COMPARED, ELSEWHERE)
)
UNSEEN = [
    played("unseen", config, "--steps 10 --starts {starts} --trials 30", "starts")
    for config in ("eager_fp32", "native", "native_fp8")
]
PLACED = {
    "": ("native_placed_4", "native_placed_3", "native_placed_2", "native_uniform_3", "native_uniform_1",
         "native_fp8_placed_3"),
    "smolvla_demo": ("smolvla_placed_4", "smolvla_placed_3", "smolvla_placed_2", "native_uniform_3",
                     "native_uniform_1"),
}  # fmt: skip
"""Other denoising steps than the checkpoint's own ten, for the bundled π0.5 and for SmolVLA."""


def schedules(folder: str, options: str, checkpoint: str = "") -> list[Job]:
    """Episodes with ten uniform steps and with other steps, from start states that training never saw."""
    configs = ("native", *(f"benchmarks/configs/{name}.yaml" for name in PLACED[checkpoint]))
    needs = ("stress", "starts") if "stress" in options else ("starts",)
    return [
        played(folder, config, f"--starts {{starts}} {options}", *needs, checkpoint=checkpoint) for config in configs
    ]


SCHEDULES = {
    "schedules_stress": schedules("schedules_stress", "--stress {stress} --trials 100"),
    "schedules_smolvla_stress": schedules("schedules_smolvla_stress", "--stress {stress} --trials 100", "smolvla_demo"),
    "schedules": schedules("schedules", "--trials 50"),
    "schedules_smolvla": schedules("schedules_smolvla", "--trials 50", "smolvla_demo"),
}


def families(only: str = "") -> list[Job]:
    """Whole calls of the families whose tables take a run from any GPU."""
    timed = partial(bench, only=only)
    return [
        timed("act", "--model act --systems native-bf16,eager,lerobot-eager --steps 1 --batch 1,2,4,8 "
              "--calls 100 --profile", "lerobot"),
        timed("diffusion_policy", "--model diffusion_policy --systems native-bf16,native-int8-denoise,eager,"
              "lerobot-eager --steps 10,100 --batch 1,4 --calls 50 --profile", "lerobot"),
        timed("multi_task_dit", "--model multi_task_dit --systems native-bf16,native-int8-denoise,eager,"
              "lerobot-eager --steps 100,10 --batch 1,4 --calls 50 --profile", "lerobot"),
        *(timed(model, f"--model {model} --systems native-bf16,native-fp8,eager --views 2 --steps 4 --calls 50 "
                "--profile")
          for model in ("groot_n16", "groot_n15")),
        timed("vla_jepa", "--model vla_jepa --systems native-bf16,native-fp8,eager,lerobot-eager --views 2 --steps 4 "
              "--calls 50 --profile", "lerobot"),
        timed("evo1", "--model evo1 --systems native-bf16,native-fp8,native-int8-denoise,eager,lerobot-eager "
              "--views 2 --steps 32,10 --batch 1,2,4 --calls 40 --profile", "lerobot"),
        timed("molmoact2", "--model molmoact2 --systems native-bf16,native-fp8,native-fp8-vision,native-fp8-denoise,"
              "eager,lerobot-eager --views 2 --steps 10,3 --calls 40 --profile", "lerobot"),
        timed("fastwam", "--model fastwam --systems native-bf16,native-fp8,eager,lerobot-eager --views 2 "
              "--steps 10,3 --calls 40 --profile", "lerobot"),
        timed("xvla", "--model xvla --systems native-bf16,native-fp8,eager,lerobot-eager,lerobot-eager-bf16 "
              "--views 2 --steps 10,5,3 --batch 1,2,4 --calls 40 --profile", "lerobot"),
        *(timed(model, f"--model {model} --systems native-bf16,eager --views 2 --calls 50 --profile")
          for model in ("starvla_groot", "starvla_pi", "starvla_oft")),
        *(timed(name, "--model openvla_oft --systems native-bf16,native-fp8,native-int8-denoise,eager "
                f"--batch 1,2 --views {views} --calls 50 --profile")
          for name, views in (("openvla_oft", 2), ("openvla_oft_one_view", 1))),
        # The authors' code needs an environment of its own.
        timed("openvla_oft_reference", "--model openvla_oft --systems native-bf16,oft-eager --views 2 --calls 50",
              "prismatic"),
        # torch.compile takes minutes, in runs of their own.
        *(timed(f"{model}_compile", f"--model {model} --systems native-bf16,{other} {options}", "lerobot")
          for model, other, options in (
              ("act", "lerobot-compile", "--steps 1 --calls 100"),
              ("diffusion_policy", "lerobot-compile", "--steps 10 --calls 50"),
              ("multi_task_dit", "lerobot-compile", "--steps 10 --calls 50"),
              ("evo1", "lerobot-compile", "--views 2 --steps 32 --calls 40"),
              ("molmoact2", "lerobot-graph", "--views 2 --steps 10 --calls 40"),
              ("fastwam", "lerobot-eager,lerobot-compile", "--views 2 --steps 10 --calls 40"),
              ("xvla", "lerobot-compile-bf16", "--views 2 --steps 10 --calls 40"))),
    ]  # fmt: skip


def goals(only: str = "") -> list[Job]:
    """Whole calls with the checkpoint's own number of denoising steps and with fewer, for the goals of placed steps.
    The times at which the steps lie do not change the duration of a call."""

    def timed(name: str, options: str) -> Job:
        return Job(on_gpu(f"goals_{name}", only), f"vla-accel bench {options} --output {{json}}", only=only)

    long = "--views 3 --horizon 50 --steps 10,3 --calls 100"
    return [
        timed("pi05", f"--model pi05 --systems {OURS} --steps 10,3 --calls 100"),
        timed("pi05_long", f"--model pi05 --systems native-fp8 {long}"),
        timed("pi0_long", f"--model pi0 --systems native-fp8 {long}"),
        timed("smolvla", "--model smolvla --systems native-bf16 --views 2 --steps 10,3 --calls 100"),
        timed("groot", "--model groot --systems native-bf16 --views 2 --steps 4,2 --calls 100"),
        timed("pi0_fast", "--model pi0_fast --systems native-bf16,native-fp8-decode,native-int8-decode --calls 20"),
        timed("portable", "--model pi05 --systems portable-bf16 --steps 10,3 --calls 100"),
        timed("portable_long", f"--model pi05 --systems portable-fp8 {long}"),
        timed("batches", "--model pi05 --systems native-fp8 --steps 3,10 --batch 16,32 --calls 40"),
    ]


JOBS: tuple[Job, ...] = (
    # Times of whole calls.
    # openpi's max-autotune compiles for longer than all of this takes; it is in bench_compile.
    bench("record", f"--model pi05 --systems {OURS},{INT8_EXPERT},eager,openpi-eager,realtime-vla --steps 10,3,1 "
          "--calls 60 --realtime-vla {realtime_vla}", "openpi", "realtime_vla"),
    bench("pi05_alone", f"--model pi05 --systems {OURS} --steps 10,3,1 --calls 60 --hz 20"),
    bench("pi05_profile", f"--model pi05 --systems {OURS} --steps 10 --calls 60 --profile"),
    bench("pi05_8bit", "--model pi05 --systems native-fp8-vision-int8-denoise-host,native-int8,native-int8-vision "
          "--steps 10 --calls 60"),
    bench("pi0", f"--model pi0 --systems {OURS},eager,openpi-eager {SHAPE} --profile", "openpi"),
    bench("smolvla", f"--model smolvla --systems {OURS},lerobot-eager --steps 10 --batch 1,2,4 --calls 40 --profile",
          "lerobot"),
    *(Job(on_gpu("attach", only), "python -m benchmarks.time_attach --output {json}", needs=("lerobot",), only=only)
      for only in ("", "H100")),
    bench("groot", "--model groot --systems native-bf16,native-fp8,eager,lerobot-eager --views 2 --steps 4 --calls 50 "
          "--profile", "lerobot"),
    *families(),
    bench("pi0_fast", "--model pi0_fast --systems native-bf16,native-fp8,native-fp8-decode,native-int8-decode,eager "
          "--calls 20"),
    bench("portable_pi05", f"--model pi05 {WITH_REALTIME}", "realtime_vla"),
    bench("portable_pi0", f"--model pi0 {WITH_REALTIME}", "realtime_vla"),
    bench("portable_short", f"--model pi05 --systems {PORTABLE},realtime-vla --steps 10 --calls 60 --realtime-vla "
          "{realtime_vla}", "realtime_vla"),
    bench("pi05_prompt60", f"--model pi05 --systems {OURS} --steps 10 --prompt-tokens 60 --calls 60"),
    bench("pi05_prompt180", f"--model pi05 --systems {OURS} --steps 10 --prompt-tokens 180 --calls 60"),
    bench("pi05_batches", "--model pi05 --systems native-fp8,native-fp8-vision --steps 10 --batch 1,4,8,16,32 "
          "--calls 40"),
    bench("camera_pi05", "--model pi05 --systems native-fp8 --steps 10 --calls 40 --camera 480x640"),
    bench("camera_smolvla", "--model smolvla --systems native-bf16 --steps 10 --calls 40 --camera 256x256"),
    bench("compile", f"--systems {OURS},openpi-eager,openpi-compile,openpi-max-autotune --steps 10 --batch 1 "
          "--calls 50", "openpi"),
    bench("pi05", f"--model pi05 --systems {OURS},portable-bf16,portable-fp8 --steps 10 --calls 60", only="H100"),
    bench("portable_pi05", f"--model pi05 {WITH_REALTIME}", "realtime_vla", only="H100"),
    bench("pi0", f"--model pi0 --systems {OURS},portable-bf16,portable-fp8 {SHAPE}", only="H100"),
    *families("H100"),
    *goals(),
    *goals("H100"),
    *(Job(on_gpu("prompts_fastwam", only), "python -m benchmarks.time_prompts --output {json}", only=only)
      for only in ("", "H100")),
    Job("start_pi05_h200", f"vla-accel bench --model pi05 --systems {OURS} --steps 10 --calls 20 --starts --output "
        "{json}"),
    Job("fp8_accumulation_h200", "python -m benchmarks.accumulation --count 8 --draws 2 --output {json}"),
    Job("attention_h200", "python -m benchmarks.time_attention --output {json}"),
    Job("sd_unet_h200", "vla-accel bench-unet --img2img --rounds 3 --output {json}", needs=("diffusers",)),
    Job("qwen_image_h200", "vla-accel bench-qwen --steps 4 --rounds 3 --transformer native --output {json}",
        needs=("diffusers",)),
    Job("qwen_vae_h200", "vla-accel bench-vae --systems eager,compile,native,native-fp16 --rounds 10 --picture "
        "{folder}/picture.png --output {json}", needs=("diffusers",)),
    Job("qwen_vae_sizes_h200", "vla-accel bench-vae --sizes static,512x512,848x480,1280x720,1920x1088,1184x880 "
        "--systems eager,native,native-fp16 --rounds 5 --output {json}", needs=("diffusers",)),
    *(Job(f"precision_{model.replace('-', '_')}_h200", f"vla-accel precision {model} --output {{json}}",
          needs=("diffusers",)) for model in ("sd-unet", "qwen-vae", "qwen-text-encoder")),
    # Agreement with FP32 eager.
    *(parity(config) for config in (
        "native", "native_fp8", "native_fp8_vision", "native_int8", "native_int8_denoise",
        "native_fp8_int8_denoise", "native_fp8_vision_int8_denoise",
        "benchmarks/configs/native_portable.yaml",
        "benchmarks/configs/native_portable_fp8.yaml", "benchmarks/configs/native_portable_int8.yaml",
    )),
    *(synthetic("pi05", config) for config in ("native", "native_fp8")),
    *(synthetic("smolvla", config) for config in ("native", "native_fp8")),
    *(synthetic(model, config) for model in ("groot", "groot_n16", "groot_n15")
      for config in ("native", "native_fp8_denoise")),
    *(synthetic(model, config) for model, low in (
        ("fastwam", "native_fp8"), ("molmoact2", "native_fp8"), ("openvla_oft", "native_fp8_denoise"),
        ("xvla", "native_fp8_denoise"), ("evo1", "native_fp8_denoise"), ("vla_jepa", "native_fp8_denoise"),
        ("multi_task_dit", "native_int8_denoise"), ("diffusion_policy", "native_int8_denoise"),
    ) for config in ("native", low)),
    *(synthetic(model, "native") for model in ("act", "starvla_groot", "starvla_pi", "starvla_oft")),
    # Success; the first run of a comparison is the reference.
    *PAIRED,
    *PAIRED_ELSEWHERE,
    paired("libero_paired", [*PAIRED, *PAIRED_ELSEWHERE[:-1]]),
    paired("libero_paired_portable_int8", [PAIRED[0], PAIRED_ELSEWHERE[-1]]),
    *SMOLVLA,
    paired("libero_paired_smolvla", SMOLVLA),
    *STRESSED,
    paired("libero_stress", STRESSED),
    *STRESSED_ELSEWHERE,
    paired("libero_stress_elsewhere", [STRESSED[0], *STRESSED_ELSEWHERE]),
    *UNSEEN,
    paired("libero_paired_unseen", UNSEEN),
    *(job for name, runs in SCHEDULES.items() for job in (*runs, paired(f"libero_{name}", runs))),
    *(Job(f"flow_{name}_demo_h200", f"vla-accel flow {checkpoint} --config native_fp8 --observations {{observations}} "
          "--output {folder}", needs=("observations",), file="flow.json")
      for name, checkpoint in (("pi05", "demo"), ("smolvla", "smolvla_demo"))),
    late("plain"),
    late("rtc"),
    *(job for suite in ("libero_spatial", "libero_object") for job in stored(f"{suite}_demo",
        f"--suite {suite} --steps 10,3,1 --trials 50 --workers {{workers}} --device cuda", 1)),
    *stored("libero_spatial_quick_cpu", "--steps 1,2,3,5,10 --quick --device cpu", 0),
    *(Job(f"tune_{checkpoint}_h100", f"python -m eval.libero.tune {checkpoint} --observations {{observations}} --suite "
          "libero_spatial --workers {workers} --no-films --device cuda --output {folder}",
          needs=("libero", "observations"), file="tune.json", only="H100")
      for checkpoint in ("demo", "smolvla_demo")),
    # Many simulators, and many clients of a server.
    throughput("simulators", "plain:1:4:6:16,plain:1:8:6:16,plain:1:14:12:16", 1),
    throughput("gpus", "ray:1:14:12:16,ray:2:28:12:32,ray:4:56:12:64", 4, "ray", only="H100"),
    # The policy in the server's process, as with `vla-accel serve demo`.
    Job("bench_server_h200", "vla-accel bench-server demo --config native --device cuda --clients 1,4,16,64 "
        "--seconds 2 --output {json}", whole_machine=True),
    *(serving("demo", "demo", replicas) for replicas in (1, 2)),
    *(serving("pi05", "--model pi05", replicas) for replicas in (1, 2)),
    *(serving("pi05", "--model pi05", replicas, host=4, only="H100") for replicas in (1, 2, 4)),
    Job("server_faults_h200", "python -m tests.remote.load_server --checkpoint demo --config native --devices "
        "cuda:0,cuda:1 --seconds 60 --output {json}", gpus=2, whole_machine=True),
    # Without a GPU.
    Job("bench_server_cpu", "vla-accel bench-server --seconds 5 --device cpu --output {json}", gpus=0,
        whole_machine=True),
    Job("server_faults_cpu", "python -m tests.remote.load_server --output {json}", gpus=0, whole_machine=True),
    Job("memory_counted", "python -m benchmarks.memory --output {json}", gpus=0),
    Job("tensorrt_rtx_demo_cpu", "vla-accel build demo --config tensorrt_rtx --targets sm89,sm120 --manifest {json}",
        gpus=0, needs=("tensorrt_rtx", "onnx")),
)  # fmt: skip
"""In the order in which they run."""

EXCEPTIONS = {
    "lerobot_parity_cpu": "it also needs lerobot's interpreter; see tests/parity/compare_with_lerobot.py",
    "loop_copies_h100": "the kernels of its variants are not kept",
    "loop_order_h200": "the kernels of its variants are not kept",
    "loop_rows_h100": "the kernels of its variants are not kept",
    "openpi_parity_h200": "it needs openpi's packages; see tests/parity/compare_with_openpi.py",
    "persistent_loop_h200": "variants of a kernel's source, timed once; benchmarks.time_loops times the kernel itself",
    "tensorrt_rtx_full_width_cpu": "engines of random weights, built once; no command makes such a checkpoint",
    "torch_tensorrt_h200": "engines of random weights, built once; no command makes such a checkpoint",
}
"""Stored runs that have no job, and why."""
