"""What `runtime.Module` is on a GPU: kernels of one source, compiled, loaded and launched, in the emulator."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.cuda_emulator.translate import HERE, translate
from vla_accel.files import replacing

# Plain accesses to memory, and bad alignment, are announced to the runtime, which is no sanitizer's.
KERNELS = ("-Og", "-fsanitize=thread,alignment", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-w")
# Jumps between stacks are no mistake; macOS has contexts in X/Open's part of its headers.
RUNTIME = ("-O2", "-U_FORTIFY_SOURCE", "-D_XOPEN_SOURCE=700", "-D_DARWIN_C_SOURCE", "-Wno-deprecated-declarations")


class EmulationError(Exception):
    """A kernel did what it must not, or a source does not compile."""


def compiler() -> str | None:
    """The system's C++ compiler; None where there is none."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EmulationError(f"{' '.join(command)}:\n{done.stderr[:4000]}")


def _compiled(source: Path, target: Path, options: Sequence[str]) -> None:
    _run(compiler() or "c++", "-std=c++17", "-fPIC", *options, f"-I{HERE}", "-c", str(source), "-o", str(target))


def _library(folder: Path, source: str, kernels: Sequence[str]) -> ctypes.CDLL:
    """The kernels and their machine, which is theirs alone; found again in `folder` where nothing has changed."""
    text = translate(source, kernels)
    machine = "".join(path.read_text() for path in sorted(HERE.glob("*.h")) + sorted(HERE.glob("*.cpp")))
    options = " ".join((compiler() or "", *KERNELS, *RUNTIME))

    def named(kind: str, *parts: str) -> Path:
        return folder / f"{kind}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:24]}"

    library = named("kernels", options, machine, text).with_suffix(".so")
    if not library.exists():
        runtime = [named(path.stem, options, machine).with_suffix(".o") for path in sorted(HERE.glob("*.cpp"))]
        for path in runtime:
            if not path.exists():
                with replacing(path) as temporary:
                    _compiled(HERE / f"{path.name.split('-')[0]}.cpp", temporary, RUNTIME)
        with tempfile.TemporaryDirectory() as place, replacing(library) as temporary:
            (written := Path(place, "kernels.cpp")).write_text(text)
            _compiled(written, written.with_suffix(".o"), KERNELS)
            _run(compiler() or "c++", "-shared", "-o", *map(str, (temporary, written.with_suffix(".o"), *runtime)))
    return ctypes.CDLL(str(library))


class EmulatedModule:
    """As `runtime.Module`; what the kernels may touch must be said before a launch (`allow`). `folder`: where compiled
    code is kept; `seed`: of the order in which warps run, one for each launch from here on."""

    def __init__(
        self, source: str, shared: Mapping[str, int], architecture: str, device: torch.device, *, folder: Path,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.source, self.shared, self.seed = source, dict(shared), seed
        self.launches: list[str] = []
        self._allowed: dict[int, int] = {}
        self._library = _library(folder, source, list(shared))
        self._library.emulator_launch.restype = ctypes.c_char_p
        # A loaded library stays loaded; its blocks, of up to 100 MB, end with the module.
        weakref.finalize(self, self._library.emulator_release)

    def allow(self, *tensors: Tensor) -> None:
        """From now on kernels may touch these tensors, and no others."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        if storages == self._allowed:
            return
        self._allowed = storages
        self._library.emulator_forget()
        for begin, size in storages.items():
            self._library.emulator_allow(ctypes.c_void_p(begin), ctypes.c_size_t(size))

    def clusters_at_once(self, name: str, threads: int, cluster: int) -> int:
        """As many as anybody may ask for."""
        return 1000

    def blocks_at_once(self, name: str, threads: int) -> int:
        """As many as anybody may ask for."""
        return 1000

    def launch(
        self, name: str, blocks: int, threads: int, arguments: Sequence[Any], *, cluster: int = 1,
        dependent: bool = False, cooperative: bool = False,
    ) -> None:  # fmt: skip
        """Run a grid to its end. Raises EmulationError with what went wrong."""
        self.seed += 1
        self.launches.append(name)
        values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        function = ctypes.cast(getattr(self._library, f"emulated_{name}"), ctypes.c_void_p)
        error = self._library.emulator_launch(
            name.encode(),
            function,
            values,
            blocks,
            threads,
            cluster,
            self.shared[name],
            int(dependent),
            int(cooperative),
            self.seed,
        )
        if error:
            raise EmulationError(error.decode())
