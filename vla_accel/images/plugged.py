"""An `AcceleratedVae` inside a diffusers autoencoder: diffusers' own `encode` and `decode`, over engines."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from vla_accel.errors import EngineError
from vla_accel.images.autoencoder import from_patches, patches
from vla_accel.images.vae import AcceleratedVae

_LAYERS = "_vla_accel_layers"


def plug_in(vae: Any, accelerated: AcceleratedVae) -> Callable[[], None]:
    """Make a diffusers autoencoder's `encode` and `decode` run the engines, slicing and tiling included.

    A deep copy of the autoencoder gets engines of its own. Returns a function that undoes it; several may be undone in
    any order.
    """
    if accelerated.vae is not vae:
        raise EngineError("plug_in: expected an AcceleratedVae made from this autoencoder, got one of another")
    methods = Plugged(vae, accelerated)
    return exchanged(vae, encode=methods.encode, decode=methods.decode)


class Plugged:
    """diffusers' `encode` and `decode` with the two networks on engines.

    The autoencoder holds bound methods of this object, so `copy.deepcopy` copies it along.
    """

    def __init__(self, vae: Any, accelerated: AcceleratedVae) -> None:
        self.vae, self.accelerated = vae, accelerated

    def encode(self, x: Tensor, *options: Any, **named: Any) -> Any:
        return self._call("encode", x, *options, **named)

    def decode(self, z: Tensor, *options: Any, **named: Any) -> Any:
        return self._call("decode", z, *options, **named)

    def _call(self, method: str, value: Tensor, *options: Any, **named: Any) -> Any:
        if not isinstance(value, Tensor):
            raise EngineError(f"vae: expected a tensor, got {type(value).__name__}")
        if value.dim() == 5 and value.shape[2] != 1:
            raise EngineError(f"vae: expected one frame, (B, C, 1, H, W), got {tuple(value.shape)}; undo() runs videos")
        return getattr(type(self.vae), method)(_OnEngines(self.vae, self.accelerated), value, *options, **named)


class _OnEngines:
    """An autoencoder whose two networks, quantisation convolutions included, are engines, for one call of diffusers."""

    def __init__(self, vae: Any, accelerated: AcceleratedVae) -> None:
        self._vae, self._accelerated = vae, accelerated
        self._feat_map = self._enc_feat_map = None
        self._patch = getattr(vae.config, "patch_size", None) or 1

    # diffusers makes the patches of Wan 2.2 outside its networks; engines make them inside.

    def encoder(self, x: Tensor, **_: Any) -> Tensor:
        return self._accelerated.run("encoder", x if self._patch == 1 else _one_frame(from_patches, x, self._patch))

    def decoder(self, z: Tensor, **_: Any) -> Tensor:
        image = self._accelerated.run("decoder", z)
        return image if self._patch == 1 else _one_frame(patches, image, self._patch)

    def quant_conv(self, x: Tensor) -> Tensor:
        return x

    post_quant_conv = quant_conv

    def clear_cache(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name == "_hf_hook":  # refused by name when an engine is called
            raise AttributeError(name)
        found = inspect.getattr_static(type(self._vae), name, None)
        return MethodType(found, self) if isinstance(found, FunctionType) else getattr(self._vae, name)


def _one_frame(function: Callable[[Tensor, int], Tensor], x: Tensor, side: int) -> Tensor:
    """`patches` or `from_patches` of (B, C, 1, H, W)."""
    return function(x[:, :, 0], side)[:, :, None]


def exchanged(module: nn.Module, **functions: Callable[..., Any]) -> Callable[[], None]:
    """Replace functions of a module. Returns a function that undoes it; the newest exchange that is left runs."""
    own = vars(module)
    # The module's own functions, then those of every exchange, the newest last.
    layers: list[dict[str, Any]] = own.setdefault(_LAYERS, [{}])
    layers[0] |= {n: own[n] for n in functions if n in own and not any(n in layer for layer in layers[1:])}
    layers.append(functions)
    own.update(functions)

    def undo() -> None:
        if not any(layer is functions for layer in layers):
            return
        layers[:] = [layer for layer in layers if layer is not functions]
        for name in functions:
            own.pop(name, None)
            for layer in layers:
                if name in layer:
                    own[name] = layer[name]
        if len(layers) == 1:
            own.pop(_LAYERS, None)

    return undo


def original(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method of a module as it was before any exchange."""
    base, *layers = vars(module).get(_LAYERS) or [{}]
    if any(name in layer for layer in layers):
        return base.get(name) or MethodType(getattr(type(module), name), module)
    return getattr(module, name)
