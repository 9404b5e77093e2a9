"""A component's module with tensors that are computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from vla_accel.nn.network import Network

N = TypeVar("N", bound=Network)


class Fixed(nn.Module, Generic[N]):
    """The module of a component, with tensors that are computed once, when its weights are fetched."""

    def __init__(self, model: N, make: Callable[[], Any], parts: Sequence[str]) -> None:
        """`make` returns the tensors as a dataclass; `parts`: the parameters that `forward` reads."""
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
