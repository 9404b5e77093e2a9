"""Options of the commands of image models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vla_accel.cli.options import Argument, Count, Number, OutputFile, OutputFolder, Picture, Seed, Within, Written

Dtype = Literal["fp32", "bf16", "fp16"]
DtypeOfDevice = Annotated[Dtype | None, Argument("{fp32,bf16,fp16}")]
Library = Literal["tensorrt", "tensorrt_rtx"]
ImageEngine = Literal["eager", "native", "torch_tensorrt", "tensorrt", "tensorrt_rtx"]


@dataclass(frozen=True)
class BenchOptions:
    """Options of every benchmark of image models."""

    dtype: Dtype = "bf16"
    """Dtype of the models' weights."""
    rounds: Count = 5
    """Calls timed of each system; the systems take turns."""
    device: str = "auto"
    """cpu, cuda or cuda:N."""
    output: OutputFile = None
    """JSON file."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of both commands that build engine files."""

    library: Library = "tensorrt_rtx"
    """tensorrt_rtx builds on any machine, for the --targets; tensorrt for the GPU at hand."""
    targets: tuple[str, ...] = ()
    """Compute capabilities, like sm89; required by tensorrt_rtx without a GPU."""
    dtype: Dtype = "fp16"
    """Of the engine."""
    force_engine: bool = False
    """Rebuild existing files."""


@dataclass(frozen=True, kw_only=True)
class BuildVae(BuildOptions):
    """Build TensorRT engine files of an autoencoder: OUTPUT/vae_encoder_multi_profile.trt and
    vae_decoder_multi_profile.trt, which take every size; with --static a folder for each, OUTPUT/16_9/vae_encoder.trt
    and vae_decoder.trt, OUTPUT/9_16/…"""

    vae: str
    """A folder, or qwen-vae / wan-vae / wan22-vae / sd-vae / tiny-… with random weights."""
    output_dir: Annotated[Path, Written(folder=True)]
    """Where the files go, with vae_config.json, which the pipelines read."""
    static: bool = False
    """One folder a size: the five text-to-image ratios, and --sizes."""
    sizes: tuple[str, ...] = ()
    """WIDTHxHEIGHT: further sizes of --static."""
    only: tuple[str, ...] = ()
    """With --static: only these sizes instead of all five ratios."""
    sides: tuple[Literal["encoder", "decoder"], ...] = ("encoder", "decoder")
    """Which halves of the autoencoder."""
    optimization_level: Annotated[int | None, Within(0, 5)] = None
    """The builder's effort, 0 to 5."""


@dataclass(frozen=True, kw_only=True)
class BuildUnet(BuildOptions):
    """Build a TensorRT engine file of Stable Diffusion's UNet: one for every batch and size, for text and image.

        SD_DIR/unet/onnx/unet.onnx, SD_DIR/unet/trt/unet.trt

    Existing files are used, unless forced.
    """

    sd_dir: str
    """A diffusers folder; random or tiny-random for random weights, which needs --output-dir."""
    output_dir: OutputFolder = None
    """Instead of SD_DIR: the files go to unet/onnx and unet/trt in it."""
    force_onnx: bool = False
    """Export and build existing files again."""
    no_verify: bool = False
    """Do not compare the exported graph with the module."""


@dataclass(frozen=True)
class BenchVae(BenchOptions):
    """Time an autoencoder's encoder and decoder: systems in turns, wall clock of whole calls, with agreement.

    Exit status 1 if a system disagrees with the float32 reference beyond the thresholds.
    """

    vae: str = "qwen-vae"
    """A folder, or qwen-vae / wan-vae / wan22-vae / sd-vae / tiny-… with random weights."""
    sizes: tuple[str, ...] = ("1024x1024",)
    """WIDTHxHEIGHT or a ratio's name; "static" is the five ratios, "profiles" the nine of the multi-profile engine."""
    systems: tuple[
        Literal["eager", "compile", "native", "native-fp16", "native-measured", "inductor", "tensorrt", "tensorrt_rtx"],
        ...,
    ] = ("eager", "compile", "native")
    """eager: diffusers as it is. compile: torch.compile of that. inductor: torch.compile of our channels-last 2-D
    form. native-fp16: computes in float16 whatever --dtype says. native-measured: the quicker of native and inductor.
    tensorrt: engine files of --engine-path."""
    compile_sizes: tuple[str, ...] = ("1024x1024",)
    """Sizes at which compile and inductor take part: each compiles, which takes minutes."""
    engine_path: str | None = None
    """Folder of engine files, for tensorrt and tensorrt_rtx."""
    multi_profile: bool = False
    """Whether that folder holds multi-profile engines."""
    rounds: Count = 10
    """Calls timed of each system; the systems take turns."""
    picture: Picture = None
    """Write a PNG: a drawn scene, what eager and the first accelerated system decode from its latents, and their
    difference, magnified."""


