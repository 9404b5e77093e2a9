"""Layers, precisions, profiles and size of a built engine, for `vla-accel inspect`.

They come from the library's engine inspector if a GPU can load the engine, else from the engine's description, whose
layers are those of the parsed network, before fusion.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from vla_accel.engines import tensorrt_library
from vla_accel.engines.cache import examine
from vla_accel.engines.tensorrt_library import Library, load_library, parse_target, runs_on
from vla_accel.engines.tensorrt_session import shared_engine
from vla_accel.errors import EngineError


def inspect(path: Path) -> dict[str, Any]:
    """Return an engine file's contents as plain data. Raises EngineError."""
    if not path.is_file():
        raise EngineError(f"engine {path}: expected a file, {'got a folder' if path.is_dir() else 'there is none'}")
    entry = examine(path)
    about = dict(entry.about)
    if entry.problem and path.with_suffix(".json").is_file():
        raise EngineError(f"engine {path}: {entry.problem}")
    library = _loadable(about)
    if library is None and not about:
        raise EngineError(f"engine {path}: it has no description next to it, and no GPU here can load it")
    found: dict[str, Any] = {
        "file": path.name,
        "bytes": path.stat().st_size,
        **{key: about.get(key) for key in ("name", "library", "version", "target", "precision")},
        **{key: about.get(key, []) for key in ("inputs", "outputs", "profiles")},
        "source": "description",
        "layers": [{"name": n, "type": k, "dtype": d} for k, n, d in about.get("layers", [])],
    }
    if library is not None:
        engine = shared_engine(library, path, torch.device("cuda"), False)
        text = engine.create_engine_inspector().get_engine_information(library.trt.LayerInformationFormat.JSON)
        layers = [layer_of(item) for item in json.loads(text).get("Layers", [])]
        found |= {"source": "engine inspector", "layers": layers}
    found["dtypes"] = dict(Counter(layer["dtype"] for layer in found["layers"] if layer["dtype"]))
    found["types"] = dict(Counter(layer["type"] for layer in found["layers"]).most_common())
    return found


def _loadable(about: dict[str, Any]) -> Library | None:
    """The library that can load the engine on this machine's GPU; None if there is none."""
    if not torch.cuda.is_available():
        return None
    capability = tensorrt_library.capability_of(torch.device("cuda"))
    name = about.get("library", "tensorrt")
    targets = [parse_target(t) for t in str(about.get("target", "")).split("+") if t]
    if not runs_on(name, capability) or (targets and capability not in targets):
        return None
    return load_library(name)


def layer_of(item: Any) -> dict[str, str]:
    """Parse a layer of the inspector's JSON; a tensor's type is `Format/Datatype` in 10.x and `DataType` in 11."""
    if isinstance(item, str):
        return {"name": item, "type": "", "dtype": ""}
    outputs = item.get("Outputs") or [{}]
    text = str(outputs[0].get("DataType") or outputs[0].get("Format/Datatype") or "")
    words = {"FP32": "float", "FLOAT": "float", "FP16": "half", "HALF": "half", "BF16": "bf16", "FP8": "fp8"}
    dtype = next((w for k, w in words.items() if k in text.upper()), text.lower())
    return {"name": str(item.get("Name", "")), "type": str(item.get("LayerType", "")).lower(), "dtype": dtype}
