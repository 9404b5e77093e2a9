"""The tensors of a module in memory, in the interface of a checkpoint's files."""

from __future__ import annotations

from torch import Tensor, nn

from vla_accel.checkpoints.weights import SmallWeights


class ModuleWeights(SmallWeights):
    """A module's parameters and buffers, as `state_dict` names them.

    Each is read where it is at that time, so that the module may be moved between devices.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.state_dict())
        self.tensors = {}  # which would keep the memory of moved tensors
        self._module = module

    def read(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        return getattr(self._module.get_submodule(owner), leaf).detach()