@dataclass(frozen=True)
class BenchUnet(BenchOptions):
    """Time Stable Diffusion: wall clock of whole images and of single UNet calls, systems alternating.

    Every system starts from the same weights (rounded to --dtype), prompt and noise, which eager-fp32 draws in that
    dtype, too; a scheduler that draws in float32 at every step (diffusers' SDE solvers of DPM++) has other noise.

    Agreement is reported with eager in float32 and with eager in --dtype, of the latents and of the image: the first
    shows what the dtype costs, the second what a system adds.
    Exit status 1 if a system's UNet disagrees with the float32 one beyond the threshold.
    """

    sd_dir: str = "random"
    """A diffusers folder or hub name; random or tiny-random for random weights."""
    systems: tuple[
        Literal["eager-fp32", "eager", "compile", "compile-graphs", "native", "tensorrt", "tensorrt_rtx"], ...
    ] = ("eager-fp32", "eager", "compile", "native")
    """eager-fp32, eager, compile (torch.compile of the UNet), compile-graphs (the same with mode reduce-overhead):
    diffusers' pipeline. native, tensorrt, tensorrt_rtx: engines of this package."""
    size: Count = 512
    """Pixels a side."""
    steps: Count = 50
    """Denoising steps of an image."""
    img2img: bool = False
    """Time image to image, too (strength 0.8)."""
    dtype: DtypeOfDevice = None
    """Of every system but eager-fp32; by default fp16 on a GPU and fp32 on a CPU."""
    unet_rounds: Count = 20
    """Single UNet calls timed of each system."""
    seed: Seed = 0
    """Of the noise that images start from."""
    picture: Picture = None
    """Write the reference's image and the last system's as one PNG."""


@dataclass(frozen=True)
class BenchQwen(BenchOptions):
    """Time Qwen-Image end to end: baseline, faster transformer, faster autoencoder, both; systems alternating.

    Random weights of the published sizes and random prompt embeddings (the text encoder is not part of it). Exit
    status 1 if an image disagrees with the baseline's.
    """

    size: Count = 1024
    """Pixels a side."""
    steps: Count = 4
    """Denoising steps of an image."""
    layers: Number = None
    """Of the transformer; by default all of them, of a tiny one 2. Fewer take less memory."""
    tiny: bool = False
    """A tiny pipeline, for machines without a GPU."""
    transformer: tuple[Literal["compile", "native"], ...] = ("compile", "native")
    """Systems that run the transformer, in addition to eager."""
    vae: str = "native"
    """The autoencoder's engine, or the path of its JSON configuration."""
    edit: bool = False
    """QwenImageEditPipeline: an image is encoded, too."""
    tokens: Count = 128
    """Of the prompt."""


@dataclass(frozen=True)
class TextToImage:
    """A prompt to a PNG that carries its parameters, with Stable Diffusion 1."""

    sd_dir: str
    """A diffusers folder or hub name; "random" is version 1.4's configuration with random weights."""
    prompt: str = "a photo of an astronaut riding a horse on mars"
    """What to show."""
    negative_prompts: str = ""
    """What not to show."""
    out_img_path: Annotated[Path, Written(suffix=".png")] = Path("out/image.png")
    """The image; a .png, which carries the parameters."""
    engine: ImageEngine = "native"
    """Of every component."""
    use_trt: bool = False
    """The UNet on TensorRT, whatever --engine says."""
    use_pipeline: bool = False
    """diffusers' own pipeline as well: its image is saved as NAME.pipeline.png and compared."""
    steps: Count = 50
    """Denoising steps."""
    guidance: Annotated[float, Within(0)] = 7.5
    """Scale of classifier-free guidance: how strongly the prompt counts."""
    seed: Seed = 0
    """Of the noise."""
    height: Number = None
    """Pixels, a multiple of 8, with --width. Default: the checkpoint's size; in img2img the image's, reduced to
    multiples of 8."""
    width: Number = None
    """Pixels, a multiple of 8, with --height."""
    scheduler: str | None = None
    """A diffusers class, like DDIMScheduler, instead of the checkpoint's."""
    dtype: DtypeOfDevice = None
    """By default fp16 on a GPU and fp32 on a CPU."""
    device: str = "auto"
    """cpu, cuda or cuda:N."""
    strict: bool = False
    """A component that falls back to another engine is an error."""
    latency_json: OutputFile = None
    """JSON file with the latency breakdown."""
    calls: Count = 1
    """Number of images to time; the first one is a warm-up and does not count if there are more."""


@dataclass(frozen=True, kw_only=True)
class ImageToImage(TextToImage):
    """An image and a prompt to a PNG that carries its parameters, with Stable Diffusion 1."""

    in_img_path: Path
    """The image to start from."""
    strength: Annotated[float, Within(0, 1)] = 0.8
    """How much of it may change, 0 to 1; that share of the steps runs."""


@dataclass(frozen=True)
class Precision:
    """Compare a model in float32 with the same model in BF16 or FP16: dtypes, ranges, memory, latency, agreement.

    Exit status 1 if a module overflows that is not kept in float32.
    """

    model: Annotated[str, Argument("MODEL", positional=True)]
    """A diffusers folder, or a configuration with random weights: qwen-vae, wan22-vae, sd-vae, sd-unet,
    qwen-text-encoder or tiny- and one of these."""
    dtype: Literal["bf16", "fp16"] = "bf16"
    """What float32 is compared with."""
    keep_fp32: tuple[str, ...] = ()
    """Names of modules (patterns) that stay in float32."""
    auto_fp32: bool = False
    """Keep in float32 whatever overflows, as found in the float32 run."""
    size: Count = 512
    """Pixels a side of the example."""
    tokens: Count = 256
    """Tokens of the example, for a text encoder."""
    calls: Count = 10
    """Timed calls."""
    device: str = "auto"
    """cpu, cuda or cuda:N."""
    modules: Annotated[int, Within(0)] = 12
    """Rows of the table: the modules with the largest values."""
    output: OutputFile = None
    """JSON file with every module."""
