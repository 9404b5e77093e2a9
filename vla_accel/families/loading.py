"""A checkpoint, wherever it is and whoever wrote it, resolved once: its model, family, transforms and scales.

Folders, names on the hub, and the bundled checkpoints. Which family a folder belongs to is the families' to say. Knows
no model and no engine.
"""

from __future__ import annotations

import functools
import logging
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
from vla_accel.config import CheckpointSpec, PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError, unknown
from vla_accel.families.family import FAMILIES, Family, family_named
from vla_accel.files import user_path
from vla_accel.fp8 import Scales, scales_for
from vla_accel.nn.network import Network

_FILES = (".yaml", ".yml", ".json", ".npz", ".safetensors", ".pt", ".bin")
"""Endings of files: a name with one of them is not looked up on the hub."""
_SETTINGS = ("tokenizer", "action_horizon", "max_token_len", "lora")  # of every family
# Levels of a run's folder: checkpoints/<step>/pretrained_model.
_DEPTH = 3
_log = logging.getLogger("vla_accel.checkpoints")


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
    """The folder of an adapter's base, as its configuration names it."""
    how = (
        f"name the base as the checkpoint, and this adapter with --lora {name}, or `checkpoint: {{lora: {name}}}` in "
        "a configuration"
    )
    if lora.base is None:
        raise CheckpointError(f"lora {lora.folder}: expected base_model_name_or_path in {CONFIG}, got none; {how}")
    try:
        return find(lora.base)
    except CheckpointError as error:
        raise CheckpointError(
            f"lora {lora.folder}: expected the base that base_model_name_or_path in {CONFIG} names, got {lora.base!r}, "
            f"which cannot be found ({error}); {how}"
        ) from error


def _check_base(lora: Lora, base: str) -> None:
    """Raise CheckpointError if an adapter says that it was trained on another checkpoint than `base`, by the last part
    of their names. A path of another machine is no sure name: if it differs, the log says so."""
    if lora.base is None or _last_part(lora.base) == _last_part(base):
        return
    if HubName.parse(lora.base) is None and not Path(lora.base).exists():
        _log.warning("lora %s: trained on %s, which is not here; folded into %s", lora.folder, lora.base, base)
        return
    raise CheckpointError(
        f"lora {lora.folder}: expected on top of {lora.base}, as its {CONFIG} says, got {base}; if that is "
        "the same checkpoint under another name, change base_model_name_or_path there"
    )


def _last_part(name: str) -> str:
    named = HubName.parse(name)
    return Path(name if named is None else named.path).name.lower()


def find(path_or_name: str | Path) -> Path:
    """Return the folder of a checkpoint. One on the hub is fetched, or found in the hub's cache."""
    folder = local(path_or_name)
    if folder is not None:
        return folder
    named = HubName.parse(str(path_or_name))
    assert named is not None
    return hub.fetch(named)


def local(path_or_name: str | Path) -> Path | None:
    """Return the folder of a checkpoint that is here; None for a name that only the hub may have.

    Raises:
        CheckpointError: The name can be neither.
    """
    if not isinstance(path_or_name, (str, Path)):
        raise CheckpointError(_unknown(path_or_name))
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
    named = HubName.parse(name)
    if named is None:
        raise CheckpointError(_unknown(name))
    if named.folder and Path(named.repo).is_dir():  # a path that is misspelt, not a repository of that name
        nearest = next(parent for parent in folder.parents if parent.is_dir())
        raise CheckpointError(f"checkpoint: expected a folder, got {name!r}; {nearest} holds {listing(nearest)}")
    return None


def _unknown(name: object) -> str:
    form = "; a name on the hub has the form owner/name[@revision][/folder]" if "/" in str(name) else ""
    return unknown("checkpoint", name, NAMED, "a folder or ") + form


def family_of(folder: Path) -> Family:
    """The family whose checkpoint a folder holds. Raises CheckpointError where there is none."""
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
    """The folders with a checkpoint below a run's folder, the last one first; at most four."""
    levels = ("/".join(["*"] * depth + ["*config.json"]) for depth in range(1, _DEPTH + 1))
    files = [str(file.relative_to(folder).as_posix()) for level in levels for file in folder.glob(level)]
    found = hub.checkpoint_folders(files)
    found = sorted(found, key=lambda name: "last" not in name.split("/"))
    return [str(folder / name) for name in found[:4]]
