"""Write small GR00T N1.7 checkpoints, in Isaac-GR00T's layout and as lerobot saves them, and lerobot's own answers.

Run it with an interpreter that has lerobot 0.6.1 installed (CONTRIBUTING names the packages)::

    python tests/references/make_groot_reference.py --out DIR [--full]

With random weights at a small size it writes:

- ``DIR/isaac/``: config.json, two shards with their index, processor_config.json, statistics.json, embodiment_id.json,
  and a small ``tokenizer.json`` in place of Qwen's; ``DIR/lerobot/``: the same weights as ``policy.save_pretrained``
  and the two processors' ``save_pretrained`` write them, nothing edited.
- ``DIR/model.safetensors``: ``{case}.{pixels,tokens,state,noise}`` as lerobot's model got them (text tokens alone) and
  ``{case}.steps{n}`` as it answered, float32 (B, horizon, 132), normalised; ``{case}.autocast_steps{n}``: with these
  weights under autocast to BF16, as lerobot's policy calls it, where what layers add up stays in float32;
  ``{case}.bf16_steps{n}``: with weights in BF16 besides, as Isaac-GR00T loads them. ``rtc.*``: a call with a previous
  chunk.
- ``DIR/robot.npz``: whole observations (``images`` uint8 (N, views, H, W, 3), ``state``, ``noise``) and what lerobot's
  processors made of them: ``text{i}``, ``patches{i}``, and ``actions`` (N, rows, 7); ``tasks.json``: the instructions.

- ``DIR/kept.json``: names and shapes of lerobot's tensors and some numbers of its answers, which
  tests/nn/groot_reference.json holds.

``--full`` writes the published size instead, and no checkpoint but ``DIR/isaac`` (11 GB of memory, 7 of disk).

All else is float32 on the CPU. This file imports nothing of vla_accel on purpose. The chat template is written here
from Qwen's published form: the file of the gated tokenizer is not to be had.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from groot_weights import draw, weight
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.groot import groot_n1_7, processor_groot
from lerobot.policies.groot.configuration_groot import GrootConfig
from lerobot.policies.groot.modeling_groot import GrootPolicy
from safetensors.torch import save_file

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>", "<unk>")  # fmt: skip
TASKS = ("Pick up the black bowl!", "put the wine_bottle on the rack", "open it")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)
GRID = (2, 3)
STEPS = (4, 2)
TAG = "libero_sim"
STATE = {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 2}
ACTION = {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 1}
ROWS = 6


def small_tokenizer() -> Any:
    """Words and letters as tokens, in addition to the special ones."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    words = sorted({w for t in TASKS for w in t.lower().replace("!", "").split()} | {"user", "\n", "the", "task"})
    vocabulary = {w: i for i, w in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" "), "removed"),
            pre_tokenizers.Split(Regex(r"\n|[A-Za-z_]+|[.,]"), "isolated"),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2], unk_token="<unk>",
        extra_special_tokens={"image_token": SPECIAL[5], "video_token": SPECIAL[6], "vision_bos_token": SPECIAL[3],
                              "vision_eos_token": SPECIAL[4]},
        chat_template=TEMPLATE,
    )  # fmt: skip


