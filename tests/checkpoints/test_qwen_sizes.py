"""What the shapes of Qwen3-VL's vision tower do not show."""

from __future__ import annotations

import pytest

from vla_accel.checkpoints.qwen import vision_config
from vla_accel.errors import ConfigError
from vla_accel.nn.qwen_vision import QwenVisionConfig


def tower(width: int, depth: int, levels: int = 3) -> QwenVisionConfig:
    """The sizes read from the shapes of a tower."""
    shapes = {
        "patch_embed.proj.weight": (width, 3, 2, 16, 16), "pos_embed.weight": (2304, width),
        "merger.linear_fc2.weight": (4096, 4 * width), "blocks.0.mlp.linear_fc1.weight": (4304, width),
    }  # fmt: skip
    return vision_config(lambda name, axes: shapes[name], {"blocks.": depth, "deepstack_merger_list.": levels}.get, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("width", "depth", "heads", "deepstack"), [(1024, 24, 16, (5, 11, 17)), (1152, 27, 16, (8, 16, 24))]
)
def test_published_towers(width: int, depth: int, heads: int, deepstack: tuple[int, ...]) -> None:
    """As transformers' configurations of Qwen3-VL-2B and 8B have them."""
    read = tower(width, depth)
    assert (read.heads, read.deepstack, read.merge) == (heads, deepstack, 2)


@pytest.mark.parametrize("sizes", [(1152, 24, 3), (1280, 32, 3), (1024, 24, 2)])
def test_another_tower_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=f"got {sizes[1]} of {sizes[0]} with {sizes[2]}"):
        tower(*sizes)
