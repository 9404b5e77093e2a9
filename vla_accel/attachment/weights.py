"""The tensors of a module in memory, in the interface of a checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from vla_accel.checkpoints.weights import SmallWeights


class ModuleWeights(SmallWeights):
    """A module's parameters and buffers, as `state_dict` names them, and further tensors.

    Each is read where it is at that time, so that the module may be moved between devices.
    """

    def __init__(self, module: nn.Module, more: Mapping[str, Tensor]) -> None:
        super().__init__({**module.state_dict(), **more})
        self.tensors = more
        self._module = module

    def read(self, name: str) -> Tensor:
        if name in self.tensors:
            return super().read(name)
        owner, _, leaf = name.rpartition(".")
        return getattr(self._module.get_submodule(owner), leaf).detach()
