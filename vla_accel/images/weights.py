"""Whether a module still computes with the weights that an engine was made from.

Engines hold copies: weights that are loaded, cast, moved, replaced or fused with LoRA afterwards must lead to new ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_LORA = ("merged_adapters", "scaling", "_active_adapter", "_disable_adapters")
"""What peft's layers compute with besides tensors."""


class WeightState:
    """The weights of modules at one moment. `changed()` compares them with the weights of now.

    It looks at every tensor's address and version, at the modules themselves, their attention processors and LoRA
    adapters. With `values` it also compares the norm and the maximum of every tensor, as writing through `tensor.data`
    (which peft's `fuse_lora` does) leaves address and version as they are.
    """

    def __init__(self, *modules: nn.Module, values: bool = True) -> None:
        self._modules = modules
        found, tensors = self._look()
        self._found = found
        self._values = _measured(tensors) if values else None

    def changed(self) -> bool:
        """Whether anything differs from the state that was seen first. On a GPU this waits for enqueued work."""
        found, tensors = self._look()
        if found != self._found:
            return True
        return self._values is not None and not torch.equal(self._values, _measured(tensors))

    def _look(self) -> tuple[list[Any], list[Tensor]]:
        found: list[Any] = [module.training for module in self._modules]
        tensors: list[Tensor] = []
        stack = list(self._modules)
        while stack:
            part = stack.pop()
            own = vars(part)
            found += (id(part), id(own.get("processor")))
            if _LORA[0] in own:
                found.append({name: _copied(own.get(name)) for name in _LORA})
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    version = -1 if tensor.is_inference() else tensor._version
                    found += (tensor.data_ptr(), version, tensor.dtype, tensor.device)
                    tensors.append(tensor)
            stack += [child for child in part._modules.values() if child is not None]
        return found, tensors


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list)) else value


@torch.inference_mode()
def _measured(tensors: list[Tensor]) -> Tensor:
    """Norm and maximum of every floating-point tensor, on the CPU."""
    rows: list[Tensor] = []
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        # No reductions exist for eight bits.
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() and tensor.device.type != "meta":
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    for (_, dtype), group in groups.items():
        wide = torch.promote_types(dtype, torch.float32)
        rows.append(torch.stack(torch._foreach_norm(group, 2, dtype=wide)).double().cpu())
        rows.append(torch.stack(torch._foreach_max(group)).double().cpu())
    # A NaN would differ from itself.
    return torch.nan_to_num(torch.cat(rows)) if rows else torch.empty(0)
