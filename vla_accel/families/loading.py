"""Load a checkpoint: find its folder, its adapter and its family, and return the network with its transforms."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vla_accel.checkpoints import hub
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.checkpoints.hub import HubName
from vla_accel.checkpoints.lerobot import is_migrated
from vla_accel.checkpoints.lora import CONFIG, Lora, is_adapter, read_lora
from vla_accel.checkpoints.weights import SafetensorsWeights, listing, read_json, some
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError, unknown
from vla_accel.families.family import FAMILIES, Family, family_named
from vla_accel.files import user_path
from vla_accel.fp8 import Scales, scales_for
from vla_accel.nn.network import Network

_FILES = (".yaml", ".yml", ".json", ".npz", ".safetensors", ".pt", ".bin")
"""Suffixes of files: a name with one of them is not looked up on the hub."""
_SETTINGS = ("tokenizer", "action_horizon", "max_token_len")
"""Fields of `CheckpointSpec` that every family with a prompt honours."""
_DEPTH = 3
"""Levels of a training run's folder: checkpoints/<step>/pretrained_model."""
_log = logging.getLogger("vla_accel.checkpoints")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint, or a network with random weights.

    Attributes:
        name: The name that was passed to `load`.
        family: The family.
        model: The network.
        processor: The transforms (`families.family.Transforms`).
        folder: The checkpoint's folder; None for random weights.
        calibrated: FP8 scales of a model without a folder.
        lora: Folder of the adapter that is folded in.
        settings: The configuration that it was loaded with.
    """

    name: str
    family: Family[Any, Any, Any]
    model: Network
    processor: Any
    folder: Path | None = None
    calibrated: Scales | None = None
    lora: Path | None = None
    settings: PolicyConfig = field(default_factory=PolicyConfig)

    @property
    def kept(self) -> Path | None:
        """The folder for measurements of these weights: scales and reports."""
        return self.lora or self.folder

    def progress(self) -> AbstractContextManager[None]:
        """Show the progress of reading weights (`Network.progress`)."""
        return self.model.progress()

    @functools.cached_property
    def scales(self) -> Scales | None:
        """FP8 scales, None if there are none. Raises CheckpointError for a damaged file and for scales of other
        weights."""
        if self.calibrated is not None or self.kept is None:
            return self.calibrated
        return scales_for(self.model, self.kept)


def load(
    path_or_name: str | Path,
    settings: PolicyConfig | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    whole: bool = True,
) -> Checkpoint:
    """Load a checkpoint.

    Args:
        path_or_name: A folder, a bundled checkpoint ("demo") or a name on the hub ("lerobot/...").
        settings: Settings that the checkpoint lacks or that override it: `preset`, `checkpoint`, `default_prompt`.
        device: The device of the weights.
        dtype: Of the large products; None keeps the stored one.
        whole: Read all weights now. Otherwise they are read when the engines of a policy need them.

    Raises:
        CheckpointError: Something is missing, left over, misshaped or contradictory.
        ConfigError: A setting does not apply to this family or contradicts the checkpoint.
        DependencyError: A package is missing; the message says what to install.
    """
    settings = loaded_with = settings or PolicyConfig()
    folder, lora = base_and_lora(path_or_name, settings.checkpoint.lora)
    if lora is not None:
        settings = settings.with_lora(str(lora))
    family = family_of(folder)
    _check_settings(family, settings)
    model, processor = family.load(folder, settings)
    model = model.placed(torch.device(device), dtype)
    model = model.whole() if whole else model
    return Checkpoint(str(path_or_name), family, model, processor, folder, lora=lora, settings=loaded_with)


def _check_settings(family: Family[Any, Any, Any], settings: PolicyConfig) -> None:
    """Raise ConfigError for a setting of the checkpoint or of prompts that the family would ignore."""
    able = family.capabilities
    known = (*(_SETTINGS if able.prompt else ()), *(("lora",) if able.lora else ()), *able.settings)
    why = "which reads no prompt"
    refuse_settings(family.name, settings, known, {} if able.prompt else {"default_prompt": why, "warm_up": why})


def refuse_settings(
    name: str, settings: PolicyConfig, known: Sequence[str], unread: Mapping[str, str]
) -> None:  # fmt: skip
    """Raise ConfigError for a setting that would be ignored.

    Args:
        name: The family or policy, for the message.
        settings: The settings.
        known: The fields of `settings.checkpoint` that are read.
        unread: The other fields of `settings` that are not read, each with the reason.
    """
    usual = PolicyConfig()
    for key, value in asdict(settings.checkpoint).items():
        if key not in known and value != getattr(usual.checkpoint, key):
            raise ConfigError(f"checkpoint.{key}: {name} has no such setting, expected {', '.join(known) or 'none'}")
    for key, why in unread.items():
        if (value := getattr(settings, key)) != getattr(usual, key):
            raise ConfigError(f"{key}: expected none for {name}, {why}, got {value!r:.60}")


def base_and_lora(path_or_name: str | Path, lora: str | None = None) -> tuple[Path, Path | None]:
    """Return the folder of a checkpoint's whole weights, and that of the adapter to fold into them.

    Args:
        path_or_name: As for `load`. If it is an adapter, its configuration names the base.
        lora: An adapter's folder, or its name on the hub.

    Raises:
        CheckpointError: The checkpoint, the adapter or its base cannot be found, or the adapter has another base.
        ConfigError: Both names are adapters.
    """
    folder, name = find(path_or_name), str(path_or_name)
    if is_adapter(folder):
        if lora is not None:
            raise ConfigError(f"lora: expected a checkpoint of whole weights for {lora}, got another adapter, {name}")
        return _base_of(read_lora(folder), name), folder
    if lora is None:
        return folder, None
    if not user_path(lora).exists() and HubName.parse(lora) is None:
        raise CheckpointError(f"lora: expected an adapter's folder, or its name on the hub, got {lora!r}")
    try:
        found = find(lora)
    except CheckpointError as error:
        raise CheckpointError(f"lora: {error}") from error
    _check_base(read_lora(found), name)
    return folder, found


def _base_of(lora: Lora, name: str) -> Path:
    """Return the folder of the base that an adapter's configuration names."""
    hint = (
        f"name the base as the checkpoint, and this adapter with --lora {name}, or `checkpoint: {{lora: {name}}}` in "
        "a configuration"
    )
    if lora.base is None:
        raise CheckpointError(f"lora {lora.folder}: expected base_model_name_or_path in {CONFIG}, got none; {hint}")
    try:
        return find(lora.base)
    except CheckpointError as error:
        raise CheckpointError(
            f"lora {lora.folder}: expected the base that base_model_name_or_path in {CONFIG} names, got {lora.base!r}, "
            f"which cannot be found ({error}); {hint}"
        ) from error


