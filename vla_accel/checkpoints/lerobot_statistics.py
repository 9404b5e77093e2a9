"""The statistics in lerobot's folders as normalizers: in a file of a saved step or, up to lerobot 0.3, in buffers among
the weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.checkpoints.lerobot_steps import Step
from vla_accel.checkpoints.weights import Weights, listing, read_arrays
from vla_accel.errors import CheckpointError
from vla_accel.transforms.normalisation import Normaliser, finite_array

STATE, ACTION = "observation.state", "action"
_NAMES = {
    "MEAN_STD": ("mean", "std"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"), "MIN_MAX": ("min", "max"),
}  # fmt: skip
_BUFFER = re.compile(r"(normalize_inputs|normalize_targets|unnormalize_outputs)\.(?:(.+)_)?buffer_(.+)\.(\w+)")
_TRAIN = (
    "a base checkpoint to fine-tune; load one that was trained from it, or an adapter that has statistics of its own "
    "(--lora)"
)


@dataclass(frozen=True)
class Statistics:
    """Statistics of features, and how they scale them.

    Attributes:
        where: Where they are, for errors.
        table: Arrays by feature and statistic, such as "action.mean"; None where the checkpoint has none.
        modes: lerobot's NormalizationMode by kind of feature, such as "STATE".
        eps: What lerobot adds to a divisor, or puts in the place of one that is zero.
        added: Whether `eps` is added to every divisor, as up to lerobot 0.3, or only to a standard deviation.
        kinds: Kind of each feature that is normalized.
    """

    where: str
    table: Mapping[str, np.ndarray] | None
    modes: Mapping[str, str]
    eps: float
    added: bool
    kinds: Mapping[str, str]

    def scaling(self, key: str) -> Normaliser | None:
        """Return how a feature is normalized (or unnormalized, for the actions); None where lerobot leaves it as it is.

        Raises:
            CheckpointError: For statistics that are needed but missing, of several datasets, or of no data.
        """
        mode = self.modes.get(self.kinds[key], "IDENTITY") if key in self.kinds else "IDENTITY"
        if mode == "IDENTITY":
            return None
        if mode not in _NAMES:
            raise CheckpointError(f"{self.where}: expected {' or '.join(_NAMES)} of {key}, got {mode!r}")
        names = _NAMES[mode]
        low, high = (self._array(f"{key}.{name}") for name in names)
        if low is None or high is None or low.shape != high.shape:
            raise CheckpointError(self._missing(key, mode, names))
        span, bound = (high, "std >= 0") if mode == "MEAN_STD" else (high - low, " <= ".join(names))
        if (span < 0).any():
            raise CheckpointError(f"{self.where}: {key}: expected {bound}, got a span of {span.min():g}")
        # lerobot adds eps where it divides, not where it multiplies.
        added = 0.0 if key == ACTION else self.eps
        if mode == "MEAN_STD":
            return Normaliser("mean_std", low, span + added, single=True)
        return Normaliser("quantile", low, span + added if self.added else np.where(span == 0, self.eps, span), True)

    def camera(self, key: str) -> Normaliser | None:
        """Return how the images of a camera are normalized, by channel; None where lerobot leaves them as they are, as
        it does without statistics."""
        there = any(name.startswith(f"{key}.") for name in self.table or ())
        return self.scaling(key) if there else None

    def _array(self, name: str) -> np.ndarray | None:
        value = (self.table or {}).get(name)
        # Statistics of images are (3, 1, 1).
        return finite_array(value if value is None else value.reshape(-1), f"{self.where}: {name}")

    def _missing(self, key: str, mode: str, names: Sequence[str]) -> str:
        needed = " and ".join(f"{key}.{name}" for name in names)
        if self.table is None:
            return f"{self.where}: expected {needed} for {mode}, found no statistics: {_TRAIN}"
        groups: dict[str, set[str]] = {}
        for dataset, marker, feature in (name.partition(".buffer.") for name in self.table):
            if marker:
                groups.setdefault(dataset, set()).add(feature.rpartition(".")[0])
        if groups:
            features = ", ".join(sorted(set().union(*groups.values())))
            return (
                f"{self.where}: expected {needed} for {mode}, found {features} of several datasets "
                f"({', '.join(sorted(groups))}): {_TRAIN}"
            )
        found = sorted(name for name in self.table if name.startswith(key))
        return f"{self.where}: expected {needed} for {mode}, found {', '.join(found) or 'none of them'}"


def of_step(folder: Path, step: Step) -> Statistics:
    """The statistics of a saved normalizer or unnormalizer.

    lerobot normalizes the features that the step names; of the actions it asks nothing but their statistics. Raises
    CheckpointError for settings of another form and for a missing file.
    """
    config, where = step.config, f"checkpoint {folder}: {step.name}"
    features, modes = (_table(config, name, where) for name in ("features", "norm_map"))
    if not all(isinstance(f, Mapping) and isinstance(f.get("type"), str) for f in features.values()):
        raise CheckpointError(f"{where}: expected features with a type, got {features!r:.200}")
    only = config.get("normalize_observation_keys")
    kinds = {key: f["type"] for key, f in features.items() if f["type"] != "ACTION" and (only is None or key in only)}
    eps = config.get("eps", 1e-8)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or eps < 0:
        raise CheckpointError(f"{where}: expected eps of 0 or more, got {eps!r:.60}")
    table = None
    if step.state_file is not None:
        table = read_arrays(folder / statistics_file(folder, step.state_file, step.name))
    return Statistics(where, table, modes, float(eps), False, {**kinds, ACTION: "ACTION"})


def _table(config: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = config.get(name)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: expected a table of {name}, got {value!r:.60}")
    return value


def buffers(names: Iterable[str]) -> list[str]:
    """The tensors of a checkpoint that are lerobot 0.3's statistics and no weights. Releases since 0.4 do not read
    them."""
    return [name for name in names if _BUFFER.fullmatch(name)]


def of_buffers(weights: Weights, features: Mapping[str, Any], modes: Mapping[str, str], where: Path) -> Statistics:
    """The statistics of a checkpoint of lerobot 0.3, which are among its weights.

    Args: `features`: those of config.json, with their types; `modes`: its normalization_mapping. Raises CheckpointError
    for those of several datasets.
    """
    by_name = {key.replace(".", "_"): key for key in features}
    table: dict[str, np.ndarray] = {}
    datasets = set()
    for name in buffers(weights.shapes):
        layer, dataset, feature, statistic = _BUFFER.fullmatch(name).groups()  # type: ignore[union-attr]
        datasets |= {dataset} - {None}
        key = by_name.get(feature)
        # The targets of training have those of the outputs.
        if key is not None and layer != "normalize_targets":
            table[f"{key}.{statistic}"] = weights.read(name).float().numpy().copy()
    if datasets:
        found = ", ".join(sorted(datasets))
        raise CheckpointError(f"{where}: expected statistics of one dataset, found those of {found}: {_TRAIN}")
    return Statistics(str(where), table, modes, 1e-8, True, {key: f["type"] for key, f in features.items()})


def statistics_file(folder: Path, name: Any, step: str) -> str:
    """The name that a saved step gives to its statistics, which must lie in the folder itself."""
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"checkpoint {folder}: expected the statistics of {step} in a file, found {name!r}")
    if not (folder / name).is_file():
        raise CheckpointError(
            f"checkpoint {folder}: expected {name} with the statistics of {step}, found {listing(folder)}"
        )
    return name
