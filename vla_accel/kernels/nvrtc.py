"""Compile CUDA C++ with NVRTC, load it with the driver, and launch it on its device's current stream.

A launch can be captured into a CUDA graph. Arguments are ctypes values, structures included, passed by value.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from vla_accel.errors import EngineError
from vla_accel.files import cache_folder, replacing_privately, require_private
from vla_accel.kernels.phases import phase
from vla_accel.runtime import current

_log = logging.getLogger("vla_accel")

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ANY_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_INVALID_CLUSTER = 912  # CUDA_ERROR_INVALID_CLUSTER_SIZE
# CU_LAUNCH_ATTRIBUTE_COOPERATIVE, …_CLUSTER_DIMENSION, …_PROGRAMMATIC_STREAM_SERIALIZATION
_COOPERATIVE, _CLUSTER, _DEPENDENT = 2, 4, 6


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Return the NVRTC of torch's CUDA version: already loaded, on the loader's path, or in torch's own wheels."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.path.dirname(torch.__path__[0])}
    paths = [name, *(p for root in sorted(roots) for p in glob.glob(f"{root}/nvidia/*/lib/{name}"))]
    for path in paths:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise EngineError(f"CUDA kernels need {name}, which CUDA builds of torch include; not found at {', '.join(paths)}")


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def check_driver(status: int, what: str) -> None:
    """Raise EngineError for an error that the driver returned from `what`."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"{what}: CUDA error {status} ({(text.value or b'unknown').decode()})")


MACROS: dict[str, int] = {}
"""Macros of every source, for tests: INJECT_DELAY, WAIT_TICKS (ptx.cu). Set them before anything is loaded."""


def source_of(macros: Mapping[str, int], *names: str, generated: str = "") -> str:
    """Return a source: macros, `ptx.cu`, `generated` code, then these files below this folder ("gemm/hopper/gemm")."""
    folder = Path(__file__).parent
    ptx, *rest = ((folder / f"{name}.cu").read_text() for name in ("ptx", *names))
    return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + ptx + generated + "".join(rest)