def small_backbone() -> Any:
    """Qwen3-VL at the small size: 64 wide vision heads as in the published one, and its shares of everything."""
    ids = {n: SPECIAL.index(f"<|{n}|>") for n in ("image_pad", "video_pad", "vision_start", "vision_end")}
    return transformers.Qwen3VLConfig(
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"], tie_word_embeddings=True,
        text_config={
            "attention_bias": False, "head_dim": 32, "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 112,
            "max_position_embeddings": 4096, "model_type": "qwen3_vl_text", "num_attention_heads": 4,
            "num_hidden_layers": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
            "rope_theta": 5000000, "tie_word_embeddings": True, "vocab_size": 48,
        },
        vision_config={
            "deepstack_visual_indexes": [0, 1, 2], "depth": 4, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 128,
            "in_channels": 3, "intermediate_size": 144, "model_type": "qwen3_vl", "num_heads": 2,
            "num_position_embeddings": 81, "out_hidden_size": 128, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    )  # fmt: skip


SMALL = {
    "select_layer": 4, "backbone_embedding_dim": 128, "hidden_size": 56, "input_embedding_dim": 96, "max_seq_len": 24,
    "action_horizon": 8, "max_num_embodiments": 5, "use_relative_action": False,
    "diffusion_model_cfg": {
        "positional_embeddings": None, "num_layers": 8, "num_attention_heads": 2, "attention_head_dim": 48,
        "norm_type": "ada_norm", "dropout": 0.2, "final_dropout": True, "output_dim": 56,
        "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {
        "positional_embeddings": None, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64,
        "dropout": 0.2, "final_dropout": True,
    },
}  # fmt: skip


class Kept(torch.nn.Linear):
    """A float32 layer whose weights, all of which BF16 holds, lie in memory as BF16 if there are many."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None):
        self.narrow = in_features * out_features >= 1 << 20
        super().__init__(in_features, out_features, bias, device, torch.bfloat16 if self.narrow else dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(x, self.weight.float(), bias)


def build(full: bool) -> Any:
    """lerobot's model, float32, random, no weight zero or one."""
    small = mock.patch.object(groot_n1_7, "_cosmos_reason2_qwen3_vl_config", small_backbone)
    if full:
        with mock.patch.object(torch.nn, "Linear", Kept):
            model = groot_n1_7.GR00TN17(groot_n1_7.GR00TN17Config(), load_backbone_weights=False)
    else:
        with small:
            model = groot_n1_7.GR00TN17(groot_n1_7.GR00TN17Config(**SMALL), load_backbone_weights=False)
    model = model.eval().requires_grad_(False)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not (isinstance(module, Kept) and module.narrow):
                parameter.data = parameter.data.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Values that BF16 holds, as published checkpoints have.
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))).bfloat16())
    return model


def statistics(rng: np.random.Generator) -> dict[str, Any]:
    """Unequal for every number; one state has no range."""

    def of(groups: dict[str, int]) -> dict[str, Any]:
        table = {}
        for name, count in groups.items():
            low, high = rng.uniform(-1.5, -0.5, count), rng.uniform(0.5, 1.5, count)
            entry = {"min": low - 0.1, "max": high + 0.1, "q01": low, "q99": high, "mean": (low + high) / 2,
                     "std": (high - low) / 4}  # fmt: skip
            table[name] = {k: np.float32(v).tolist() for k, v in entry.items()}
        return table

    table = {"state": of(STATE), "action": of(ACTION)}
    table["state"]["roll"]["q99"] = table["state"]["roll"]["q01"]
    return {TAG: table, "new_embodiment": {"state": of({"arm": 3}), "action": of({"arm": 3})}}


