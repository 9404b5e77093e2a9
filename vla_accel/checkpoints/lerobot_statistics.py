"""Statistics in lerobot's folders, in a file of a saved step or, up to lerobot 0.3, in buffers among the weights, and
the normalizers and pixel values that follow from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.checkpoints.weights import Weights, listing, read_arrays
from vla_accel.errors import CheckpointError
from vla_accel.pictures import ChannelScale, PixelValues
from vla_accel.transforms.normalisation import Normaliser, finite_array

STATE, ENVIRONMENT, ACTION = "observation.state", "observation.environment_state", "action"
_STATISTICS = {
    "MEAN_STD": ("mean", "std"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "MIN_MAX": ("min", "max"),
}
_PADDING = {
    "mean": 0.0, "std": 1.0, "min": -1.0, "max": 1.0, "q01": -1.0, "q99": 1.0, "q10": -1.0, "q90": 1.0,
}  # fmt: skip
"""Statistics of numbers that a robot does not have, where lerobot fills state and actions up to the model's (Evo-1)."""
_BUFFER = re.compile(r"(normalize_inputs|normalize_targets|unnormalize_outputs)\.(?:(.+)_)?buffer_(.+)\.(\w+)")
_TRAIN = (
    "a base checkpoint to fine-tune; load one that was trained from it, or an adapter that has statistics of its own "
    "(--lora)"
)
_BLACK, _WHITE = 0.0, 255.0


@dataclass(frozen=True)
class Statistics:
    """Statistics of features.

    Attributes:
        where: The file, for errors.
        table: Arrays by feature and statistic, such as "action.mean"; None if the checkpoint has none.
        modes: lerobot's NormalizationMode by kind of feature, such as "STATE".
        eps: lerobot adds it to a divisor, or replaces a divisor of zero by it.
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
        """Return how a feature is normalized (the actions: unnormalized); None if lerobot leaves it as it is.

        Raises:
            CheckpointError: Required statistics are missing, belong to several datasets, or cannot be of any data.
        """
        mode = self.modes.get(self.kinds[key], "IDENTITY") if key in self.kinds else "IDENTITY"
        if mode == "IDENTITY":
            return None
        if mode not in _STATISTICS:
            raise CheckpointError(f"{self.where}: expected {' or '.join(_STATISTICS)} of {key}, got {mode!r}")
        names = _STATISTICS[mode]
        low, high = (self._array(f"{key}.{name}") for name in names)
        if low is None or high is None or low.shape != high.shape:
            raise CheckpointError(self._missing(key, mode, names))
        span, bound = (high, "std >= 0") if mode == "MEAN_STD" else (high - low, " <= ".join(names))
        if (span < 0).any():
            raise CheckpointError(f"{self.where}: {key}: expected {bound}, got a span of {span.min():g}")
        # lerobot adds eps where it divides, not where it multiplies.
        added = 0.0 if key == ACTION else self.eps
        span = span + added if self.added or mode == "MEAN_STD" else np.where(span == 0, self.eps, span)
        made = Normaliser("mean_std" if mode == "MEAN_STD" else "quantile", low, span, single=True)
        mask = self._array(f"{key}.mask")
        return made if mask is None else made.only(mask != 0)

    def length(self, key: str) -> int | None:
        """Return how many numbers a feature had in training, None without statistics."""
        means = [value.size for name, value in (self.table or {}).items() if name == f"{key}.mean"]
        return means[0] if means else None

    def unpadded(self, key: str, count: int | None = None, *, least: int = 0) -> Statistics:
        """Return these statistics with the first `count` numbers of a feature; None: without its padding at the end, of
        at least `least` numbers."""
        names = {f"{key}.{name}": pad for name, pad in _PADDING.items() if f"{key}.{name}" in (self.table or {})}
        table = {**(self.table or {}), **{name: (self.table or {})[name].reshape(-1) for name in names}}
        if count is None:
            last = (np.flatnonzero(table[name] != pad).max(initial=-1) for name, pad in names.items())
            count = max(least, 1 + int(max(last, default=-1)))
        cut = {name: table[name][: count or None] for name in names}
        return replace(self, table=None if self.table is None else {**table, **cut})

    def camera(self, key: str) -> Normaliser | None:
        """Return how the images of a camera are normalized, by channel; None if they are not, as without statistics."""
        return self.scaling(key) if any(name.startswith(f"{key}.") for name in self.table or ()) else None

    def _array(self, name: str) -> np.ndarray | None:
        value = (self.table or {}).get(name)
        # Statistics of images have shape (3, 1, 1).
        return finite_array(value if value is None else value.reshape(-1), f"{self.where}: {name}")

    def _missing(self, key: str, mode: str, names: Sequence[str]) -> str:
        expected = f"{self.where}: expected {' and '.join(f'{key}.{name}' for name in names)} for {mode}, found"
        if self.table is None:
            return f"{expected} no statistics: {_TRAIN}"
        datasets: dict[str, set[str]] = {}
        for dataset, marker, feature in (name.partition(".buffer.") for name in self.table):
            if marker:
                datasets.setdefault(dataset, set()).add(feature.rpartition(".")[0])
        if datasets:
            features = ", ".join(sorted(set().union(*datasets.values())))
            return f"{expected} {features} of several datasets ({', '.join(sorted(datasets))}): {_TRAIN}"
        found = sorted(name for name in self.table if name.startswith(key))
        return f"{expected} {', '.join(found) or 'none of them'}"


def step_statistics(folder: Path, name: str, config: Mapping[str, Any], state_file: object) -> Statistics:
    """Return the statistics of a saved normalizer or unnormalizer.

    lerobot normalizes the features that the step names; the actions need statistics only.

    Raises:
        CheckpointError: The step has settings of another form, or its file is missing.
    """
    where = f"checkpoint {folder}: {name}"
    for key in ("features", "norm_map"):
        if not isinstance(config.get(key), Mapping):
            raise CheckpointError(f"{where}: expected a table of {key}, got {config.get(key)!r:.60}")
    features = config["features"]
    if not all(isinstance(f, Mapping) and isinstance(f.get("type"), str) for f in features.values()):
        raise CheckpointError(f"{where}: expected features with a type, got {features!r:.200}")
    only = config.get("normalize_observation_keys")
    kinds = {key: f["type"] for key, f in features.items() if f["type"] != "ACTION" and (only is None or key in only)}
    eps = config.get("eps", 1e-8)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or eps < 0:
        raise CheckpointError(f"{where}: expected eps of 0 or more, got {eps!r:.60}")
    table = None if state_file is None else read_arrays(statistics_file(folder, state_file, name))
    return Statistics(where, table, config["norm_map"], float(eps), False, {**kinds, ACTION: "ACTION"})


def buffers(names: Iterable[str]) -> list[str]:
    """Return the tensors of a checkpoint that are lerobot 0.3's statistics. Later releases do not read them."""
    return [name for name in names if _BUFFER.fullmatch(name)]


