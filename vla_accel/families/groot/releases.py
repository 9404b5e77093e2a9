"""GR00T's releases: how each names its tensors, writes its prompts and numbers its embodiments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vla_accel.errors import CheckpointError
from vla_accel.families.qwen import TOKENIZER
from vla_accel.nn.qwen_language import Arrangement
from vla_accel.transforms.tokenizer import Tokenizer

LIBERO_TAGS = ("libero_sim", "libero_panda")
"""Tags of LIBERO's robot, whose gripper Isaac-GR00T converts."""
EAGLE = "lerobot/eagle2hg-processor-groot-n1p5"
"""Eagle's tokenizer on the hub: Qwen3's with <img>, </img> and <IMG_CONTEXT>."""
_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"


@dataclass(frozen=True)
class Prompt:
    """A release's prompts.

    Attributes:
        template: With {images} and {text}.
        view: The text of one image, with {number} from 1.
        slot: The token in `view` that the image tokens replace.
        listed: Whether the instruction is written as Python prints a list.
    """

    template: str
    view: str
    slot: str
    listed: bool = False

    def ids(self, text: str, images: int, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return a prompt's tokens with a slot for each image, and the places of the slots."""
        views = "".join(self.view.format(number=number + 1) for number in range(images))
        written = self.template.format(images=views, text=str([text]) if self.listed else text)
        ids, slot = tokenizer.encode(written, add_bos=False), tokenizer.encode(self.slot, add_bos=False)
        places = [place for place, token in enumerate(ids) if [token] == slot]
        if len(slot) != 1 or len(places) != images:
            raise CheckpointError(
                f"tokenizer: expected {self.slot} as one token, {images} of them in a prompt of {images} images, got "
                f"{slot} and {len(places)}: another model's tokenizer"
            )
        return ids, places

    def arrangement(self, tokenizer: Tokenizer) -> Arrangement:
        """Return where the images are in a prompt. Raises CheckpointError for another model's tokenizer."""
        ids, (first, last) = self.ids("go", 2, tokenizer)
        text_first = self.template.index("{text}") < self.template.index("{images}")
        edge = len(ids) - 1 - last if text_first else first
        return Arrangement(edge, last - first - 1, text_first, self.slot != "<|image_pad|>")


@dataclass(frozen=True, eq=False)
class Release:
    """A release of GR00T.

    Attributes:
        name: Its number.
        family: The name of its family here.
        kinds: Values of `model_type` in config.json, in lower case.
        vision, language: Prefixes of its tensors, `connector` of those between tower and language model.
        head: The stored name of the language model's head, which repeats the token table.
        prompt: Its prompts.
        tokenizer: The name of its tokenizer on the hub.
        embodiments: Isaac-GR00T's own numbers, for folders without embodiment_id.json and for tags that it lacks.
        pixels: Least and most pixels of an image; None for Qwen3-VL's.
        bounded: Whether normalised actions are clipped to [-1, 1].
    """

    name: str
    family: str
    kinds: tuple[str, ...]
    vision: str
    connector: str
    language: str
    head: str
    prompt: Prompt
    tokenizer: str
    embodiments: Mapping[str, int] = field(default_factory=dict)
    pixels: tuple[int, int] | None = None
    bounded: bool = True

    @property
    def title(self) -> str:
        return f"GR00T {self.name}"

    @property
    def backbone(self) -> str:
        """Isaac-GR00T's name of the kind of vision-language model."""
        return "qwen" if self is N17 else "eagle"


N17 = Release(
    "N1.7",
    "groot",
    ("gr00tn1d7", "gr00t_n1d7", "gr00t_n1_7"),
    "backbone.model.model.visual.",
    "backbone.model.model.visual.merger.",
    "backbone.model.model.language_model.",
    "backbone.model.lm_head.weight",
    Prompt(
        "<|im_start|>user\n{images}{text}<|im_end|>\n", "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"
    ),
    TOKENIZER,
    {
        "simpler_env_google": 0,
        "simpler_env_widowx": 1,
        "libero_sim": 2,
        "new_embodiment": 10,
        "robocasa_panda_omron": 10,
        "robocasa_gr1_tabletop": 10,
        "unitree_g1_sonic": 11,
        "oxe_droid_relative_eef_relative_joint": 24,
        "real_g1_relative_eef_relative_joints": 25,
        "unitree_g1_full_body_with_waist_height_nav_cmd": 25,
        "real_r1_pro_sharpa_relative_eef": 26,
        "real_r1_pro_sharpa_relative_eef_human": 26,
        "real_r1_pro_sharpa_relative_eef_maxinsights": 26,
        "real_r1_pro_sharpa_relative_eef_mecka": 26,
        "xdof_relative_eef_relative_joint": 27,
        "xdof_relative_eef_relative_joint_subtask": 27,
    },
)
_VIEW = "<image {number}><img><IMG_CONTEXT></img>"
N16 = Release(
    "N1.6",
    "groot_n16",
    ("gr00tn1d6", "gr00t_n1d6", "gr00t_n1_6"),
    "backbone.model.vision_model.vision_model.",
    "backbone.model.mlp1.",
    "backbone.model.language_model.model.",
    "backbone.model.language_model.lm_head.weight",
    Prompt(_SYSTEM + "{text}{images}<|im_end|>\n", _VIEW, "<IMG_CONTEXT>"),
    EAGLE,
    {
        "oxe_google": 0,
        "oxe_widowx": 1,
        "libero_panda": 2,
        "unitree_g1": 8,
        "new_embodiment": 10,
        "robocasa_panda_omron": 13,
        "oxe_droid": 16,
        "gr1": 20,
        "behavior_r1_pro": 24,
    },
    (4 * 28 * 28, 4096 * 28 * 28),
)
N15 = Release(
    "N1.5",
    "groot_n15",
    ("gr00t_n1_5", "gr00tn1d5", "gr00t_n1d5"),
    "backbone.eagle_model.vision_model.vision_model.",
    "backbone.eagle_model.mlp1.",
    "backbone.eagle_model.language_model.model.",
    "backbone.eagle_model.language_model.lm_head.weight",
    Prompt(
        _SYSTEM + "{images}{text}<|im_end|>\n<|im_start|>assistant\n", _VIEW, "<IMG_CONTEXT>", listed=True
    ),
    EAGLE,
    {
        "so100": 2,
        "unitree_g1": 3,
        "oxe_droid": 17,
        "gr1": 24,
        "agibot_genie1": 26,
        "new_embodiment": 31,
    },
    (1, 4096 * 28 * 28),
    bounded=False,
)  # fmt: skip
RELEASES = (N17, N16, N15)
LEROBOT = "_groot_model."
"""lerobot's prefix of the tensors' names."""
_SIGN = "action_head.model.proj_out_1.weight"
# A tensor that only GR00T's checkpoints have.


def prefix_of(names: Iterable[str]) -> str | None:
    """Return the prefix of GR00T's tensor names; None if these are not GR00T's tensors."""
    known = set(names)
    return next((prefix for prefix in ("", LEROBOT) if prefix + _SIGN in known), None)


def release_of(names: Iterable[str], content: Mapping[str, Any] | None = None) -> Release | None:
    """Return the release of a checkpoint, by its tensors' names, else by the base in lerobot's config.json; None if
    neither shows it."""
    known = list(names)
    prefix = prefix_of(known)
    for release in RELEASES if prefix is not None else ():
        if any(name.startswith(f"{prefix}{release.language}") for name in known):
            return release
    base = str((content or {}).get("base_model_path")).lower()
    match = re.search(r"gr00t.n1[._d]?([5-7])(?!\d)", base)
    return next((release for release in RELEASES if match and release.name == f"N1.{match[1]}"), None)


def model_type(content: Mapping[str, Any]) -> str:
    """Return the `model_type` of a config.json in lower case, empty if it has none."""
    value = content.get("model_type")
    return value.lower() if isinstance(value, str) else ""
