"""lerobot's folders of VLA-JEPA: the network's sizes, its weights, and the robot's transforms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import compare_sizes, fitted
from vla_accel.checkpoints.lerobot import Processors, buffers, denoising_steps, read_processors, read_settings, required
from vla_accel.checkpoints.lerobot_settings import BEFORE, BINARIZE, CLIP, PREPARE, SNAP
from vla_accel.checkpoints.qwen import (
    TRANSFORMER,
    language_config,
    language_pieces,
    transformer_pieces,
    vision_config,
    vision_pieces,
)
from vla_accel.checkpoints.stacks import Shapes, depth_of, shapes_by_name
from vla_accel.checkpoints.weights import Piece, SafetensorsWeights, Weights, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.overrides import check_vocabulary, resized, robot_of, transforms_of
from vla_accel.families.qwen import TOKENIZER
from vla_accel.families.vla_jepa.network import Size, VlaJepa, VlaJepaConfig
from vla_accel.families.vla_jepa.transforms import Gripper, VlaJepaProcessor
from vla_accel.nn.dit import DitConfig
from vla_accel.nn.qwen_language import QwenConfig
from vla_accel.nn.qwen_vision import QwenVisionConfig
from vla_accel.transforms.robots import Preset
from vla_accel.transforms.tokenizer import LineTokenizer, Tokenizer, load_line_tokenizer


@dataclass(frozen=True)
class StoredNames:
    """Tensor names of Qwen3-VL and of the transformer, by their prefixes."""

    qwen: str
    action: str

    @property
    def vision(self) -> str:
        return self.qwen + "model.visual."

    @property
    def language(self) -> str:
        return self.qwen + "model.language_model."

    @property
    def tables(self) -> tuple[str, str]:
        """The token table under two names; files have one or both."""
        return self.language + "embed_tokens.weight", self.qwen + "lm_head.weight"

    @property
    def dead(self) -> tuple[str, ...]:
        """Tensors that nothing reads: the transformer reads the input of the last norm."""
        return (*self.tables, self.language + "norm.weight")

    def table(self, shapes: Mapping[str, object]) -> str:
        """The name of the token table in a file."""
        return next((name for name in self.tables if name in shapes), self.tables[0])

    def pieces(self, name: str, config: VlaJepaConfig) -> tuple[Piece, ...]:
        """Return the stored tensors that make up one canonical tensor, in order along its first axis."""
        part, _, rest = name.partition(".")
        if part == "embed":
            return (Piece(self.tables[0]),)
        if part == "vision":
            return vision_pieces(rest, self.vision)
        if part == "language":
            return language_pieces(rest, self.language, config.language)
        if rest.startswith("layers."):
            return transformer_pieces(rest, self.action + "model.", config.head.width)
        if rest in _TABLES:
            return (Piece(f"{self.action}{_TABLES[rest]}.weight"),)
        module, _, leaf = rest.partition(".")
        stored = _PROJECTIONS.get(module) or f"model.{TRANSFORMER[module]}"
        return (Piece(f"{self.action}{stored}.{leaf}"),)

    def backbone(self, shapes: Shapes, path: Path) -> tuple[QwenVisionConfig, QwenConfig]:
        """Return the sizes of Qwen3-VL. Raises CheckpointError."""
        shape = shapes_by_name(shapes, "", str(path.parent))
        layers = depth_of(shapes, self.language + "layers.")
        try:
            vision = vision_config(shape, lambda start: depth_of(shapes, start), self.vision)
            return vision, language_config(shape, self.language, self.table(shapes), depth=layers)
        except ConfigError as error:
            raise CheckpointError(f"checkpoint {path.parent}: {error}") from error

    def head(
        self, shapes: Shapes, head_dim: int, buckets: int, path: Path, *, state: bool = True, final: bool = True
    ) -> DitConfig:
        """Return the sizes of the transformer. Raises CheckpointError."""
        shape, inside = shapes_by_name(shapes, "", str(path.parent)), self.action + "model."
        first, width = inside + "transformer_blocks.0.", shape(inside + "proj_out_1.weight", 2)[1]
        try:
            return DitConfig(
                vl_width=shape(first + "attn1.to_k.weight", 2)[1], width=width,
                depth=depth_of(shapes, inside + "transformer_blocks."), heads=width // head_dim, head_dim=head_dim,
                mlp_dim=shape(first + "ff.net.0.proj.weight", 2)[0],
                hidden=shape(self.action + "action_decoder.layer1.weight", 2)[0], text_every=0, state=state,
                final=final,
                future=shape(self.action + "future_tokens.weight", 2)[0],
                longest_chunk=shape(self.action + "position_embedding.weight", 2)[0], buckets=buckets,
            )  # fmt: skip
        except ConfigError as error:
            raise CheckpointError(f"checkpoint {path.parent}: {error}") from error

    def action_dim(self, shapes: Shapes, path: Path) -> int:
        """Return the numbers of an action."""
        return shapes_by_name(shapes, "", str(path.parent))(self.action + "action_encoder.layer1.weight", 2)[1]


NAMES = StoredNames("model.qwen.model.", "model.action_model.")
SIGNS = (NAMES.action + "future_tokens.weight", NAMES.vision + "pos_embed.weight")
"""Two tensors that no other model has."""
_WORLD_MODEL = ("model.video_encoder.", "model.video_predictor.")
_PATCHES = "model.video_encoder.encoder.embeddings.patch_embeddings.proj.weight"
_PROJECTIONS = {
    "state_in": "state_encoder.layer1", "state_out": "state_encoder.layer2", "action_in": "action_encoder.layer1",
    "action_mix": "action_encoder.layer2", "action_out": "action_encoder.layer3", "decode_in": "action_decoder.layer1",
    "decode_out": "action_decoder.layer2",
}  # fmt: skip
_TABLES = {"action_positions": "position_embedding", "future": "future_tokens"}
_HEADS = {"DiT-B": 64, "DiT-L": 48, "DiT-test": 8}
"""Width of the transformer's heads, by lerobot's `action_model_type`."""


def load_folder(
    folder: Path, settings: PolicyConfig, weights: Weights | None = None
) -> tuple[VlaJepa, VlaJepaProcessor]:
    """Return the network and the robot's transforms (`Family.load`)."""
    path, weights = folder / "config.json", weights or SafetensorsWeights(folder)
    content = read_settings(path, ("vla_jepa",))
    saved = read_processors(folder, content, "antialias", weights)
    if any(camera.kind != "identity" for camera in saved.cameras):
        raise CheckpointError(f"{path}: normalization_mapping: VISUAL: expected IDENTITY, as lerobot's VLA-JEPA has it")
    config = resized(read_sizes(weights.shapes, content, path), settings)
    _check_image_size(saved, content, path)
    tokenizer = load_line_tokenizer(folder, settings.checkpoint.tokenizer, TOKENIZER)
    template, condition = _prompt(tokenizer, config, content, _tubelet(weights.shapes, content, path), path)
    check_vocabulary(tokenizer, config.language.vocab_size, settings)
    processor = transforms_of(
        VlaJepaProcessor, config, replace(saved, preset=trained_robot(saved.preset, settings)), tokenizer, settings,
        config=config, template=template, condition=condition, clipped=CLIP in saved.after,
        snap=_gripper(saved, SNAP, content, path), binarize=_gripper(saved, BINARIZE, content, path),
    )  # fmt: skip
    model = VlaJepa.empty(config)
    recipe = {name: NAMES.pieces(name, config) for name in model.state_dict()}
    recipe["embed.weight"] = (Piece(NAMES.table(weights.shapes)),)
    dead = [*NAMES.dead, *(n for n in weights.shapes if n.startswith(_WORLD_MODEL)), *buffers(weights.shapes)]
    return fitted(model, weights, recipe, str(folder), "VLA-JEPA", dead), processor


