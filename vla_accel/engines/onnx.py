"""Export a component to an ONNX file, validate it, and compare it with the module.

The comparison runs the exported graph in ONNX Runtime with every 16-bit tensor widened to float32: rounding cannot
hide a wrong graph, and no CPU kernel for BF16 is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.config import EnginePrecision
from vla_accel.errors import DependencyError, EngineError
from vla_accel.fp8 import E4M3
from vla_accel.numeric import DTYPES, cosine

OPSET = 20
"""The oldest opset with Gelu; later ones add nothing that is needed here."""
SIMILARITY = 0.9999
"""Least cosine between the graph and the module, both in float32."""
SIMILARITY_QUANTISED = 0.999
"""The same for a graph with quantisers: another order of summation may round an FP8 value the other way, which changes
every later layer. A single quantised layer agrees to 0.9999."""
_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OnnxFile:
    """An exported component. `similarity`: least cosine with the module; None if it was not compared."""

    path: Path
    operators: Mapping[str, int]
    dtypes: tuple[torch.dtype, ...]
    weight_bytes: int
    similarity: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


def module_at(component: Component, precision: EnginePrecision) -> nn.Module:
    """Return the component's module of a precision. Raises EngineError for one that the component does not have."""
    if precision in component.variants:
        return component.variants[precision]()
    if precision == "auto" or DTYPES.get(precision) == component.dtype:
        return component.module
    have = ", ".join(("auto", *component.variants))
    raise EngineError(f"{component.name}: expected a precision of {have}, got {precision}")


def largest(spec: TensorSpec) -> tuple[int, ...]:
    """A spec's shape with every dynamic dimension at its maximum."""
    return tuple(spec.ranges[i][1] if i in spec.ranges else n for i, n in enumerate(spec.shape))


def smallest(spec: TensorSpec) -> tuple[int, ...]:
    """A spec's shape with every dynamic dimension at its minimum."""
    return tuple(spec.ranges[i][0] if i in spec.ranges else n for i, n in enumerate(spec.shape))


