"""Write a policy's components as files that run without this package: ONNX graphs, or programs of torch.export.

A folder holds a file for each component; `manifest.json`, which says how they join; `example.npz`, the inputs and the
actions of one call; and `run.py`, which runs the files on the example and compares the actions.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.export.graph_signature import InputKind

from vla_accel.component import Component, TensorSpec
from vla_accel.engines import onnx
from vla_accel.errors import ActionError, OutputError
from vla_accel.policy.optimized import OptimizedPolicy

Format = Literal["onnx", "torch-export"]
SCHEMA = "vla_accel.export/1"


def export(
    policy: OptimizedPolicy,
    observations: Sequence[Mapping[str, Any]],
    form: Format,
    folder: Path,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Write the components of an eager FP32 policy on a CPU, for as many observations at once, and return the manifest.

    Raises EngineError for a component that the format cannot hold, OutputError for a folder that is not empty.
    """
    with contextlib.suppress(ActionError):  # tokens of random weights need not be actions
        policy.infer_batch(observations)
    pipeline = policy.pipelines.newest
    components = [engine.component for _, engine in pipeline.engines]
    made = {name for component in components for name in (spec.name for spec in component.outputs)}
    example = {
        name: tensor.clone().numpy()
        for _, engine in pipeline.engines
        for name, tensor in engine.inputs.items()
        if name not in made
    }
    policy.model.fetch()
    write = {"onnx": _onnx, "torch-export": _torch_export}[form]
    with _new_folder(folder) as temporary:
        rows = []
        for component in components:
            progress(f"exporting {component.name}")
            rows.append({**_described(component), **write(component, temporary)})
        manifest = {
            "schema": SCHEMA,
            "format": form,
            "model": policy.metadata["model"],
            "batch": len(observations),
            "opset": onnx.OPSET if form == "onnx" else None,
            "torch": torch.__version__,
            **policy.schedule.described,
            "num_steps": policy.num_steps,
            "inputs": list(example),
            "components": rows,
            "result": components[-1].outputs[0].name,
        }
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        arrays: dict[str, Any] = {**example, "expected": pipeline.result.numpy()}
        np.savez(temporary / "example.npz", **arrays)
        runner = importlib.resources.files("vla_accel") / "assets" / "export" / f"run_{form.replace('-', '_')}.py.txt"
        (temporary / "run.py").write_text(runner.read_text())
    return manifest


def require_new(folder: Path) -> None:
    """Raise OutputError unless `folder` is empty or not there yet."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"output: expected a new or an empty folder, got {folder}")


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends, and is removed where it raises."""
    require_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _described(component: Component) -> dict[str, Any]:
    def rows(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": spec.name,
                "dtype": str(spec.dtype).removeprefix("torch."),
                "shape": list(spec.shape),
                "dynamic": {str(dimension): list(ends) for dimension, ends in spec.ranges.items()},
            }
            for spec in specs
        ]

    return {"name": component.name, "inputs": rows(component.inputs), "outputs": rows(component.outputs)}


def _onnx(component: Component, folder: Path) -> dict[str, Any]:
    written = onnx.export(component, component.module, folder)
    return {"file": written.path.name, "cosine": written.similarity, "operators": dict(written.operators)}


def _torch_export(component: Component, folder: Path) -> dict[str, Any]:
    path, traced = folder / f"{component.name}.pt2", onnx.traced(component, component.module)
    # The module also holds the weights of the other components.
    nodes = {node.name: node for node in traced.graph.nodes if node.op == "placeholder"}
    for spec in list(traced.graph_signature.input_specs):
        if spec.kind is InputKind.PARAMETER and not nodes[spec.arg.name].users:
            traced.graph_signature.input_specs.remove(spec)
            traced.graph.erase_node(nodes[spec.arg.name])
            traced.state_dict.pop(str(spec.target))
    torch.export.save(traced, path)
    return {"file": path.name}