@functools.cache
def compiled(source: str, architecture: str) -> bytes:
    """`compile_source`, with a cache on disk, in the user's cache folder. A file holds a hash of the code and the code.

    A damaged file is logged and compiled again. A file that other users may write to is refused.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = f"{major.value}.{minor.value} {torch.version.cuda} {architecture} {source}"
    path = compiled_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if path.is_file():
        require_private(path.parent)
        require_private(path)
        content = path.read_bytes()
        digest, code = content[:32], content[32:]
        if hashlib.sha256(code).digest() == digest:
            return code
        _log.warning("%s: the file is damaged; compiling its kernels again", path)
    with phase("compile"):
        code = compile_source(source, architecture)
    try:
        with replacing_privately(path) as temporary:
            temporary.write_bytes(hashlib.sha256(code).digest() + code)
    except OSError as error:
        _log.warning("%s: cannot write compiled kernels, so every start compiles them again: %s", path, error)
    return code


def compiled_folder() -> Path:
    """Return the folder of compiled kernels."""
    return cache_folder() / "kernels"


@functools.cache
def compile_source(source: str, architecture: str) -> bytes:
    """Return the machine code of a source for e.g. "sm_90a". Raises EngineError with the compiler's log."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    if status:
        raise EngineError(f"NVRTC: cannot create a program from the source (status {status})")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status:
            log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
            raise EngineError(f"NVRTC: the source does not compile for {architecture}:\n{log[:4000]}")
        return _output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _output(get_size: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    output = ctypes.create_string_buffer(size.value)
    get(program, output)
    return output.raw


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a device the current one: kernels are launched in the current device's context."""
    if device.type != "cuda" or device.index is None or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def synchronize(device: torch.device) -> None:
    """Wait for the device's current stream. Raises EngineError if a kernel gave up waiting for another block."""
    try:
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError as error:
        if "unspecified launch failure" not in str(error):
            raise
        raise EngineError(
            f"{device}: a kernel stopped itself, most likely after waiting 10 s for another block: a lost signal, or a "
            "GPU that other programs keep busy. Start again; `native: {kernels: triton}` avoids kernels whose blocks "
            "wait for each other"
        ) from error


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


@contextlib.contextmanager
def submitting() -> Iterator[Callable[[str, str], object]]:
    """Yield a `Runtime.submit`. At the end all submitted sources are compiled. An error is raised where a kernel is
    loaded."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # A kernel that is launched in every layer is compiled once.
        yield functools.cache(functools.partial(pool.submit, compiled))


class _Submitted:
    """A module that is being compiled: launches do nothing."""

    def launch(self, *_: Any, **__: Any) -> None:
        return

    def blocks_at_once(self, *_: Any) -> int:
        return 1 << 30


def load_module(source: str, shared: Mapping[str, int], architecture: str, device: torch.device) -> Module:
    """Return a `Module`, loaded once and never unloaded. With `Runtime.submit` a new module is only compiled."""
    source = "".join(f"#define {name} {value}\n" for name, value in MACROS.items()) + source
    key = (source, tuple(sorted(shared.items())), architecture, str(device))
    submit = current(device).submit
    if key not in _LOADED and submit is not None:
        submit(source, architecture)
        return _Submitted()  # type: ignore[return-value]
    if key not in _LOADED:
        _LOADED[key] = Module(source, shared, architecture, device)
    return _LOADED[key]


_LOADED: dict[tuple[Any, ...], Module] = {}


class Module:
    """Kernels of one source, loaded on one device. `shared`: bytes of dynamic shared memory by kernel."""

    def __init__(self, source: str, shared: Mapping[str, int], architecture: str, device: torch.device) -> None:
        code = compiled(source, architecture)
        self.shared = dict(shared)
        self.device = device
        self._module = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the context current
            check_driver(driver().cuModuleLoadData(ctypes.byref(self._module), code), "loading CUDA kernels")
            for name, size in self.shared.items():
                function = ctypes.c_void_p()
                status = driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
                check_driver(status, f"finding kernel {name}")
                status = driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, size)
                check_driver(status, f"kernel {name}: {size} bytes of shared memory")
                if architecture.endswith("a"):  # GPUs before Hopper have no clusters.
                    status = driver().cuFuncSetAttribute(function, _ANY_CLUSTER, 1)
                    check_driver(status, f"kernel {name}: clusters of more than eight")
                self._functions[name] = function

    def clusters_at_once(self, name: str, threads: int, cluster: int) -> int:
        """Return how many clusters of so many blocks run at once on an idle device."""
        attributes = _attributes({_CLUSTER: (cluster, 1, 1)})
        config, found = self._config(name, cluster, threads, attributes), ctypes.c_int()
        with on(self.device):
            status = driver().cuOccupancyMaxActiveClusters(
                ctypes.byref(found), self._functions[name], ctypes.byref(config)
            )
        if status == _INVALID_CLUSTER:
            return 0
        check_driver(status, f"occupancy of clusters of {cluster} blocks of {name}")
        return found.value

    def blocks_at_once(self, name: str, threads: int) -> int:
        """Return how many blocks of so many threads run at once on an idle device."""
        each = ctypes.c_int()
        with on(self.device):
            status = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(each), self._functions[name], threads, ctypes.c_size_t(self.shared[name])
            )
        check_driver(status, f"occupancy of blocks of {name}")
        return each.value * torch.cuda.get_device_properties(self.device).multi_processor_count

    def launch(
        self, name: str, blocks: int, threads: int, arguments: Sequence[Any], *, cluster: int = 1,
        dependent: bool = False, cooperative: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue a kernel on the device's current stream.

        Args:
            arguments: ctypes values in the kernel's order.
            cluster: blocks of a cluster.
            dependent: the kernel may start before its predecessor has finished, and waits for it itself.
            cooperative: the blocks wait for each other; the driver starts all of them together or refuses the launch.
        """
        attributes = _attributes(
            ({_CLUSTER: (cluster, 1, 1)} if cluster > 1 else {})
            | ({_DEPENDENT: (1,)} if dependent else {})
            | ({_COOPERATIVE: (1,)} if cooperative else {})
        )
        config = self._config(name, blocks, threads, attributes)
        config.stream = torch.cuda.current_stream(self.device).cuda_stream
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        with on(self.device):
            status = driver().cuLaunchKernelEx(ctypes.byref(config), self._functions[name], pointers, None)
        check_driver(status, f"launch of {name}")

    def _config(self, name: str, blocks: int, threads: int, attributes: Any) -> _Config:
        # The structure has only the address of the attributes: the caller keeps them.
        address, count = ctypes.addressof(attributes), len(attributes)
        return _Config(blocks, 1, 1, threads, 1, 1, self.shared[name], None, address, count)


def _attributes(values: Mapping[int, tuple[int, ...]]) -> Any:
    """Return the CUlaunchAttribute array of these values by attribute."""
    attributes = (_Attribute * len(values))()
    for attribute, (kind, value) in zip(attributes, values.items(), strict=True):
        attribute.id, attribute.value[: len(value)] = kind, value
    return attributes
