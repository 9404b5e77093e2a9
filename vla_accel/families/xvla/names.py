"""Names of X-VLA's stored tensors: lerobot's of 0.6.1 and of earlier releases, and those of X-VLA's own project."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vla_accel.checkpoints.stacks import Shapes
from vla_accel.checkpoints.weights import Piece
from vla_accel.families.xvla.network import XvlaConfig

SIGN = "transformer.soft_prompt_hub.weight"
"""A tensor of every X-VLA, without lerobot's prefix."""
TOWER, TEXT = "vlm.vision_tower.", "vlm.language_model."
_PROJECTOR = "vlm.multi_modal_projector."
_HALF = {
    "conv": "conv{half}", "norm": "norm{half}", "qkv_proj": "{kind}_attn.qkv", "out_proj": "{kind}_attn.proj",
    "fc1": "ffn.fc1", "fc2": "ffn.fc2",
}  # fmt: skip
_NAMES = {
    r"^vision\.stages\.(\d+)\.": TOWER + r"convs.\1.",
    r"^layers\.": "transformer.blocks.", r"^(norm\.\w+)$": r"transformer.\1",
    r"(blocks\.\d+\.)layer_norm(\d)": r"\1norm\2", r"(blocks\.\d+\.)qkv_proj": r"\1attn.qkv",
    r"(blocks\.\d+\.)out_proj": r"\1attn.proj", r"(transformer\.blocks\.\d+\.)(fc\d)": r"\1mlp.\2",
    r"^position_embedding$": "transformer.pos_emb", r"^soft_prompts$": SIGN,
    r"^action_in\.": "transformer.action_encoder.", r"^action_out\.": "transformer.action_decoder.",
    r"^text_proj\.": "transformer.vlm_proj.", r"^view_proj\.": "transformer.aux_visual_proj.",
    r"^(row|column)s\.": _PROJECTOR + r"image_position_embed.\1_embeddings.",
    r"^frame$": _PROJECTOR + "visual_temporal_embed.pos_idx_to_embed",
    r"^projector\.": _PROJECTOR + "image_projection.", r"^projector_norm\.": _PROJECTOR + "image_proj_norm.",
    r"^encoder\.positions": TEXT + "encoder.embed_positions", r"^encoder\.norm": TEXT + "encoder.layernorm_embedding",
    r"^encoder\.layers\.(\d+)\.norm1": TEXT + r"encoder.layers.\1.self_attn_layer_norm",
    r"^encoder\.layers\.(\d+)\.norm2": TEXT + r"encoder.layers.\1.final_layer_norm",
    r"^encoder\.layers\.(\d+)\.out_proj": TEXT + r"encoder.layers.\1.self_attn.out_proj",
    r"^encoder\.layers\.": TEXT + "encoder.layers.",
}  # fmt: skip
"""Canonical names, as patterns, and lerobot's since 0.6.1."""
_OLD = {
    r"(convs\.\d+)\.conv\.": r"\1.proj.", r"(_block\.conv\d)\.": r"\1.fn.dw.",
    r"spatial_block\.norm1": "spatial_block.window_attn.norm",
    r"channel_block\.norm1": "channel_block.channel_attn.norm",
    r"_block\.norm2": "_block.ffn.norm", r"(window|channel)_attn\.(qkv|proj)": r"\1_attn.fn.\2",
    r"ffn\.(fc\d)": r"ffn.fn.net.\1", r"multi_modal_projector\.image_projection\.weight": "image_projection",
    r"multi_modal_projector\.": "", r"image_position_embed": "image_pos_embed",
    r"language_model\.": "language_model.model.",
}  # fmt: skip
"""What differs in the names of Florence-2's first implementation."""


def stored_name(name: str, *, old: bool) -> str:
    """Return the stored name of a canonical tensor, without lerobot's prefix and the domain's `.weight`."""
    name = re.sub(r"^vision\.stages\.(\d+)\.halves\.(\d+)\.(\w+)", _half, name)
    for pattern, stored in (*_NAMES.items(), *(_OLD.items() if old else ())):
        name = re.sub(pattern, stored, name)
    return name


def _half(match: re.Match[str]) -> str:
    stage, index, part = match[1], int(match[2]), match[3]
    block, kind = ("spatial", "window") if index % 4 < 2 else ("channel", "channel")
    return f"{TOWER}blocks.{stage}.{index // 4}.{block}_block." + _HALF[part].format(half=1 + index % 2, kind=kind)


@dataclass(frozen=True)
class StoredNames:
    """Names of stored tensors.

    Attributes:
        prefix: lerobot's before every name.
        old: Whether Florence-2 has the names of its first implementation, as up to lerobot 0.6.0.
        domain: The domain whose weights are read.
        table: The name of the token table.
    """

    prefix: str
    old: bool
    domain: int
    table: str

    @classmethod
    def of(cls, shapes: Shapes, domain: int) -> StoredNames:
        """Find out how the tensors of a file are named."""
        prefix = "model." if f"model.{SIGN}" in shapes else ""
        old = f"{prefix}vlm.image_projection" in shapes
        tables = [prefix + name for name in _tables(old)]
        return cls(prefix, old, domain, next((name for name in tables if name in shapes), tables[0]))

    def dead(self, shapes: Shapes) -> list[str]:
        """Tensors that nothing reads: the text decoder and its head, and the token table's other name."""
        text = re.escape(self.prefix + TEXT) + r"(model\.)?(decoder\.|lm_head\.|final_logits_bias)"
        return [n for n in shapes if re.match(text, n) or n in {self.prefix + table for table in _tables(self.old)}]

    def __call__(self, name: str) -> str:
        """Return the stored name of a canonical tensor that is no domain's."""
        return self.prefix + stored_name(name, old=self.old)

    def pieces(self, name: str, config: XvlaConfig) -> tuple[Piece, ...]:
        """Return the stored tensors that make up one canonical tensor, in order along its first axis."""
        part, stored = name.partition(".")[0], self(name)
        if name == "embed.weight":
            return (Piece(self.table),)
        if part == "encoder" and ".qkv_proj." in stored:
            names = (stored.replace("qkv_proj", f"self_attn.{letter}_proj") for letter in "qkv")
            return tuple(Piece(one, config.encoder.width) for one in names)
        own = ("action_in", "action_out", *(("text_proj", "view_proj") if config.own_projections else ()))
        if part in own:
            return (Piece(f"{stored}.weight", entry=self.domain),)
        entries = {"soft_prompts": self.domain, "frame": 0}
        frame, transposed = part == "position_embedding", part == "projector" and self.old
        return (Piece(stored, entry=entries.get(part), frame=frame, transposed=transposed),)


def _tables(old: bool) -> tuple[str, str]:
    start = f"{TEXT}model." if old else TEXT
    return f"{start}shared.weight", f"{start}encoder.embed_tokens.weight"