def buffer_statistics(
    weights: Weights, features: Mapping[str, Any], modes: Mapping[str, str], where: Path
) -> Statistics:
    """Return the statistics of a checkpoint of lerobot 0.3, which are among its weights.

    Args:
        weights: The checkpoint's tensors.
        features: The features of config.json, with their types.
        modes: The normalization_mapping of config.json.
        where: The file, for errors.

    Raises:
        CheckpointError: The statistics belong to several datasets.
    """
    by_name = {key.replace(".", "_"): key for key in features}
    table: dict[str, np.ndarray] = {}
    datasets = set()
    for name in buffers(weights.shapes):
        layer, dataset, feature, statistic = _BUFFER.fullmatch(name).groups()  # type: ignore[union-attr]
        datasets |= {dataset} - {None}
        key = by_name.get(feature)
        # The training targets have the same statistics as the outputs.
        if key is not None and layer != "normalize_targets":
            table[f"{key}.{statistic}"] = weights.read(name).float().numpy().copy()
    if datasets:
        found = ", ".join(sorted(datasets))
        raise CheckpointError(f"{where}: expected statistics of one dataset, found those of {found}: {_TRAIN}")
    return Statistics(str(where), table, modes, 1e-8, True, {key: f["type"] for key, f in features.items()})


def statistics_file(folder: Path, name: object, step: str) -> Path:
    """Return the statistics file that a saved step names, which must be in the folder itself."""
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"checkpoint {folder}: expected the statistics of {step} in a file, found {name!r}")
    if not (folder / name).is_file():
        raise CheckpointError(
            f"checkpoint {folder}: expected {name} with the statistics of {step}, found {listing(folder)}"
        )
    return folder / name


def pixel_values(
    cameras: Mapping[str, Normaliser | None], *, smolvla: bool, old_bars: bool, path: Path
) -> PixelValues | None:
    """Return the pixels that a policy was trained with, None for the usual ones: byte / 127.5 - 1 and black bars.

    lerobot scales images x in [0, 1] by the statistics of their camera, fits them into a square, and computes 2 x - 1.
    SmolVLA's bars around an image are x = 0. Since lerobot 0.5, π0, π0.5 and π0-FAST clip resized images to [0, 1] and
    have the same bars; lerobot 0.4 clips to [-1, 1] and has bars of x = -1, which become -3.

    Args:
        cameras: How the images of each camera are scaled, by its key; None where they are not.
        smolvla: Whether the policy is a SmolVLA.
        old_bars: Whether lerobot 0.4 saved the folder.
        path: Of config.json, for errors.

    Raises:
        CheckpointError: A camera's statistics are not of three channels.
    """
    scaled = any(camera is not None for camera in cameras.values())
    scales = tuple(_channels(camera, f"{path}: {key}") for key, camera in cameras.items()) if scaled else ()
    if smolvla:
        return PixelValues(cameras=scales) if scaled else None
    if old_bars:
        return PixelValues(outside=-_WHITE, clipped=(-_WHITE, _WHITE), cameras=scales)
    return PixelValues(clipped=(_BLACK, _WHITE), cameras=scales) if scaled else None


def _channels(camera: Normaliser | None, where: str) -> ChannelScale:
    if camera is None:
        return ChannelScale()
    if len(camera.low) != 3:
        raise CheckpointError(f"{where}: expected statistics of 3 channels, got {len(camera.low)}")
    # (x - low) / span * factor + offset for x in [0, 1], in levels of 0 to 255.
    factor, offset = (2.0, -_WHITE) if camera.kind == "quantile" else (1.0, 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        shift, scale = (_WHITE * camera.low).tolist(), (factor / camera.span).tolist()
    return ChannelScale((shift[0], shift[1], shift[2]), (scale[0], scale[1], scale[2]), offset)
