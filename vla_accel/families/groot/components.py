"""GR00T N1.7's components: vision → image_tokens, deepstack → kv_cache → keys and values of the transformer's blocks
that look outside → denoise → actions."""

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

CACHE = ("text_keys", "text_values", "image_keys", "image_values")


class KvCache(Fixed[Groot]):
    """From image_tokens, deepstack, text tokens (B, L) int64 and, if rows may be shorter, their `lengths` (B,) int32,
    compute keys and values of text (n, B, L, heads, d) and of image tokens (n, B, I, heads, d)."""

    def __init__(self, model: Groot, layout: Layout) -> None:
        head = [name for name in model.names("head") if name.startswith("head.vl_") or ".kv_proj." in name]
        super().__init__(model, lambda: layout.places(model.device), [*model.names("embed", "language"), *head])

    def forward(
        self, image_tokens: Tensor, deepstack: Tensor, tokens: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        cache = self.model.read(image_tokens, deepstack, tokens, Places(*self.kept()), lengths)
        return tuple(tensor for source in self.model.config.head.sources for tensor in cache[source])


def groot_components(
    model: Groot, layout: Layout, batch: int, schedule: Schedule, padded: bool, store: GrootStore | None
) -> tuple[Component, Component, Component]:
    """The three components of a shape. `padded`: rows may have fewer text tokens than the layout."""
    lengths = (TensorSpec("lengths", (batch,), torch.int32),) if padded else ()
    counts = {"text": layout.text, "image": layout.views * layout.view_tokens}
    cache = cache_specs(model.config.head, batch, counts, model.dtype)  # type: ignore[arg-type]

    def native(make: str, *sizes: Any) -> Callable[..., Any] | None:
        return None if store is None or not padded else partial(getattr(store, make), batch, layout, *sizes)

    module = KvCache(model, layout)
    tokens = TensorSpec("tokens", (batch, layout.text), torch.int64)
    return (
        vision_component(model, batch, layout, native("vision")),
        Component(
            "kv_cache", module, (*image_specs(model, batch, layout), tokens, *lengths), cache, native("kv_cache"),
            fetch=module.fetch, products=model.dtype,
        ),
        denoise_component(model, schedule, cache, guided=True, padded=padded, native=native("denoise", schedule)),
    )  # fmt: skip
