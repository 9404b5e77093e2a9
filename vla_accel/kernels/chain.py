"""Programmatic dependent launch: which kernels may start before their predecessor on the stream has ended.

A dependent kernel starts as soon as every block of its predecessor has issued `griddepcontrol.launch_dependents` or has
ended. It fetches its weights, then executes `griddepcontrol.wait`, which returns when the predecessor has ended. As the
predecessor did the same, everything earlier in the chain has ended as well. This is correct under three conditions:

- Every kernel of a chain waits before it reads or writes what an earlier kernel of the chain touches. Before the wait
  it reads constants only: weights, tables, and the inputs of the program, such as the prefix's keys and values.
- The first kernel of a chain is not dependent. It waits for everything on its stream, so that the program's inputs are
  complete before any later kernel of the chain starts.
- A kernel after an event of another stream, or after torch code that writes such constants, is not dependent either:
  call `Chain.restart`.

Library kernels and torch code between two kernels of a chain are harmless: they wait for all their predecessors, and a
dependent kernel after them starts when they have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vla_accel.runtime import OPEN

if TYPE_CHECKING:
    from vla_accel.kernels.gpu import Gpu
    from vla_accel.kernels.nvrtc import Module


class Chain:
    """The kernels that a program launches one after the other. The program opens its chain while it runs::

        with self.chain:
            linear(x, layer, y)  # waits for everything before it
            add_norm(x, y, x, h, ...)  # may start early

    Kernels launched while no chain is open are not dependent. Each thread has one open chain at a time.
    """

    def __init__(self, gpu: Gpu | None, early: bool = True) -> None:
        """`early`: whether dependent launches pay off in this program, on a GPU that supports them."""
        self.early = early and gpu is not None and gpu.dependent_launch
        self._linked = False

    def __enter__(self) -> Chain:
        self._linked = False
        self._outer, OPEN.chain = OPEN.chain, self
        return self

    def __exit__(self, *_: object) -> None:
        OPEN.chain = self._outer

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Open the chain in its middle, so that the first launch may be dependent as well.

        For a chain that continues another one, and to measure a kernel as the program runs it.
        """
        with self:
            self._linked = True
            yield

    def restart(self) -> None:
        """Make the next launch wait for everything before it on its stream."""
        self._linked = False

    def advance(self) -> bool:
        """Count a launch. Returns whether it is dependent."""
        dependent, self._linked = self.early and self._linked, True
        return dependent


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel as the next one of the open chain. A kernel without the constant `PDL` is never
    dependent."""
    dependent = _dependent()
    if "PDL" in kernel.arg_names:
        options["PDL"] = dependent
        if dependent:
            options["launch_pdl"] = True
    kernel[grid](*arguments, **options)


def launch_cuda(
    module: Module, name: str, blocks: int, threads: int, arguments: Sequence[Any], *, cluster: int = 1
) -> None:
    """Launch a kernel of a CUDA C++ module as the next one of the open chain. Arguments as `Module.launch`."""
    module.launch(name, blocks, threads, arguments, cluster=cluster, dependent=_dependent())


def _dependent() -> bool:
    chain: Chain | None = OPEN.chain
    return chain is not None and chain.advance()
