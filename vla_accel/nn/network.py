"""What every family's network has, whatever it computes: a dtype, a place, and weights that need not be there.

A network may begin on the meta device, with an `Origin` that its weights can be had from, part by part, and again.
Whoever computes with a part fetches it; whoever only prepares something from it lets it go afterwards.
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
    """Where weights can be had by their canonical names, as often as they are asked for: the same ones each time."""

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """A whole weight; `dtype` None: as stored. Raises CheckpointError for values that are not finite."""
        ...

    def sample(self, name: str, stride: int) -> Tensor:
        """Every `stride`-th value of a weight, in the order of its rows and as stored."""
        ...

    def progress(self) -> AbstractContextManager[None]:
        """Inside, what is read is shown on the terminal."""
        ...


class _NotDrawn(TorchFunctionMode):
    """What `torch.nn.init` is asked for is not done."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Modules made inside are on the meta device, and nobody draws their weights: torch would import its compiler to
    find out that there is nothing to draw, which took a third of a start."""
    with _NotDrawn(), torch.device("meta"):
        yield


class Network(nn.Module, ABC):
    """A model of some family. `config`: its architecture and sizes, a dataclass of the family's.

    Module names are the canonical checkpoint keys. `origin`: where the weights that are on the meta device can be had;
    None where all are there.
    """

    config: Any
    origin: Origin | None = None
    _device: torch.device | None = None
    _as_stored: bool = True

    @classmethod
    def empty(cls: type[N], config: Any) -> N:
        """A network of these sizes, in eval mode, without weights."""
        with weightless():
            return cls(config).requires_grad_(False).eval()

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the large products; small projections and norms may be wider."""

    @property
    def device(self) -> torch.device:
        """Where its weights are, or come to."""
        return self._device or next(self.parameters()).device

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Whether a parameter stays in float32 in a network of products in BF16 or FP16."""
        return False

    def to_compute_dtype(self: N, dtype: torch.dtype) -> N:
        """Cast the large products to `dtype`, and what is `kept_wide` to float32 (float64 for float64), in place."""
        return self.placed(None, dtype)

    def _apply(self: N, *arguments: Any, **options: Any) -> N:
        # Moved by hand (`to`, `cuda`): from now on the weights say where they are.
        self._device = None
        return super()._apply(*arguments, **options)

    def placed(self: N, device: torch.device | None, dtype: torch.dtype) -> N:
        """This network on `device` (None: where it is), computing in `dtype` as `to_compute_dtype` says, in place.

        One that has an origin, and was given another place or dtype before, stays as it is for those who use it:
        another network of the same origin is returned.
        """
        given = self.origin is not None and not self._as_stored
        if given and (self.dtype, self.device) != (dtype, device or self.device):
            return self.away(self.origin).placed(device or self.device, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # One cast each: rounding everything first and widening some again would round what is to stay exact.
        for name, parameter in self.named_parameters():
            place = None if parameter.is_meta else device
            parameter.data = parameter.data.to(place, wide if self.kept_wide(name) else dtype)
        if device is not None:
            for module in self.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(device)
            self._device = device
        self._as_stored = False
        return self

    def bound_for(self: N, device: torch.device, dtype: torch.dtype | None) -> N:
        """`placed`, where `dtype` None means that every weight comes as it is stored."""
        if dtype is not None:
            return self.placed(device, dtype)
        self._device = device
        return self

    def away(self: N, origin: Origin | None) -> N:
        """Another network of these sizes, in eval mode, none of whose weights are there yet."""
        network = type(self).empty(self.config)
        network.origin = origin
        return network

    # -- weights that need not be there -----------------------------------------------------------------------------

    def names(self, *parts: str) -> list[str]:
        """Parameters of these parts, each a module's name or a parameter's; all of them where no part is named."""
        found: list[str] = []
        for part in parts:
            owner, _, leaf = part.rpartition(".")
            module = self.get_submodule(owner)
            if leaf in module._parameters:
                found += [part] if module._parameters[leaf] is not None else []
            else:
                found += [f"{part}.{name}" for name, _ in module.get_submodule(leaf).named_parameters()]
        return found if parts else [name for name, _ in self.named_parameters()]

    def fetch(self, *parts: str) -> list[str]:
        """Bring what is not there yet of these parts (`names`) to the device; the names of what came."""
        if self.origin is None:
            return []
        coming = [name for name in self.names(*parts) if self.get_parameter(name).is_meta]
        # Largest first: while it is copied, its source is in memory too, and the rest is not there yet.
        coming.sort(key=lambda name: -self.get_parameter(name).numel())
        # What is read in inference mode could not be changed outside it.
        with phase("read"), torch.inference_mode(False), torch.no_grad():
            for name in coming:
                dtype = None if self._as_stored else self.get_parameter(name).dtype
                self._set(name, self.origin.read(name, dtype, self.device))
        return coming

    def weight(self, name: str) -> Tensor:
        """A weight on the device, in the dtype that this network computes in. It is not kept here."""
        value = self.get_parameter(name).detach()
        if self.origin is None or not value.is_meta:
            return value
        with phase("read"):
            return self.origin.read(name, None if self._as_stored else value.dtype, self.device)

    def fetched(self, *parts: str) -> list[Tensor]:
        """The weights of these parts (`names`), there from now on."""
        self.fetch(*parts)
        return [self.get_parameter(name) for name in self.names(*parts)]

    def on_host(self, name: str) -> Tensor:
        """A parameter in host memory, page-locked where the network's device is a GPU, which then can read it."""
        value = self.get_parameter(name).detach()
        if value.is_meta and self.origin is not None:
            value = self.origin.read(name, value.dtype, torch.device("cpu"))
        return value.cpu().pin_memory() if self.device.type == "cuda" else value

    @contextlib.contextmanager
    def present(self, *parts: str) -> Iterator[None]:
        """Inside, these parts (`names`) are there. What was not there before is let go at the end."""
        with self.progress():
            came = self.fetch(*parts)
        try:
            yield
        finally:
            for name in came:
                self._set(name, torch.empty_like(self.get_parameter(name), device="meta"))

    def whole(self: N) -> N:
        """This network with all its weights there, never to be read again."""
        with self.progress():
            self.fetch()
        self.origin = None
        return self

    def progress(self) -> AbstractContextManager[None]:
        """Inside, what is read of the weights is shown on the terminal."""
        return contextlib.nullcontext() if self.origin is None else self.origin.progress()

    def _set(self, name: str, value: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        self.get_submodule(owner)._parameters[leaf] = nn.Parameter(value, requires_grad=False)