def _check_base(lora: Lora, base: str) -> None:
    """Raise CheckpointError if an adapter was trained on another checkpoint than `base`, judged by the last part of
    their names. A path that does not exist here may be from another machine: a difference is only logged."""
    if lora.base is None or _last_part(lora.base) == _last_part(base):
        return
    if HubName.parse(lora.base) is None and not user_path(lora.base).exists():
        _log.warning("lora %s: trained on %s, which does not exist here; applied to %s", lora.folder, lora.base, base)
        return
    raise CheckpointError(
        f"lora {lora.folder}: expected the base {lora.base}, which its {CONFIG} names, got {base}; if that is "
        "the same checkpoint under another name, change base_model_name_or_path there"
    )


def _last_part(name: str) -> str:
    named = HubName.parse(name)
    return Path(name if named is None else named.path).name.lower()


def find(path_or_name: str | Path) -> Path:
    """Return the folder of a checkpoint. A checkpoint on the hub is fetched, or found in the hub's cache."""
    folder = local(path_or_name)
    if folder is not None:
        return folder
    named = HubName.parse(str(path_or_name))
    assert named is not None
    return hub.fetch(named)


def local(path_or_name: str | Path) -> Path | None:
    """Return the folder of a local checkpoint; None for a name that only the hub may have.

    Raises:
        CheckpointError: It is neither a folder nor a possible name on the hub.
    """
    if not isinstance(path_or_name, (str, Path)):
        raise CheckpointError(_unknown(path_or_name))
    name = str(path_or_name)
    folder = NAMED.get(name, user_path(path_or_name))
    if name and folder.is_dir():  # an empty name would mean the current folder
        return folder
    if folder.is_file():
        hint = f"; did you mean {folder.parent}?" if (folder.parent / "config.json").is_file() else ""
        raise CheckpointError(f"checkpoint: expected a folder, got the file {name!r}{hint}")
    if folder.suffix.lower() in _FILES:
        raise CheckpointError(
            f"checkpoint: expected a folder or a name on the hub, got {name!r}, a file that does not exist"
        )
    named = HubName.parse(name)
    if named is None:
        raise CheckpointError(_unknown(name))
    if named.folder and Path(named.repo).is_dir():  # a misspelled path, not a repository
        nearest = next(parent for parent in folder.parents if parent.is_dir())
        raise CheckpointError(f"checkpoint: expected a folder, got {name!r}; {nearest} contains {listing(nearest)}")
    return None


