"""GR00T's components: vision → image_tokens, deepstack → kv_cache → keys and values of the transformer's blocks that
look outside → denoise → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.families.groot.head import QUANTISED, Source, StepConstants
from vla_accel.families.groot.language import Layout, Places
from vla_accel.families.groot.network import Groot
from vla_accel.families.groot.vision import Placed
from vla_accel.nn.flow import Schedule

if TYPE_CHECKING:
    from vla_accel.families.groot.native import GrootStore

class _Fixed(nn.Module):
    """A component with tensors that are computed once, when its weights are fetched.

    `make` returns them as a dataclass; `parts`: the parameters that `forward` reads.
    """

    def __init__(self, model: Groot, make: Callable[[], Any], parts: Sequence[str]) -> None:
        super().__init__()
        self.model, self._make, self._parts = model, make, list(parts)
        self._names: list[str] = []
        if model.origin is None:
            self.fetch()

    def fetch(self) -> list[Tensor]:
        """Compute what is fixed, and read the weights that `forward` reads."""
        if not self._names:
            with torch.inference_mode():
                for name, value in vars(self._make()).items():
                    self.register_buffer(name, value, persistent=False)
                    self._names.append(name)
        return self.model.fetch(*self._parts)

    def kept(self) -> list[Any]:
        """The tensors, in the order of the dataclass."""
        return [getattr(self, name) for name in self._names]


class Vision(_Fixed):
    """images uint8 (B, V, H, W, 3) to image tokens (B, I, width) and, of towers with them, deepstack features (n, B, I,
    width)."""

    def __init__(self, model: Groot, layout: Layout) -> None:
        def placed() -> Placed:
            with model.present("vision.position_embedding"):
                return model.vision.placed(layout.grid)

        super().__init__(model, placed, [n for n in model.names("vision") if n != "vision.position_embedding"])

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        wide = self.model.vision.patch_embedding.weight.dtype
        # The processor's order: x / 255, then minus and over a half.
        pixels = (images.to(wide).permute(0, 1, 4, 2, 3) / 255.0 - 0.5) / 0.5
        return tuple(x for x in self.model.see(pixels, Placed(*self.kept())) if x is not None)


class KvCache(_Fixed):
    """Keys and values of what the transformer's blocks look at: `HeadConfig.cached`.

    Reads image_tokens, deepstack of towers with it, text tokens (B, L) int64 and, if rows may be shorter, their
    `lengths` (B,) int32.
    """

    def __init__(self, model: Groot, layout: Layout) -> None:
        head = [name for name in model.names("head") if name.startswith("head.vl_") or ".kv_proj." in name]
        super().__init__(model, lambda: layout.places(model.device), [*model.names("embed", "language"), *head])
        self.layout = layout

    def forward(self, image_tokens: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        deepstack, others = (others[0], others[1:]) if self.model.config.vision.deepstack else (None, others)
        cache = self.model.read(self.layout, image_tokens, deepstack, *others, places=Places(*self.kept()))
        return tuple(tensor for both in cache.values() for tensor in both)


class Denoise(_Fixed):
    """noise (B, H, A) float32, the cache, `state` (B, state_dim), `target` (B, H, A) and `weights` (B, H) float32 of a
    previous chunk (weights of zero: a plain call), then, where rows may be shorter, `lengths` (B,) int32 of the text,
    to normalised actions (B, H, A) float32."""

    def __init__(self, model: Groot, layout: Layout, schedule: Schedule) -> None:
        # The constants have the times' and the norms' share; the cache has the rest.
        others = ("head.vl_", "head.time_", "head.final_modulation")
        names = [n for n in model.names("head") if not n.startswith(others)]
        read = [n for n in names if ".kv_proj." not in n and ".modulation." not in n]
        super().__init__(model, lambda: model.constants(schedule), read)
        self.layout, self.schedule = layout, schedule

    def extra_repr(self) -> str:
        """What a graph of `forward` has as constants; keys of built engines contain it."""
        return f"times={self.schedule.times}"

    def forward(self, noise: Tensor, *others: Tensor) -> Tensor:
        sources = self.model.config.head.sources
        stored, (state, target, weights, *lengths) = others[: 2 * len(sources)], others[2 * len(sources) :]
        cache = dict(zip(sources, zip(stored[::2], stored[1::2], strict=True), strict=True))
        real = self.layout.real_keys(*lengths or (None,))
        constants = StepConstants(*self.kept())
        return self.model.integrate(noise, constants, state, cache, real, target, weights, schedule=self.schedule)


def groot_components(
    model: Groot, layout: Layout, batch: int, schedule: Schedule, padded: bool, store: GrootStore | None
) -> tuple[Component, Component, Component]:
    """The three components of a shape. `padded`: rows may have fewer text tokens than the layout."""
    config, dtype = model.config, model.dtype
    head, vision = config.head, config.vision
    images, text, unit = layout.images, layout.text, vision.unit
    pixels = (batch, layout.views, layout.grid[0] * unit, layout.grid[1] * unit, 3)
    hidden = (batch, images, config.language.width)
    seen = [TensorSpec("image_tokens", hidden, dtype)]
    if vision.deepstack:
        seen.append(TensorSpec("deepstack", (len(vision.deepstack), *hidden), dtype))
    lengths = (TensorSpec("lengths", (batch,), torch.int32),) if padded else ()
    actions = (batch, config.action_horizon, config.action_dim)
    counts: dict[Source, int] = {"text": text, "image": images, "all": layout.tokens}
    cache = tuple(
        TensorSpec(name, (len(head.blocks(source)), batch, counts[source], head.heads, head.head_dim), dtype)
        for name, source in head.cached.items()
    )

    def native(make: str, *sizes: Any) -> Callable[..., Any] | None:
        return None if store is None or not padded else partial(getattr(store, make), batch, layout, *sizes)

    made: Mapping[str, tuple[_Fixed, tuple[TensorSpec, ...], tuple[TensorSpec, ...], Any]] = {
        "vision": (
            Vision(model, layout), (TensorSpec("images", pixels, torch.uint8),), tuple(seen), native("vision"),
        ),
        "kv_cache": (
            KvCache(model, layout), (*seen, TensorSpec("tokens", (batch, text), torch.int64), *lengths), cache,
            native("kv_cache"),
        ),
        "denoise": (
            Denoise(model, layout, schedule),
            (
                TensorSpec("noise", actions, torch.float32), *cache,
                TensorSpec("state", (batch, config.state_dim), torch.float32),
                TensorSpec("target", actions, torch.float32), TensorSpec("weights", actions[:2], torch.float32),
                *lengths,
            ),
            (TensorSpec("actions", actions, torch.float32),), native("denoise", schedule),
        ),
    }  # fmt: skip
    return tuple(
        Component(name, m, i, o, n, quantised=QUANTISED.get(name, {}), fetch=m.fetch, products=model.dtype)
        for name, (m, i, o, n) in made.items()
    )  # type: ignore[return-value]
