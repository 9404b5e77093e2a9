"""Which implementation an op takes, and that a test can say so."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.support.gpus import H200, assumed
from tests.support.runtimes import steered
from vla_accel.kernels import dispatch
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.choice import choose
from vla_accel.kernels.attention.config import AttentionShape
from vla_accel.kernels.dispatch import path
from vla_accel.kernels.gemm import choice, hopper, ops, weights
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.hopper import HopperTile
from vla_accel.kernels.image import ops as image
from vla_accel.kernels.rows import rows
from vla_accel.runtime import current

CPU = torch.device("cpu")


CUDA = torch.device("cuda", 1)


def test_the_device_decides_unless_a_runtime_is_open() -> None:
    assert path(torch.empty(1)) == path(CPU) == "reference"
    with assumed(H200), steered("triton"):
        assert path(torch.empty(1)) == path(CPU) == "triton"
        assert path(CUDA) == "cuda", "a runtime applies to its own type of device"
        with steered("reference", CUDA):
            assert path(CUDA) == "reference"
        assert path(CPU) == "triton", "the outer runtime is open again"
    with pytest.raises(ZeroDivisionError), steered("cuda"):
        _ = 1 / 0
    assert path(CPU) == "reference", "an error closes the runtime"


def test_a_runtime_is_open_in_one_thread() -> None:
    found: list[str] = []
    with steered("triton"):
        thread = threading.Thread(target=lambda: found.append(path(CPU)))
        thread.start()
        thread.join()
    assert found == ["reference"]


class Noted:
    """A module of kernels that only notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)


def test_ops_ask_the_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    monkeypatch.setattr(dispatch, "kernels", lambda _: noted)
    monkeypatch.setattr(ops, "kernels", lambda _: noted)
    x, out, half = torch.ones(2, 16), torch.empty(2, 8), torch.ones(1, 2, 2, 4, dtype=torch.float16)
    layer = weights.make_linear(torch.ones(8, 16), torch.zeros(8), torch.float32)

    def calls() -> list[str]:
        noted.calls = []
        rows.geglu(x, out, inverse_scale=None)
        image.geglu_erf(half)
        image.geglu_erf(half.float())  # a reference on any backend
        ops.gemm(x, layer, out)
        ops.gemm(x, layer, out, Epilogue(residual=True))
        return noted.calls

    assert calls() == []
    for backend in ("triton", "cuda"):
        with steered(backend):
            # A plain product is cuBLAS's, which is torch.
            assert calls() == ["geglu", "geglu_erf", "product"]


def test_own_kernels_are_taken_on_the_cuda_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = weights.make_linear(torch.zeros(128, 64), None, torch.bfloat16)
    monkeypatch.setattr(hopper, "planned", lambda *_: HopperTile(1, 1, 1, 64, 4))
    for to, taken in (("cuda", True), ("triton", False), ("reference", False)):
        with steered(to):  # type: ignore[arg-type]
            assert choice.has_hopper_gemm(8, layer, Activation.NONE) == taken
    sizes = AttentionShape(1, 4, 4, 2, 2, 16, torch.float32, padded=False, quantised=False)
    assert choose("own", sizes, current(CPU)).detail == "attention own (reference)"
    with steered("triton"):
        assert choose("own", sizes, current(CPU)).detail == "attention own (Triton)"


def test_a_missing_module_of_kernels_is_an_error() -> None:
    pytest.importorskip("triton", reason="NOT RUN: needs triton")
    assert dispatch.kernels("rows.triton_rows").__name__ == "vla_accel.kernels.rows.triton_rows"
    with pytest.raises(ImportError):
        dispatch.kernels("none")
