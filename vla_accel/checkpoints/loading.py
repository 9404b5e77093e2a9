"""A checkpoint, wherever it is and whoever wrote it, resolved once: its model, family, transforms and scales.

Folders, names on the hub, and the bundled checkpoints. Which family a folder belongs to is the families' to say. Knows
no model and no engine.
"""

from __future__ import annotations

import functools
import re
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vla_accel.checkpoints.bundled import NAMED
from vla_accel.checkpoints.lora import CONFIG, check_base, is_adapter, read_lora
from vla_accel.checkpoints.weights import SafetensorsWeights, listing, read_json
from vla_accel.config import CheckpointSpec, PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError, DependencyError, unknown
from vla_accel.files import user_path
from vla_accel.fp8 import Scales, scales_for
from vla_accel.models.family import FAMILIES, Family, family_named
from vla_accel.models.network import Network

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "assets/**")
_FILES = (".yaml", ".yml", ".json", ".npz", ".safetensors", ".pt", ".bin")
"""Endings of files: a name with one of them is not looked for on the hub."""
_SETTINGS = ("tokenizer", "action_horizon", "max_token_len")  # of every family


@dataclass(frozen=True)
class Checkpoint:
    """A model that was loaded, or made, and all that belongs to it.

    `name`: as it was asked for; `processor`: the transforms (`models.family.Transforms`); `folder`: where it lies, None
    for random weights; `calibrated`: FP8 scales of a model without a folder; `lora`: folder of the adapter that was
    folded in.
    """

    name: str
    family: Family
    model: Network
    processor: Any
    folder: Path | None = None
    calibrated: Scales | None = None
    lora: Path | None = None
    settings: PolicyConfig = field(default_factory=PolicyConfig)
    """What it was loaded with."""

    @property
    def kept(self) -> Path | None:
        """The folder that holds what was measured of these very weights: scales and reports."""
        return self.lora or self.folder

    def progress(self) -> AbstractContextManager[None]:
        """As the model's (`Network.progress`)."""
        return self.model.progress()

    @functools.cached_property
    def scales(self) -> Scales | None:
        """FP8 scales, None where there are none; read when first asked for. Raises CheckpointError for a damaged file
        and for scales of other weights."""
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
    """The checkpoint with its weights where and what they are to be.

    Args: `path_or_name`: a folder, a bundled checkpoint ("demo") or a name on the hub ("lerobot/…"); `settings`: what
    the checkpoint does not say (`preset`, `checkpoint`, `default_prompt`); `dtype`: of the large products, None keeps
    what is stored; `whole`: read all weights now. Otherwise a family that can leaves them in the file until a policy's
    engines ask for a part, and a policy keeps on its device what its engines read, once.
    Raises CheckpointError for anything missing, left over, misshaped or contradictory, ConfigError for settings that
    cannot be, DependencyError that says what to install.
    """
    settings = loaded_with = settings or PolicyConfig()
    folder, lora = base_and_lora(path_or_name, settings.checkpoint.lora)
    if lora is not None:
        settings = settings.with_lora(str(lora))
    family = family_of(folder)
    given, usual, known = asdict(settings.checkpoint), asdict(CheckpointSpec()), (*_SETTINGS, *family.settings)
    for name in given:
        if name not in known and given[name] != usual[name]:
            raise ConfigError(f"checkpoint.{name}: {family.name} has no such setting, expected {', '.join(known)}")
    model, processor = family.load(folder, settings, device=device, dtype=dtype)
    model = model.whole() if whole else model
    return Checkpoint(str(path_or_name), family, model, processor, folder, lora=lora, settings=loaded_with)


def base_and_lora(path_or_name: str | Path, lora: str | None = None) -> tuple[Path, Path | None]:
    """The folder of a checkpoint's whole weights, and that of the adapter to fold into them. What is named may be an
    adapter itself, which names its base. Raises CheckpointError, and ConfigError for two adapters."""
    folder, name = find(path_or_name), str(path_or_name)
    if is_adapter(folder):
        if lora is not None:
            raise ConfigError(f"lora: expected a checkpoint of whole weights for {lora}, got another adapter, {name}")
        base = read_lora(folder).base
        if base is None:
            raise CheckpointError(
                f"lora {folder}: expected base_model_name_or_path in {CONFIG}, got none; name the base as the "
                f"checkpoint, and this with --lora {name}, or `checkpoint: {{lora: {name}}}` in a configuration"
            )
        return find(base), folder
    if lora is None:
        return folder, None
    if not user_path(lora).exists() and not _HUB_NAME.fullmatch(lora):
        raise CheckpointError(f"lora: expected an adapter's folder, or its name on the hub, got {lora!r}")
    try:
        found = find(lora)
    except CheckpointError as error:
        raise CheckpointError(f"lora: {error}") from error
    check_base(read_lora(found), name)
    return folder, found


def find(path_or_name: str | Path) -> Path:
    """The folder of a checkpoint; one named on the hub is fetched, or found in the hub's cache."""
    folder, name = local(path_or_name), str(path_or_name)
    if folder is not None:
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DependencyError(
            f"checkpoint: {name!r} is no folder here; to fetch it from the hub, pip install 'vla_accel[checkpoints]'"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    # The hub's errors have no common base: ValueError for a bad name, OSError for the network, its own for the rest.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"checkpoint: {name!r} is no folder here, and could not be fetched from the hub: {reason}"
        ) from error


def local(path_or_name: str | Path) -> Path | None:
    """The folder of a checkpoint that is here; None of one that only the hub may have. Raises CheckpointError for what
    neither can be."""
    if not isinstance(path_or_name, (str, Path)):
        raise CheckpointError(unknown("checkpoint", path_or_name, NAMED, "a folder or "))
    name = str(path_or_name)
    folder = NAMED.get(name, user_path(path_or_name))
    if name and folder.is_dir():  # an empty name would be the current folder
        return folder
    if folder.is_file():
        hint = f"; did you mean {folder.parent}?" if (folder.parent / "config.json").is_file() else ""
        raise CheckpointError(f"checkpoint: expected a folder, got the file {name!r}{hint}")
    if folder.suffix.lower() in _FILES:
        raise CheckpointError(
            f"checkpoint: expected a folder or a name on the hub, got {name!r}, a file that does not exist"
        )
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(unknown("checkpoint", name, NAMED, "a folder or "))
    return None


def family_of(folder: Path) -> Family:
    """The family whose checkpoint a folder holds. Raises CheckpointError where there is none."""
    path = folder / "config.json"
    content = read_json(path) if path.is_file() else {}
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
    for word, what in (("type", "policy"), ("family", "family"), ("kind", "kind")):
        if word in content:
            raise CheckpointError(f"{path}: expected a {what} of type {known}, got {content[word]!r}")
    if not content and not stored:
        raise CheckpointError(f"checkpoint {folder}: expected config.json, found {listing(folder)}")
    if not stored:
        raise CheckpointError(f"checkpoint {folder}: expected model.safetensors, found {listing(folder)}")
    raise CheckpointError(f"checkpoint {folder}: expected weights of {known}, found {', '.join(list(shapes)[:8])}")