def trained_robot(saved: Preset, settings: PolicyConfig) -> Preset:
    """Return `overrides.robot_of`. Raises ConfigError also for relative actions that the folder does not have."""
    preset = robot_of(saved, settings)
    if (got := preset.delta_actions) != (expected := saved.delta_actions):
        raise ConfigError(f"preset.delta_actions: expected {[*expected]}, as the checkpoint was trained, got {[*got]}")
    return preset


def read_sizes(shapes: Shapes, content: Mapping[str, Any], path: Path) -> VlaJepaConfig:
    """Return the architecture that the shapes show, checked against config.json at `path`.

    Raises:
        CheckpointError: A tensor is missing, or weights and config.json contradict each other.
    """
    where = str(path.parent)
    shape = shapes_by_name(shapes, "", where)
    if (kind := content.get("action_model_type")) not in _HEADS:
        raise CheckpointError(f"{path}: action_model_type: expected {' or '.join(_HEADS)}, got {kind!r:.60}")
    head_dim = size_of(content, "action_attention_head_dim", path, _HEADS[kind])
    vision, language = NAMES.backbone(shapes, path)
    try:
        config = VlaJepaConfig(
            vision=vision,
            language=language,
            head=NAMES.head(shapes, head_dim, size_of(content, "action_num_timestep_buckets", path, 1000), path),
            condition=size_of(content, "num_embodied_action_tokens_per_instruction", path),
            resize=_image_size(content, path),
            action_dim=NAMES.action_dim(shapes, path),
            state_dim=shape(NAMES.action + "state_encoder.layer1.weight", 2)[1],
            action_horizon=size_of(content, "chunk_size", path),
            num_steps=denoising_steps(content, "num_inference_timesteps", path, 4),
        )
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {where}: {error}") from error
    head = config.head
    found = {
        "action_dim": config.action_dim, "state_dim": config.state_dim, "action_hidden_size": head.hidden,
        "action_num_layers": head.depth, "action_num_heads": head.heads,
        "num_embodied_action_tokens_per_instruction": head.future,
    }  # fmt: skip
    compare_sizes([(name, content.get(name), size) for name, size in found.items()], where)
    return config


