"""The base of all networks: a dtype, a device, and weights that may still be in the checkpoint.

A network can start on the meta device with an `Origin`, from which every weight can be read, several times if needed.
Native programs read weights by name and prepare their own (`Network.weight`); eager modules fetch the weights that they
compute with (`Network.fetch`).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vla_accel.kernels.phases import phase

N = TypeVar("N", bound="Network")


class Origin(Protocol):
    """A source of weights by their canonical names. Reading twice gives the same values."""

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """Read a whole weight; `dtype` None: as stored. Raises CheckpointError for values that are not finite."""
        ...

    def sample(self, name: str, stride: int) -> Tensor:
        """Read every `stride`-th value of a weight, in the order of its rows and as stored."""
        ...

    def progress(self) -> AbstractContextManager[None]:
        """Show on the terminal what is read inside."""
        ...


class _NotDrawn(TorchFunctionMode):
    """Turns every `torch.nn.init` call into a no-op."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Make modules on the meta device without drawing their weights, which would make torch import its compiler."""
    with _NotDrawn(), torch.device("meta"):
        yield


class Network(nn.Module, ABC):
    """A model of a family. Module names are the canonical checkpoint keys. `config`: its sizes, a dataclass of the
    family; `origin`: where weights on the meta device can be read, None if all weights are in memory."""

    config: Any
    origin: Origin | None = None
    _device: torch.device | None = None
    _as_stored: bool = True

    @classmethod
    def empty(cls: type[N], config: Any) -> N:
        """Return a network of these sizes, in eval mode, without weights."""
        with weightless():
            return cls(config).requires_grad_(False).eval()

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the large products; small projections and norms may be wider."""

    @property
    def device(self) -> torch.device:
        """The device of the weights, also of those that are not read yet."""
        return self._device or next(self.parameters()).device

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Whether a parameter stays in float32 in a network of products in BF16 or FP16."""
        return False

    def to_compute_dtype(self: N, dtype: torch.dtype) -> N:
        """Cast the large products to `dtype`, and what is `kept_wide` to float32 (float64 for float64), in place."""
        return self.placed(None, dtype)

    def _apply(self: N, *arguments: Any, **options: Any) -> N:
        self._device = None  # moved by `to` or `cuda`: the weights tell the device from now on
        return super()._apply(*arguments, **options)

    def placed(self: N, device: torch.device | None, dtype: torch.dtype | None) -> N:
        """Move this network to `device` (None: keep it) and cast it as `to_compute_dtype`, in place.

        `dtype` None leaves every weight as stored. A network with an origin that already has another device or dtype
        stays as it is for its users: another network with the same origin is returned.
        """
        if dtype is None:
            self._device = device
            return self
        moved = (self.dtype, self.device) != (dtype, device or self.device)
        if self.origin is not None and not self._as_stored and moved:
            return self.away(self.origin).placed(device or self.device, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # One cast each: rounding everything first and widening some again would round what is to stay exact.
        for name, parameter in self.named_parameters():
            where = None if parameter.is_meta else device
            parameter.data = parameter.data.to(where, wide if self.kept_wide(name) else dtype)
        if device is not None:
            for module in self.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(device)
            self._device = device
        self._as_stored = False
        return self

    def away(self: N, origin: Origin | None) -> N:
        """Return another network of these sizes, in eval mode, whose weights are all still at `origin`."""
        network = type(self).empty(self.config)
        network.origin = origin
        return network

    # -- weights that may not be in memory --------------------------------------------------------------------------

    def names(self, *parts: str) -> list[str]:
        """Parameters of these modules or parameters; without arguments, of the network."""
        found: list[str] = []
        for part in parts:
            owner, _, leaf = part.rpartition(".")
            module = self.get_submodule(owner)
            if leaf in module._parameters:
                found += [part] if module._parameters[leaf] is not None else []
            else:
                found += [f"{part}.{name}" for name, _ in module.get_submodule(leaf).named_parameters()]
        return found if parts else [name for name, _ in self.named_parameters()]

    def weight(self, name: str, device: torch.device | None = None) -> Tensor:
        """Return a weight in the dtype that this network computes in, on the network's device by default. The network
        does not keep what it reads."""
        kept = self.get_parameter(name)
        if self.origin is None or not kept.is_meta:
            return kept.detach() if device is None else kept.detach().to(device)
        with phase("read"):
            return self.origin.read(name, None if self._as_stored else kept.dtype, device or self.device)

    def fetch(self, *parts: str) -> list[Tensor]:
        """Read the weights of these parts (as in `names`) that are not in memory yet, keep them, and return all."""
        names = self.names(*parts)
        missing = [n for n in names if self.get_parameter(n).is_meta] if self.origin is not None else []
        # Largest first: while it is copied, its source is in memory as well, and the rest is not yet.
        missing.sort(key=lambda name: -self.get_parameter(name).numel())
        # A tensor that is read in inference mode could not be changed outside it.
        with torch.inference_mode(False), torch.no_grad():
            for name in missing:
                self._set(name, self.weight(name))
        return [self.get_parameter(name) for name in names]

    @contextlib.contextmanager
    def present(self, *parts: str) -> Iterator[None]:
        """Hold the weights of these parts in memory inside; drop those that were not there before."""
        missing = [name for name in self.names(*parts) if self.get_parameter(name).is_meta]
        self.fetch(*parts)
        try:
            yield
        finally:
            for name in missing if self.origin is not None else ():
                self._set(name, torch.empty_like(self.get_parameter(name), device="meta"))

    def whole(self: N) -> N:
        """Read all weights, and forget the origin."""
        with self.progress():
            self.fetch()
        self.origin = None
        return self

    def progress(self) -> AbstractContextManager[None]:
        """Show on the terminal what is read of the weights inside."""
        return contextlib.nullcontext() if self.origin is None else self.origin.progress()

    def _set(self, name: str, value: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        self.get_submodule(owner)._parameters[leaf] = nn.Parameter(value, requires_grad=False)
