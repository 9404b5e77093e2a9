"""The JSON files that releases of lerobot save, made by its own code (tests/references/make_lerobot_folders.py)."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from torch import Tensor

STATE_FILES = ("policy_preprocessor", "policy_postprocessor")
Change = Callable[[dict[str, Any]], object]
"""Edits the three files of a folder before they are written."""


@functools.cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return json.loads(Path(__file__).with_suffix(".json").read_text())


def releases(kind: str = "pi0") -> tuple[str, ...]:
    """The releases whose files of a policy class are known."""
    return tuple(release for release, kinds in _table().items() if kind in kinds)


def saved(
    kind: str, release: str, features: Mapping[str, Any], modes: Mapping[str, str], **config: Any
) -> dict[str, Any]:
    """config, policy_preprocessor and policy_postprocessor of a policy class, with these features, normalization modes
    and other fields of config.json."""
    files: dict[str, Any] = copy.deepcopy(_table()[release][kind])
    inputs = {name: f for name, f in features.items() if f["type"] != "ACTION"}
    outputs = {name: f for name, f in features.items() if f["type"] == "ACTION"}
    files["config"] |= {
        "input_features": inputs, "output_features": outputs, "normalization_mapping": dict(modes), **config,
    }  # fmt: skip
    for name in STATE_FILES:
        for one in files[name]["steps"]:
            if "norm_map" in one["config"]:
                its = outputs if name == "policy_postprocessor" else {**inputs, **outputs}
                one["config"] |= {"features": copy.deepcopy(its), "norm_map": dict(modes)}
    if "tokenizer_max_length" in files["config"]:
        step(files, "tokenizer_processor")["config"]["max_length"] = files["config"]["tokenizer_max_length"]
    return files


def lerobot_tensors(model: Any, pieces: Callable[[str, Any], Sequence[Any]]) -> dict[str, Tensor]:
    """A model's weights under lerobot's names, as `pieces` of its family splits each."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        parts = pieces(name, model.config)
        rows = [p.rows or len(value) for p in parts]
        tensors |= {p.name: t.clone() for p, t in zip(parts, value.split(rows), strict=True)}
    return tensors


def write_saved(
    folder: Path, files: dict[str, Any], statistics: Mapping[str, Mapping[str, Any]], change: Change
) -> None:
    """Write the statistics (by feature, then name) and the JSON files, which `change` may edit before."""
    arrays = {
        f"{feature}.{name}": np.asarray(value, np.float32)
        for feature, table in statistics.items()
        for name, value in table.items()
    }
    for name in state_files(files) if statistics else ():
        save_file(arrays, folder / name)
    change(files)
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "tokenizer").mkdir(exist_ok=True)  # of lerobot's main branch


def buffer_tensors(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Statistics (by feature, then name) as tensors between the weights, as lerobot stored them before 0.4."""
    found = {}
    for key, table in statistics.items():
        layers = ("normalize_targets", "unnormalize_outputs") if key == "action" else ("normalize_inputs",)
        found |= {
            f"{layer}.buffer_{key.replace('.', '_')}.{name}": torch.as_tensor(np.asarray(value, np.float32))
            for layer in layers
            for name, value in table.items()
        }
    return found


def write_reference(
    folder: Path, reference: Mapping[str, Any], variant: str, change: Change, stored: dict[str, torch.Tensor]
) -> None:
    """Write the tensors `stored` and the files that lerobot left in a reference, which `change` may edit before."""
    folder.mkdir(parents=True, exist_ok=True)
    files = copy.deepcopy(reference["variants"][variant]["files"])
    change(files)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    save_torch(stored, str(folder / "model.safetensors"))
    statistics = {n: torch.tensor(v) for n, v in reference["statistics"].items()}
    for pipeline in ("policy_preprocessor", "policy_postprocessor"):
        for one in files[f"{pipeline}.json"]["steps"]:
            if "state_file" in one:
                save_torch(statistics, str(folder / one["state_file"]))


def step(files: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A step of either pipeline, to be edited."""
    steps = [s for pipeline in STATE_FILES for s in files[pipeline]["steps"]]
    return next(s for s in steps if s["registry_name"] == name)


def state_files(files: Mapping[str, Any]) -> list[str]:
    """The names of the files of statistics, of the preprocessor and of the postprocessor."""
    return [step(files, name)["state_file"] for name in ("normalizer_processor", "unnormalizer_processor")]


def saved_files(folder: Path) -> dict[str, Any]:
    """The three files of a folder that was written."""
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("config", *STATE_FILES)}


def edit(name: str, **settings: Any) -> Change:
    """Change settings of a step."""
    return lambda files: step(files, name)["config"].update(settings)


def configure(**fields: Any) -> Change:
    """Change fields of config.json."""
    return lambda files: files["config"].update(fields)


def without(name: str) -> Change:
    """Leave a step out."""

    def change(files: dict[str, Any]) -> None:
        for pipeline in STATE_FILES:
            files[pipeline]["steps"] = [s for s in files[pipeline]["steps"] if s["registry_name"] != name]

    return change


def relative(**settings: Any) -> Change:
    """Actions relative to the state, as `use_relative_actions` makes lerobot save them."""

    def change(files: dict[str, Any]) -> None:
        if "use_relative_actions" in files["config"]:
            files["config"]["use_relative_actions"] = True
        names = ("relative_actions_processor", "delta_actions_processor")
        (one,) = (s for s in files["policy_preprocessor"]["steps"] if s["registry_name"] in names)
        one["config"] |= {"enabled": True, **settings}
        step(files, "absolute_actions_processor")["config"]["enabled"] = True

    return change


def together(*changes: Change) -> Change:
    def change(files: dict[str, Any]) -> None:
        for one in changes:
            one(files)

    return change