def write_isaac(model: Any, folder: Path, tokenizer: Any) -> None:
    """A model in BF16, as it is published."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: getattr(model.config, k) for k in groot_n1_7.GR00T_N1_7_DEFAULTS}
    content = {"architectures": ["Gr00tN1d7"], "model_type": "Gr00tN1d7", **config}
    (folder / "config.json").write_text(json.dumps(content, indent=1))
    state = model.state_dict()
    names, files = sorted(state), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for file, half in zip(files, halves, strict=True):
        save_file({n: state[n].clone() for n in half}, str(folder / file))  # tied ones lie in one place
    table = {n: file for file, half in zip(files, halves, strict=True) for n in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    absolute = {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
    modalities = {
        TAG: {
            "video": {"delta_indices": [0], "modality_keys": ["image", "wrist_image"]},
            "state": {"delta_indices": [0], "modality_keys": list(STATE)},
            "action": {"delta_indices": list(range(ROWS)), "modality_keys": list(ACTION),
                       "action_configs": [absolute] * len(ACTION)},
            "language": {"delta_indices": [0], "modality_keys": ["annotation.human.action.task_description"]},
        }
    }  # fmt: skip
    kwargs = {
        "modality_configs": modalities, "use_percentiles": True, "clip_outliers": True, "formalize_language": True,
        "use_albumentations": True, "image_target_size": [256, 256], "image_crop_size": [230, 230],
        "shortest_image_edge": 256, "crop_fraction": 0.95, "max_action_horizon": model.config.action_horizon,
        "max_state_dim": 132, "max_action_dim": 132, "use_relative_action": False, "letter_box_transform": False,
    }  # fmt: skip
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Gr00tN1d7Processor", "processor_kwargs": kwargs}, indent=1)
    )
    (folder / "statistics.json").write_text(json.dumps(statistics(np.random.default_rng(1)), indent=1))
    (folder / "embodiment_id.json").write_text(json.dumps({TAG: 2, "new_embodiment": 4}))
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))


def flat_patches(pixels: torch.Tensor) -> torch.Tensor:
    """(N, 3, H, W) to Qwen's rows (N * patches, 3 * 2 * 16 * 16), each frame twice."""
    count, _, height, width = pixels.shape
    frames = pixels[:, None].expand(-1, 2, -1, -1, -1)
    rows, columns = height // 32, width // 32
    split = frames.reshape(count, 2, 3, rows, 2, 16, columns, 2, 16)
    return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(count * rows * columns * 4, -1)


