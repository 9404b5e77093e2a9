"""Checkpoints on the Hugging Face hub: their names, and which files of a repository are fetched.

Only the files of one checkpoint are fetched: never a pickle, an optimizer's state or another checkpoint.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from vla_accel.checkpoints.weights import some
from vla_accel.errors import CheckpointError, DependencyError

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9_-][\w.-]*/[\w.-]+)(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[\w.-]+))?"
    r"(?P<folder>(?:/[\w-][\w.-]*)*)"
)
_SIGNS = ("config.json", "adapter_config.json")
_MAIN = (*_SIGNS, "model.safetensors", "model.safetensors.index.json")
# Of the files directly in a checkpoint's folder, and of those deeper: openpi's and RLinf's statistics, FAST's
# tokenizer, and the processor of Isaac-GR00T's output folders.
_FILES = ("*.json", "*.safetensors", "tokenizer*")
_NOT_FILES = ("optimizer*", "scheduler*", "*.bin", "*.pt", "*.pth", "*.pkl")
_DEEPER = ("*/norm_stats.json", "*/*/norm_stats.json", "fast/*.json", "processor/*.json")


@dataclass(frozen=True)
class HubName:
    """A checkpoint on the hub.

    Attributes:
        repo: The repository, `owner/name`.
        folder: The checkpoint's folder in it, empty for the repository's root.
        revision: A branch, a tag, a commit or `refs/pr/<number>`; None for the default branch.
    """

    repo: str
    folder: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse `owner/name[@revision][/folder]`; return None for any other text."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        return cls(match["repo"], match["folder"].strip("/"), match["revision"])

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo}{revision}{self.folder and '/'}{self.folder}"

    @property
    def path(self) -> str:
        """The name without its revision."""
        return str(HubName(self.repo, self.folder))


def fetch(name: HubName) -> Path:
    """Fetch the missing files of a checkpoint and return its folder in the hub's cache.

    Without a connection, a checkpoint in the cache is used.

    Raises:
        CheckpointError: The repository cannot be reached, or holds no checkpoint in this folder.
        DependencyError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    except ImportError as error:
        raise DependencyError(
            f"checkpoint: {str(name)!r} is not a folder here; to fetch it from the hub, pip install "
            "'vla_accel[checkpoints]'"
        ) from error
    # The hub's errors have no common base: ValueError for a bad name, OSError for the network, its own for the rest.
    try:
        # NOTE: `list_repo_files` retries for 20 s without a connection; this request is made once.
        siblings = HfApi().model_info(name.repo, revision=name.revision).siblings or []
    except Exception as error:
        for file in _MAIN:
            place = f"{name.folder and name.folder + '/'}{file}"
            found = try_to_load_from_cache(name.repo, place, revision=name.revision)
            if isinstance(found, str):
                return Path(found).parent
        raise _failed(name, error) from error
    patterns = [glob.escape(file) for file in _chosen(name, [s.rfilename for s in siblings])]
    try:
        root = snapshot_download(name.repo, revision=name.revision, allow_patterns=patterns)
    except Exception as error:
        raise _failed(name, error) from error
    return Path(root) / name.folder


def checkpoint_folders(files: Iterable[str]) -> list[str]:
    """Return the folders below the root that hold a checkpoint or an adapter, from the paths of all files."""
    folders = {str(path.parent) for path in map(PurePosixPath, files) if path.name in _SIGNS}
    return sorted(folders - {"."})


def _chosen(name: HubName, files: Iterable[str]) -> list[str]:
    """Return the files to fetch. Raises CheckpointError if the folder holds no checkpoint."""
    start = f"{name.folder}/" if name.folder else ""
    below = [file.removeprefix(start) for file in files if file.startswith(start)]
    if not any("/" not in file and (file in _SIGNS or fnmatchcase(file, "model*.safetensors")) for file in below):
        others = checkpoint_folders(below if below else files)
        at = HubName(name.repo, name.folder if below else "", name.revision)
        if others:
            known = some([f"{at}/{folder}" for folder in others])
            raise CheckpointError(f"checkpoint: expected a folder with a checkpoint, one of {known}, got {str(name)!r}")
        found = some(sorted({file.split("/")[0] for file in below})) or "no such folder"
        raise CheckpointError(f"checkpoint: {str(name)!r}: expected config.json, found {found}")
    return [start + file for file in below if _wanted(file)]


def _wanted(file: str) -> bool:
    """Return whether a file, by its path in the checkpoint's folder, belongs to the checkpoint."""
    if "/" in file:
        path = PurePosixPath(file)
        asset = path.parts[0] == "assets" and path.name == "norm_stats.json"
        return asset or any(path.match(p) and len(path.parts) == p.count("/") + 1 for p in _DEEPER)
    wanted = any(fnmatchcase(file, pattern) for pattern in _FILES)
    return wanted and not any(fnmatchcase(file, pattern) for pattern in _NOT_FILES)


def _failed(name: HubName, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())
    return CheckpointError(
        f"checkpoint: {str(name)!r} is not a folder here and could not be fetched from the hub: {reason}"
    )
