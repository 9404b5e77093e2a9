"""Which implementation of an op runs. Every op has a torch reference, which defines what it computes. On a GPU it runs
a CUDA C++ kernel of this package or of a library where that is the fastest, else a Triton kernel (`triton_*.py`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from vla_accel.runtime import Backend, current

P = ParamSpec("P")
R = TypeVar("R")


def path(where: Tensor | torch.device) -> Backend:
    """Return the backend of an op on a tensor in the current runtime."""
    return current(where).backend


def kernels(module: str) -> Any:
    """Return a module of Triton kernels ("rows.triton_rows"). It is imported here because it needs triton."""
    return importlib.import_module(f"vla_accel.kernels.{module}")


def op(module: str, supported: Callable[[Any], bool] = lambda x: True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make an op of a torch reference: with another backend, the function of the same name in `module` runs instead. It
    gets all arguments, those that have defaults by name.

    Args:
        module: a module of Triton kernels, as `kernels` takes it.
        supported: whether the kernels take the first argument, whose device decides about the backend.
    """

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(reference).parameters
        names = list(parameters)
        defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}

        @functools.wraps(reference)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            x: Any = args[0] if args else kwargs[names[0]]
            if path(x.device) == "reference" or not supported(x):
                return reference(*args, **kwargs)
            omitted = {name: value for name, value in defaults.items() if name not in names[: len(args)]}
            return getattr(kernels(module), reference.__name__)(*args, **{**omitted, **kwargs})

        return run

    return decorate