def _image_size(content: Mapping[str, Any], path: Path) -> Size | None:
    value = content.get("resize_images_to")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(f"{path}: resize_images_to: expected a height and a width, got {value!r:.60}")
    height, width = (size_of({"resize_images_to": side}, "resize_images_to", path) for side in value)
    return height, width


def _check_image_size(saved: Processors, content: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if the step that prepares images, which lerobot's main branch saves, has another size."""
    size, expected = saved.before.get(PREPARE, {}).get("resize_to"), content.get("resize_images_to")
    if size is not None and size != expected:
        wanted = f"expected config.json's resize_images_to {expected}"
        raise CheckpointError(f"{path.with_name(BEFORE)}: {PREPARE}: resize_to: {wanted}, got {size!r:.60}")


def _gripper(saved: Processors, step: str, content: Mapping[str, Any], path: Path) -> Gripper | None:
    """Return the settings of a step, None if it is not there.

    lerobot 0.6.1 saves none and loads the usual ones, whatever config.json says.
    """
    if step not in saved.after:
        return None
    settings = saved.after[step]
    for field, name, usual in (("gripper_dim", "gripper_dim", 6), ("gripper_threshold", "threshold", 0.5)):
        if name not in settings and content.get(field, usual) != usual:
            raise CheckpointError(
                f"{path}: {field}: expected {usual}, which lerobot loads as the saved {step} step has none, got "
                f"{content[field]!r:.60}"
            )
    dim, threshold = settings.get("gripper_dim", 6), settings.get("threshold", 0.5)
    if type(dim) is not int or dim < 0 or not isinstance(threshold, (int, float)):
        raise CheckpointError(f"{path.parent}: {step}: expected a dimension and a threshold, got {settings}")
    return Gripper(dim, float(threshold)) if dim < saved.preset.action_dim else None


def _tubelet(shapes: Shapes, content: Mapping[str, Any], path: Path) -> int:
    """Return the video frames of one token: with the world model those of the video encoder's patches, as in lerobot,
    otherwise the setting."""
    if content.get("enable_world_model") and _PATCHES in shapes:
        return shapes_by_name(shapes, "", str(path.parent))(_PATCHES, 5)[2]
    return size_of(content, "jepa_tubelet_size", path)


def _prompt(
    tokenizer: Tokenizer, config: VlaJepaConfig, content: Mapping[str, Any], tubelet: int, path: Path
) -> tuple[str, int]:
    """Return the prompt with `{instruction}`, and the token whose outputs are read. Adds the prompt's own tokens to the
    tokenizer, as lerobot does."""
    template, action, embodied = (
        required(content, name, str, path)
        for name in ("prompt_template", "special_action_token", "embodied_action_token")
    )
    frames, count = (size_of(content, name, path) for name in ("num_video_frames", "num_action_tokens_per_timestep"))
    if not isinstance(tokenizer, LineTokenizer):
        raise CheckpointError(f"tokenizer: expected Qwen3-VL's tokenizer.json, got {type(tokenizer).__name__}")
    try:
        actions = [action.format(index) for index in range(4 * size_of(content, "chunk_size", path))]
        names = {"actions": "".join(token * count for token in actions[: frames // tubelet - 1])}
        text = template.format(instruction="{instruction}", e_actions=embodied * config.condition, **names)
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointError(f"{path}: prompt_template: expected a template of lerobot's, got {error!r}") from error
    if text.count("{instruction}") != 1 or text.count(embodied) != config.condition:
        raise CheckpointError(f"{path}: prompt_template: expected {{instruction}} and {{e_actions}}, got {template!r}")
    tokenizer.add([*actions, embodied])
    (token,) = tokenizer.encode(embodied, add_bos=False)
    return text, token