@torch.no_grad()
def answer(model: Any, pixels: torch.Tensor, text: torch.Tensor, state: torch.Tensor, noise: torch.Tensor,
           steps: int, rtc: dict[str, Any] | None = None) -> torch.Tensor:  # fmt: skip
    """One call of equal prompts: pixels (B, V, 3, H, W), text tokens (B, L) with the images' slots left out."""
    batch, views = pixels.shape[:2]
    image = model.backbone.model.config.image_token_id
    slots = torch.full((batch, pixels.shape[3] * pixels.shape[4] // 1024), image)
    parts = [text[:, :3]]
    for view in range(views):
        parts += [text[:, 3 + 2 * view : 4 + 2 * view], slots, text[:, 4 + 2 * view : 5 + 2 * view]]
    ids = torch.cat([*parts, text[:, 3 + 2 * views :]], 1)
    grid = torch.tensor([[1, pixels.shape[3] // 16, pixels.shape[4] // 16]] * (batch * views))
    given: dict[str, Any] = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": flat_patches(pixels.flatten(0, 1)),
        "image_grid_thw": grid, "state": state[:, None], "embodiment_id": torch.full((batch,), 2),
    }  # fmt: skip
    options = None
    if rtc is not None:
        given["action"], options = rtc["previous"], rtc["options"]
    model.action_head.num_inference_timesteps = steps
    with mock.patch.object(torch, "randn", lambda *a, **k: noise.clone()):
        return model.get_action(given, options)["action_pred"]


def ask(model: Any, case: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """One call, or one a row where prompts are not of one length."""
    if len(case["lengths"].unique()) == 1:
        return answer(model, case["pixels"], case["tokens"], case["state"], case["noise"], steps)
    rows = [
        answer(model, case["pixels"][r : r + 1], case["tokens"][r : r + 1, :n], case["state"][r : r + 1],
               case["noise"][r : r + 1], steps)
        for r, n in enumerate(case["lengths"].tolist())
    ]  # fmt: skip
    return torch.cat(rows)


def bf16_cases(model: Any, cases: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The answers of a model in BF16, to what float32 was asked."""
    found = {}
    for key in [k for k in cases if ".autocast_steps" in k]:
        name, _, steps = key.partition(".autocast_steps")
        case = {k.removeprefix(f"{name}."): v for k, v in cases.items() if k.startswith(f"{name}.")}
        with torch.autocast("cpu", torch.bfloat16):
            found[f"{name}.bf16_steps{steps}"] = ask(model, case, int(steps)).float().contiguous()
    return found


def model_cases(model: Any, full: bool) -> dict[str, torch.Tensor]:
    """Batch 1 and 3, one view and two; rows of other lengths are called alone: lerobot lets padding leak between."""
    ids = {n: SPECIAL.index(f"<|{n}|>") for n in ("vision_start", "vision_end")}
    if full:
        ids = {"vision_start": 151652, "vision_end": 151653}
    vocabulary, horizon = model.backbone.language_model.embed_tokens.num_embeddings, model.config.action_horizon
    tensors: dict[str, torch.Tensor] = {}

    def case(name: str, batch: int, views: int, lengths: tuple[int, ...], grid: tuple[int, int]) -> None:
        def drawn(what: str, *shape: int) -> torch.Tensor:
            return torch.from_numpy(draw(f"{name}.{what}", *shape))

        words = drawn("tokens", batch, max(lengths)).abs() * 1e4
        given = {
            "pixels": drawn("pixels", batch, views, 3, 32 * grid[0], 32 * grid[1]).clamp(-1, 1),
            "tokens": len(SPECIAL) + words.long() % (vocabulary - len(SPECIAL)),
            "state": drawn("state", batch, 132),
            "noise": drawn("noise", batch, horizon, 132),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
        }
        for view in range(views):
            given["tokens"][:, 3 + 2 * view], given["tokens"][:, 4 + 2 * view] = ids["vision_start"], ids["vision_end"]
        counts = STEPS[:1] if full else STEPS
        answers = {f"steps{n}": ask(model, given, n) for n in counts}
        with torch.autocast("cpu", torch.bfloat16):
            answers |= {f"autocast_steps{n}": ask(model, given, n).float() for n in counts}
        given |= answers
        tensors.update({f"{name}.{k}": v.contiguous() for k, v in given.items()})

    if full:
        case("batch1", 1, 2, (21,), (8, 8))
        case("batch3", 3, 2, (20, 20, 20), (8, 8))
        case("missing camera", 1, 1, (17,), (8, 8))
        case("padded", 3, 2, (21, 14, 18), (8, 8))
        return tensors
    case("batch1", 1, 2, (15,), GRID)
    case("batch3", 3, 2, (14, 14, 14), (2, 2))
    case("missing camera", 1, 1, (11,), (3, 2))
    case("padded", 3, 2, (15, 11, 13), GRID)
    given = {n: tensors[f"batch1.{n}"] for n in ("pixels", "tokens", "state", "noise")}
    previous = torch.from_numpy(draw("rtc.previous", 1, 5, 132)).clamp(-1, 1)
    options = {"action_horizon": 5, "rtc_overlap_steps": 5, "rtc_frozen_steps": 2, "rtc_ramp_rate": 6.0}
    rtc = {"previous": previous, "options": options}
    found = answer(model, given["pixels"], given["tokens"], given["state"], given["noise"], 4, rtc)
    return {**tensors, "rtc.previous": previous, "rtc.steps4": found.contiguous()}


def small_processor(tokenizer: Any) -> Any:
    """Qwen's processor with a small tokenizer."""
    image_processor = transformers.Qwen2VLImageProcessor(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
    )  # fmt: skip
    processor = transformers.Qwen3VLProcessor(
        image_processor=image_processor, tokenizer=tokenizer, video_processor=transformers.Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE,
    )  # fmt: skip
    processor.tokenizer.padding_side = "left"
    return processor


def config_of(folder: Path) -> Any:
    """The config of lerobot's policy around the checkpoint in Isaac-GR00T's layout."""
    features = {
        f"observation.images.{n}": PolicyFeature(FeatureType.VISUAL, (3, 256, 256)) for n in ("image", "image2")
    }
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (8,))
    return GrootConfig(
        input_features=features, output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        base_model_path=str(folder), embodiment_tag=TAG, device="cpu", use_bf16=False, chunk_size=8, n_action_steps=6,
    )  # fmt: skip


def robot_cases(folder: Path, out: Path, tokenizer: Any) -> dict[str, Any]:
    """Whole observations through lerobot's own pipelines on the raw checkpoint, which are saved with the policy."""
    processor, config = small_processor(tokenizer), config_of(folder)
    with (
        mock.patch.object(groot_n1_7, "_cosmos_reason2_qwen3_vl_config", small_backbone),
        mock.patch.object(processor_groot, "_build_n1_7_processor", lambda name: processor),
    ):
        policy = GrootPolicy(config).eval()
        preprocess, postprocess = processor_groot.make_groot_pre_post_processors(config)
        policy.save_pretrained(out)
        preprocess.save_pretrained(out)
        postprocess.save_pretrained(out)
        shutil.copy(folder / "tokenizer.json", out / "tokenizer.json")
        rng = np.random.default_rng(2)
        images = rng.integers(0, 256, (len(TASKS), 2, 256, 256, 3), dtype=np.uint8)
        images[1:] = np.repeat(np.repeat(images[1:, :, ::16, ::16], 16, 2), 16, 3)
        wide = np.repeat(np.repeat(rng.integers(0, 256, (2, 30, 40, 3), dtype=np.uint8), 16, 1), 16, 2)
        state = rng.uniform(-1.6, 1.6, (len(TASKS) + 1, 8)).astype(np.float32)
        noise = rng.standard_normal((len(TASKS) + 1, 8, 132)).astype(np.float32)
        found: dict[str, Any] = {"images": images, "wide": wide, "state": state, "noise": noise}
        actions = []
        for i, task in enumerate((*TASKS, "")):
            pair = images[i] if i < len(TASKS) else wide
            batch = {
                f"observation.images.{n}": torch.from_numpy(p).permute(2, 0, 1)
                for n, p in zip(("image", "image2"), pair, strict=True)
            }
            batch = preprocess({**batch, "observation.state": torch.from_numpy(state[i]), "task": task})
            ids = batch["input_ids"][0]
            found[f"text{i}"] = ids[ids != SPECIAL.index("<|image_pad|>")].numpy()
            found[f"patches{i}"] = batch["pixel_values"].numpy()[:: 1 + 7 * (i > 0)]
            found[f"state{i}"] = batch["state"].numpy()
            with mock.patch.object(torch, "randn", lambda *a, i=i, **k: torch.from_numpy(noise[i : i + 1])):
                raw = policy._groot_model.get_action(policy._filter_groot_inputs(batch, include_action=False))
            actions.append(postprocess(raw["action_pred"])[0].numpy())
    found["actions"] = np.stack(actions)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--full", action="store_true", help="the published size")
    args = parser.parse_args()
    if not args.full:
        torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = build(args.full), small_tokenizer()
    cases = model_cases(model, args.full)
    versions = {n: importlib.metadata.version(n) for n in ("lerobot", "torch", "transformers")}
    # In its own place: at full size there is no room for both.
    model = model.bfloat16()
    save_file(cases | bf16_cases(model, cases), str(args.out / "model.safetensors"), versions)
    write_isaac(model, args.out / "isaac", tokenizer)
    if not args.full:
        shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
        answers = {n: v[..., ::3, :4].numpy().round(7).tolist() for n, v in cases.items() if ".steps" in n}
        (args.out / "kept.json").write_text(json.dumps({"shapes": shapes, "answers": answers}) + "\n")
        np.savez(args.out / "robot.npz", **robot_cases(args.out / "isaac", args.out / "lerobot", tokenizer))
        (args.out / "tasks.json").write_text(json.dumps(TASKS))


if __name__ == "__main__":
    main()
