"""What is calibrated of a flow network: vision and prefix as engines run them, norm weights folded into products."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vla_accel.kernels.image.pixels import pixels
from vla_accel.nn.fold import fold_norm
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.quantised import calibrated_products
from vla_accel.nn.reference import RmsNorm, TransformerBlock


def calibration(model: PrefixNetwork) -> tuple[nn.Module, Sequence[str]]:
    """(module, names of its products to measure): the module takes an observation's images uint8 (V, S, S, 3), tokens
    int64 (L,) and state float32, then pixel maps float32 (V, `pictures.MAP_WIDTH`) where the checkpoint needs them. Its
    products have the names that they have in `model`, which is left as it is."""
    return _Calibrated(model), calibrated_products(model.config)


class _Calibrated(nn.Module):
    def __init__(self, model: PrefixNetwork) -> None:
        super().__init__()
        self.vision = copy.deepcopy(model.vision)
        self.prefix = copy.deepcopy(model.prefix)
        # In a list, so that its modules are not this module's.
        self._model = [model]
        with torch.no_grad():
            for layer in self.vision.layers:
                assert isinstance(layer, TransformerBlock)
                _fold_in_place(layer.layer_norm1, layer.qkv_proj)
                _fold_in_place(layer.layer_norm2, layer.fc1)
            for layer in self.prefix.layers:
                assert isinstance(layer, TransformerBlock)
                _fold_in_place(layer.input_layernorm, layer.qkv_proj)
                _fold_in_place(layer.post_attention_layernorm, layer.gate_up_proj)

    def forward(self, images: Tensor, tokens: Tensor, state: Tensor, pixel_maps: Tensor | None = None) -> None:
        (model,) = self._model
        made = pixels(images, pixel_maps, self.vision.patch_embedding.weight.dtype)
        image_tokens = model.project(self.vision(made))
        image_tokens = image_tokens.reshape(1, -1, image_tokens.shape[-1])
        self.prefix(*model.prefix_rows(image_tokens, tokens[None], state[None]))


def _fold_in_place(norm: nn.Module, linear: nn.Linear) -> None:
    """Move a norm's weights into the product that follows."""
    assert isinstance(norm, (nn.LayerNorm, RmsNorm))
    weight, bias = fold_norm(linear, norm)
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
    norm.weight.fill_(1.0 - norm.offset if isinstance(norm, RmsNorm) else 1.0)
    if isinstance(norm, nn.LayerNorm):
        norm.bias.zero_()
