"""Every Triton kernel of the native engine against its torch reference, in Triton's interpreter on a CPU, through the
same calls that the programs make. `kernel_cases.py` has the shapes; `test_gpu_kernels.py` runs them on a GPU."""

from __future__ import annotations

import ast
import inspect
import json

import pytest
import torch

from tests.support import kernel_calls as calls
from tests.support import kernel_cases as cases
from tests.support import kernel_shapes as shapes
from tests.support.kernel_calls import FP8, Call, Draw, Empty, Same
from tests.support.kernel_shapes import CONFIGS, TALL
from tests.support.scripts import lines_of, needs_triton
from vla_accel.kernels.rows import rows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str]:
    """What is wrong, or nothing, by case: all selected cases run in one process."""
    items = [i for i in request.session.items if "interpreted" in getattr(i, "fixturenames", ())]
    selected = [i.callspec.params["name"] for i in items]  # type: ignore[attr-defined]
    return {name: wrong for name, wrong, _ in map(json.loads, lines_of("interpret_kernels", *selected))}


QUICK = [name for name in CONFIGS if "1x50x128 pipelined 32" in name or "(10, 40, 320, 1, 'gr')" in name]
QUICK += [name for name in CONFIGS if "moments" in name and "pipelined 32" in name and "adaptive=False" not in name]
QUICK += [name for name in CONFIGS if name.startswith("suffix_attention (51") and "64x16" in name]
QUICK += [name for name in CONFIGS if "TMA" in name and ("project 10" in name or "moments" in name)]
# Of many programs, or of deep loops.
LONG = (
    "513x", "257", "128x12", "128x20", "(2, 50, 96,", "(1, 64,", "(1, 51, 256,", "(1, 17, 320,", "(1, 3, 128,",
    "(1, 1, 1152,", "(1, 16, 72, 3, 3, 72)", "(2, 5, 64, 4, 2, 64) adaptive=False", "(64, ", "(65, ",
    "(51, 256,", "(51, 200,", "(51, 33,", "(17, 1152,", "(17, 100,", "(17, 40, 8", "(16, 130,", "(10, 70,", "(3, 65, 6",
    "(100, 64, 1", "21 causal", "K by", "(3, 66, 65)", "(1, 51, 50, 256", "(1, 100, 0,", "(2, 65, 2,", "(4, 40, 30,",
    "by squares", "16x32, 2 tiles", "(3, 13, 128,",
)  # fmt: skip
IN_TIME = {name for name in (*cases.CASES, *TALL, *QUICK) if not any(part in name for part in LONG)}


@needs_triton
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_TIME else pytest.mark.slow) for name in (*cases.CASES, *TALL, *CONFIGS)],
)
def test_a_kernel_computes_what_its_reference_does(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


def test_every_kernel_has_cases() -> None:
    """Ops that lead to a kernel: those of `dispatch.op`, and those whose source calls one."""
    launched = {
        node.func.attr
        for module in calls.MODULES
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Call)
        and getattr(node.func.value.func, "id", "") in ("kernels", "_kernels")
    }
    launched |= {n for n, module in calls.MODULE_OF.items() if hasattr(getattr(module, n), "__wrapped__")}
    # The product of integers has cases of its own: test_int8.py.
    ops = {"gemm" if name in ("product", "finish") else name for name in launched}
    found = {shapes.call_of(name, torch.float32).op for name in (*cases.CASES, *TALL)}
    # Attention to a prefix alone is that of the suffix without keys of its own.
    assert ops == found - {"prefix_attention"}


# -- the comparison itself --------------------------------------------------------------------------------------------


def reference_call() -> Call:
    return cases.call_of("add_norm rms 3x4304 y=3 fp8=False", torch.float32)


def test_agreement_passes_and_a_small_error_does_not() -> None:
    call = reference_call()
    got = calls.outputs_of(call, CPU, kernel=False)
    calls.check(call, got, 1e-5, 1e-5, 1e-3)
    got[1][2, 7] += 1e-3
    with pytest.raises(AssertionError, match=r"add_norm\.h"):
        calls.check(call, got, 1e-5, 1e-5, 1e-3)


def test_an_element_left_unwritten_is_found() -> None:
    call = reference_call()
    got = calls.outputs_of(call, CPU, kernel=False)
    got[0][0, 0] = float("nan")
    with pytest.raises(AssertionError, match=r"add_norm\.x_out"):
        calls.check(call, got, 1e-5, 1e-5, 1e-3)


def test_fp8_may_be_one_step_off_but_not_everywhere() -> None:
    call = cases.call_of("geglu 3x1152 fp8=True", torch.float32)
    (want,) = calls.outputs_of(call, CPU, kernel=False)
    up = want.float().abs() > 16
    off = torch.where(up & (torch.arange(up.numel()).view(up.shape) % 200 == 0), want.float() * 1.1, want.float())
    calls.check(call, [off.clamp(-448, 448).to(FP8)], 1e-5, 1e-5, 1e-3)
    with pytest.raises(AssertionError, match="mean="):
        calls.check(call, [(want.float() * 1.1).clamp(-448, 448).to(FP8)], 1e-5, 1e-5, 1e-3)


@pytest.mark.parametrize("what", ["before", "after", "input"])
def test_writing_where_nothing_should_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = Draw("x", torch.float32)(4, 6)
    call = Call("gelu", {"x": x, "out": Empty((4, 6), torch.float32), "inverse_scale": None}, ("out",))
    honest = rows.gelu

    def careless(x: torch.Tensor, out: torch.Tensor, *, inverse_scale: float | None) -> None:
        honest(x, out, inverse_scale=inverse_scale)
        if what == "input":
            x[0, 0] += 1
        else:
            out.as_strided((1,), (1,), out.storage_offset() + (-1 if what == "before" else out.numel())).fill_(1.0)

    calls.check(call, calls.outputs_of(call, CPU, kernel=True), 1e-6, 1e-6, 1e-3)
    monkeypatch.setattr(rows, "gelu", careless)
    with pytest.raises(AssertionError, match="changed its input x" if what == "input" else "outside of a tensor"):
        calls.outputs_of(call, CPU, kernel=True)


def test_arguments_that_share_a_tensor_do() -> None:
    call = cases.call_of("add_norm layer 3x4304 y=3 fp8=False in place", torch.float32)
    assert isinstance(call.arguments["x_out"], Same)
    placed = calls.Placed(call, CPU, kernel=True)
    assert placed.arguments["x_out"] is placed.arguments["x"]
