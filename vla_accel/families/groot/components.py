"""GR00T's components: vision → image_tokens, deepstack → kv_cache → keys and values of the transformer's blocks that
look outside → denoise → actions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vla_accel.component import Component, TensorSpec
from vla_accel.families.groot.network import Groot
from vla_accel.nn.dit_components import cache_specs, denoise_component
from vla_accel.nn.fixed import Fixed
from vla_accel.nn.flow import Schedule
from vla_accel.nn.qwen_components import image_specs, vision_component
from vla_accel.nn.qwen_language import Layout, Places

if TYPE_CHECKING:
    from vla_accel.families.groot.native import GrootStore


class KvCache(Fixed[Groot]):
    """Keys and values of each source of the head, (n, B, tokens, heads, d).

    Reads image_tokens, deepstack of towers with it, text tokens (B, L) int64 and, if rows may be shorter, `lengths`
    (B,) int32.
    """

    def __init__(self, model: Groot, layout: Layout) -> None:
        head = [name for name in model.names("head") if name.startswith("head.vl_") or ".kv_proj." in name]
        super().__init__(model, lambda: layout.places(model.device), [*model.names("embed", "language"), *head])
        self.layout = layout

    def forward(self, image_tokens: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        deepstack, others = (others[0], others[1:]) if self.model.config.vision.deepstack else (None, others)
        cache = self.model.read(self.layout, image_tokens, deepstack, *others, places=Places(*self.kept()))
        return tuple(tensor for source in self.model.config.head.sources for tensor in cache[source])


def groot_components(
    model: Groot,
    layout: Layout,
    batch: int,
    schedule: Schedule,
    padded: bool,
    store: GrootStore | None,
    *,
    guided: bool,
) -> tuple[Component, Component, Component]:
    """The three components of a shape. `padded`: rows may have fewer text tokens than the layout; `guided`: calls may
    have a previous chunk."""
    lengths = (TensorSpec("lengths", (batch,), torch.int32),) if padded else ()
    counts = {"text": layout.text, "image": layout.images, "all": layout.tokens}
    cache = cache_specs(model.config.head, batch, counts, model.dtype)  # type: ignore[arg-type]

    def native(make: str, *sizes: Any) -> Callable[..., Any] | None:
        return None if store is None or not padded else partial(getattr(store, make), batch, *sizes)

    module = KvCache(model, layout)
    tokens = TensorSpec("tokens", (batch, layout.text), torch.int64)
    return (
        vision_component(model, batch, layout, native("vision", layout)),
        Component(
            "kv_cache", module, (*image_specs(model, batch, layout), tokens, *lengths), cache,
            native("kv_cache", layout), fetch=module.fetch, products=model.dtype,
        ),
        denoise_component(model, schedule, cache, guided=guided, padded=padded, native=native("denoise", schedule)),
    )  # fmt: skip