def export(component: Component, module: nn.Module, folder: Path, *, verify: bool = True) -> OnnxFile:
    """Export `module` with the component's names and dynamic dimensions to `folder`/NAME.onnx.

    Raises EngineError if ONNX lacks an operator (named), a dimension cannot be dynamic, or the graph is invalid or
    differs from the module.
    """
    onnx = _need("onnx")
    _need("onnxscript")
    began = time.perf_counter()
    path = folder / f"{component.name}.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    exported = traced(component, module)
    try:
        with torch.no_grad(), _quiet(), quantisers_as_operators():
            program = torch.onnx.export(
                exported,
                dynamo=True,
                opset_version=OPSET,
                input_names=[s.name for s in component.inputs],
                output_names=[s.name for s in component.outputs],
                custom_translation_table=_translations(),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise EngineError(f"{component.name}: {_export_problem(error)}") from error
    except (RuntimeError, ValueError, TypeError) as error:
        raise EngineError(f"{component.name}: cannot be exported: {_first_line(error)}") from error
    assert program is not None
    program.save(path, external_data=True)
    model = program.model
    dtypes = _dtypes(model)
    weight_bytes = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    operators = dict(Counter(node.op_type for node in model.graph))
    del program, exported, model
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise EngineError(f"{component.name}: the exported graph is not valid ONNX: {_first_line(error)}") from error
    seconds = {"export": time.perf_counter() - began}
    similarity = None
    if verify:
        began = time.perf_counter()
        least = SIMILARITY_QUANTISED if E4M3.dtype in dtypes else SIMILARITY
        similarity = compare(component, module, path, least)
        seconds["verify"] = time.perf_counter() - began
    return OnnxFile(path, operators, dtypes, weight_bytes, similarity, seconds)


def traced(component: Component, module: nn.Module) -> torch.export.ExportedProgram:
    """Trace `module` with the component's dynamic dimensions. Raises EngineError for what cannot be traced: Python code
    that depends on values, or a dynamic dimension that the module fixes."""
    try:
        with torch.no_grad(), _quiet(), quantisers_as_operators():
            return torch.export.export(
                module, examples(component, largest), dynamic_shapes=_dynamic(component, module), strict=False
            )
    except (RuntimeError, ValueError, TypeError) as error:
        if "data-dependent" in str(error):
            problem = "what it runs depends on computed values, such as a token that ends a sequence"
            raise EngineError(f"{component.name}: cannot be exported: {problem}") from error
        raise EngineError(f"{component.name}: cannot be exported: {_first_line(error)}") from error


def _dynamic(component: Component, module: nn.Module) -> tuple[Any, ...]:
    """The dynamic dimensions of every input, in the structure of the module's arguments (`*rest` is one tuple)."""
    hints: list[Any] = [
        {d: torch.export.Dim.DYNAMIC for d, (low, high) in s.ranges.items() if low < high} for s in component.inputs
    ]
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        fixed = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        hints[fixed:] = [tuple(hints[fixed:])] if hints[fixed:] else []
    return tuple(hints)


def examples(component: Component, shape_of: Any = largest) -> tuple[Tensor, ...]:
    """Return random inputs on the module's device: normal floats, any bytes, token ids 0 or 1, lengths (int32) of 1,
    masks of True, or a spec's own `example`. Libraries differ in attention over no token, so lengths are not 0."""
    device = next((p.device for p in component.module.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)

    def draw(spec: TensorSpec) -> Tensor:
        shape = shape_of(spec)
        if spec.example is not None:
            value = torch.tensor(spec.example).expand(shape)
        elif spec.dtype.is_floating_point:
            value = torch.randn(shape, generator=generator)
        elif spec.dtype in (torch.bool, torch.int32):
            value = torch.ones(shape)
        else:
            value = torch.randint(0, 256 if spec.dtype == torch.uint8 else 2, shape, generator=generator)
        return value.to(spec.dtype).to(device)

    return tuple(draw(s) for s in component.inputs)


def compare(component: Component, module: nn.Module, path: Path, least: float = SIMILARITY) -> float:
    """Return the least cosine between graph and module in float32, over outputs and both ends of the ranges."""
    runtime = _need("onnxruntime")
    worst = 1.0
    with tempfile.TemporaryDirectory(prefix="vla_accel-onnx-") as scratch:
        wide = Path(scratch) / "wide.onnx"
        _widen(path, wide)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # Without optimisation: fusing Q and DQ would need FP8 kernels that ONNX Runtime lacks.
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = runtime.InferenceSession(str(wide), options, providers=["CPUExecutionProvider"])
        dynamic = any(low < high for s in component.inputs for low, high in s.ranges.values())
        for shape_of in (largest, smallest) if dynamic else (largest,):
            inputs = tuple(x.float() if x.dtype in _NARROW else x for x in examples(component, shape_of))
            expected = _in_float32(module, inputs)
            feeds = {s.name: x.cpu().numpy() for s, x in zip(component.inputs, inputs, strict=True)}
            # The graph drops inputs that it does not need.
            known = {i.name for i in session.get_inputs()}
            results = session.run(None, {n: v for n, v in feeds.items() if n in known})
            for spec, want, got in zip(component.outputs, expected, results, strict=True):
                name = f"{component.name}.{spec.name}"
                worst = min(worst, _checked(name, want.cpu().numpy(), np.asarray(got), least))
    return worst


def _checked(name: str, want: np.ndarray, got: np.ndarray, least: float) -> float:
    if want.shape != got.shape:
        raise EngineError(f"{name}: the ONNX graph gives shape {got.shape}, the module {want.shape}")
    for values, who in ((want, "the module"), (got, "the ONNX graph")):
        if not np.isfinite(values).all():
            raise EngineError(f"{name}: {who} gives {int((~np.isfinite(values)).sum())} non-finite values")
    similarity = cosine(want, got)
    if similarity < least:
        difference = f"cosine {similarity:.6f}, expected at least {least}"
        raise EngineError(f"{name}: the ONNX graph differs from the module: {difference}")
    return similarity


def _in_float32(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The module's outputs with every 16-bit weight widened; the module stays unchanged."""
    # Parameters stay parameters, so that `get_parameter` finds them.
    parameters, buffers = (
        {name: t.float() for name, t in tensors if t.dtype in _NARROW}
        for tensors in (module.named_parameters(), module.named_buffers())
    )
    wide = buffers | {name: nn.Parameter(t, requires_grad=False) for name, t in parameters.items()}
    with torch.no_grad(), _quiet(), quantisers_as_operators():
        results = torch.func.functional_call(module, wide, tuple(inputs))
    return results if isinstance(results, tuple) else (results,)


def _widen(source: Path, target: Path) -> None:
    """Replace FLOAT16 and BFLOAT16 by FLOAT everywhere in the graph of `source`."""
    ir = _need("onnx_ir")
    model = ir.load(source)
    sixteen_bits = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

    def tensor(value: Any) -> Any:
        return ir.tensor(value.numpy().astype(np.float32), name=value.name) if value.dtype in sixteen_bits else value

    def retype(value: Any) -> None:
        if value is not None and value.dtype in sixteen_bits:
            value.dtype = ir.DataType.FLOAT

    for value in model.graph.initializers.values():
        value.const_value = tensor(value.const_value)
        retype(value)
    for value in (*model.graph.inputs, *model.graph.outputs):
        retype(value)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for value in node.outputs:
            retype(value)
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR:
                node.attributes[name] = ir.AttrTensor(name, tensor(attribute.value))
            # Cast's `to` and the like hold the number of a type.
            elif attribute.type == ir.AttributeType.INT and name in ("to", "dtype", "output_dtype", "stash_type"):
                wide = ir.DataType.FLOAT if ir.DataType(attribute.value) in sixteen_bits else attribute.value
                node.attributes[name] = ir.AttrInt64(name, int(wide))
    ir.save(model, target, external_data=f"{target.name}.data")


def quantisers_as_operators() -> contextlib.AbstractContextManager[None]:
    """ModelOpt's export mode, in which a quantiser is traced as one operator; no effect unless ModelOpt was imported
    (every quantised module imports it)."""
    if "modelopt.torch.quantization" not in sys.modules:
        return contextlib.nullcontext()
    from modelopt.torch.quantization.utils import export_torch_mode

    return export_torch_mode()


def _translations() -> dict[Any, Any]:
    """ONNX of ModelOpt's quantiser: Q and DQ in E4M3 with a scale of the tensor's dtype."""
    if not hasattr(torch.ops.tensorrt, "quantize_op"):
        return {}
    onnx = _need("onnx")
    from onnxscript import opset20 as op

    def quantize(
        x: Any, amax: Any, num_bits: int = 8, exponent_bits: int = 4, unsigned: bool = False, narrow_range: bool = False
    ) -> Any:
        if (num_bits, exponent_bits) != (8, 4):
            raise NotImplementedError(f"quantiser of {num_bits} bits with {exponent_bits} of exponent: only FP8 E4M3")
        scale = op.CastLike(op.Div(op.Cast(amax, to=onnx.TensorProto.FLOAT), op.Constant(value_float=E4M3.largest)), x)  # pyright: ignore[reportArgumentType]
        zero = op.Cast(op.Constant(value_float=0.0), to=onnx.TensorProto.FLOAT8E4M3FN)  # pyright: ignore[reportArgumentType]
        return op.DequantizeLinear(op.QuantizeLinear(x, scale, zero), scale, zero)  # pyright: ignore[reportArgumentType]

    return {torch.ops.tensorrt.quantize_op.default: quantize}


def require_packages() -> None:
    """Import the packages that export and comparison need. Raises DependencyError for the first missing one."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        _need(package)


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DependencyError(
            f"ONNX export needs the package {package} ({error}); install it: pip install 'vla_accel[onnx]'"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings of torch's exporter about its own internals, absent torchvision and skipped folds."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnxscript", "onnx_ir"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _dtypes(model: Any) -> tuple[torch.dtype, ...]:
    """The floating-point dtypes that occur in a graph."""
    names = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16, "FLOAT8E4M3FN": E4M3.dtype}
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [v for node in model.graph for v in node.outputs]
    found = {v.dtype.name for v in values if v.dtype is not None}
    found |= {"FLOAT8E4M3FN"} if any(n.op_type == "QuantizeLinear" for n in model.graph) else set()
    return tuple(d for n, d in names.items() if n in found)


def _export_problem(error: BaseException) -> str:
    """The exporter's problem in one line, with the operator's name."""
    text = "".join(traceback.format_exception(error))
    if match := re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", text):
        return f"ONNX has no operator for {match[1]}: rewrite it, or keep this component on another engine"
    return f"cannot be exported to ONNX: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:400] if lines else type(error).__name__