def _unknown(name: object) -> str:
    form = "; a name on the hub has the form owner/name[@revision][/folder]" if "/" in str(name) else ""
    return unknown("checkpoint", name, NAMED, "a folder or ") + form


def family_of(folder: Path) -> Family[Any, Any, Any]:
    """Return the family of a checkpoint's folder. Raises CheckpointError if there is none."""
    path = folder / "config.json"
    content = read_json(path) if path.is_file() else {}
    if content and is_migrated(folder) and (missing := [n for n in ("type", "input_features") if n not in content]):
        found = some(list(content))
        raise CheckpointError(f"{path}: expected {' and '.join(missing)}, as lerobot saves it, found {found}")
    stored = any(folder.glob("model*.safetensors"))
    shapes = SafetensorsWeights(folder).shapes if stored else {}
    families = [family_named(name) for name in FAMILIES]
    for family in families:
        if family.recognises(content, shapes):
            return family
    known = " or ".join(FAMILIES)
    for family in families:
        if hint := family.hint(folder):
            raise CheckpointError(f"checkpoint {folder}: {hint}")
    if "type" not in content and (found := [n for n in ("input_features", "input_shapes") if n in content]):
        raise CheckpointError(
            f"{path}: expected type, input_features, output_features and normalization_mapping, as lerobot saves them "
            f"since 2025, found {found[0]} without type; fetch the checkpoint's newest revision, or write them there"
        )
    for word, what in (("type", "policy"), ("family", "family"), ("kind", "kind")):
        if word in content:
            raise CheckpointError(f"{path}: expected a {what} of type {known}, got {content[word]!r}")
    if not content and not stored:
        inside = _inside(folder)
        hint = f"; did you mean {' or '.join(inside)}?" if inside else ""
        raise CheckpointError(f"checkpoint {folder}: expected config.json, found {listing(folder)}{hint}")
    if not stored:
        raise CheckpointError(f"checkpoint {folder}: expected model.safetensors, found {listing(folder)}")
    raise CheckpointError(f"checkpoint {folder}: expected weights of {known}, found {', '.join(list(shapes)[:8])}")


def _inside(folder: Path) -> list[str]:
    """Return up to four folders with a checkpoint below a training run's folder, the last one first."""
    levels = ("/".join(["*"] * depth + ["*config.json"]) for depth in range(1, _DEPTH + 1))
    files = [str(file.relative_to(folder).as_posix()) for level in levels for file in folder.glob(level)]
    found = hub.checkpoint_folders(files)
    found = sorted(found, key=lambda name: "last" not in name.split("/"))
    return [str(folder / name) for name in found[:4]]
