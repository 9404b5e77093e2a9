"""Compile CUDA C++ with NVRTC, load it with the driver, launch it on its device's current stream. Knows no kernels.

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
_CLUSTER, _DEPENDENT = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, …_PROGRAMMATIC_STREAM_SERIALIZATION


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC of torch's CUDA version: already loaded, on the loader's path, or in torch's own wheels."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.path.dirname(torch.__path__[0])}
    places = [name, *(p for root in sorted(roots) for p in glob.glob(f"{root}/nvidia/*/lib/{name}"))]
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue  # the next place; none of them is an error, below
    raise EngineError(f"CUDA kernels need {name}, which CUDA builds of torch bring; looked at {', '.join(places)}")


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def check_driver(status: int, what: str) -> None:
    """Raise EngineError for an error that the driver returned from `what`."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"{what}: CUDA error {status} ({(text.value or b'unknown').decode()})")


MACROS: dict[str, int] = {}
"""Macros before every source, set before anything is loaded. For tests: INJECT_DELAY, WAIT_TICKS (ptx.cu)."""


def source_of(macros: Mapping[str, int], *names: str, generated: str = "") -> str:
    """Macros, `ptx.cu`, `generated` code, then the files of these names ("gemm/hopper/epilogue") below this folder."""
    folder = Path(__file__).parent
    ptx, *rest = ((folder / f"{name}.cu").read_text() for name in ("ptx", *names))
    return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + ptx + generated + "".join(rest)


@functools.cache
def compiled(source: str, architecture: str) -> bytes:
    """`compile_source`, found again on disk where the same compiler made it before: below the user's cache folder, as a
    hash of the code and the code. A file that was cut off is compiled again, with a line on the log; one that others
    may write to is refused."""
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
        _log.warning("%s: it is damaged, and its kernels are compiled again", path)
    with phase("compile"):
        code = compile_source(source, architecture)
    try:
        with replacing_privately(path) as temporary:
            temporary.write_bytes(hashlib.sha256(code).digest() + code)
    except OSError as error:
        _log.warning("%s: compiled kernels cannot be kept, and are compiled at every start: %s", path, error)
    return code


def compiled_folder() -> Path:
    """Where compiled kernels are kept."""
    return cache_folder() / "kernels"


@functools.cache
def compile_source(source: str, architecture: str) -> bytes:
    """Machine code of `source` for e.g. "sm_90a". Raises EngineError with the compiler's log."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    if status:
        raise EngineError(f"NVRTC: could not take the source (status {status})")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise EngineError(f"NVRTC: the source does not compile for {architecture}:\n{log.value.decode()[:4000]}")
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a device the current one, if it is not: kernels are launched in the current device's context."""
    if device.type != "cuda" or device.index is None or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def synchronize(device: torch.device) -> None:
    """Wait for all that is on the device's current stream. Raises EngineError where a kernel gave up waiting."""
    try:
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError as error:
        if "unspecified launch failure" not in str(error):
            raise
        raise EngineError(
            f"{device}: a kernel ended itself, most likely because what it waited for did not come within 10 s: a lost "
            "hand-off between blocks, or a GPU that others keep busy. Start again; `native: {kernels: portable}` does "
            "without the kernels that wait for each other"
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


class _Sent:
    """Takes the place of a module that is being compiled."""

    def launch(self, *_: Any, **__: Any) -> None:
        """Nothing."""


def load_module(source: str, shared: Mapping[str, int], architecture: str, device: torch.device) -> Module:
    """A `Module`, loaded once for all who ask for the same: code is never unloaded."""
    source = "".join(f"#define {name} {value}\n" for name, value in MACROS.items()) + source
    key = (source, tuple(sorted(shared.items())), architecture, str(device))
    submit = current(device).submit
    if key not in _LOADED and submit is not None:
        submit(source, architecture)
        return _Sent()  # type: ignore[return-value]
    if key not in _LOADED:
        _LOADED[key] = Module(source, shared, architecture, device)
    return _LOADED[key]


_LOADED: dict[tuple[Any, ...], Module] = {}


class Module:
    """Kernels of one source, loaded on one device. `shared`: dynamic shared memory of each kernel, in bytes."""

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
                status = driver().cuFuncSetAttribute(function, _ANY_CLUSTER, 1)
                check_driver(status, f"kernel {name}: clusters of more than eight")
                self._functions[name] = function

    def clusters_at_once(self, name: str, threads: int, cluster: int) -> int:
        """Clusters of so many blocks that the device itself says it can hold at once (and nothing else beside them)."""
        attribute = (_Attribute * 1)()
        attribute[0].id = _CLUSTER
        attribute[0].value[:3] = (cluster, 1, 1)
        config = _Config(cluster, 1, 1, threads, 1, 1, self.shared[name], None, ctypes.addressof(attribute), 1)
        found = ctypes.c_int()
        with on(self.device):
            status = driver().cuOccupancyMaxActiveClusters(
                ctypes.byref(found), self._functions[name], ctypes.byref(config)
            )
        if status == _INVALID_CLUSTER:
            return 0
        check_driver(status, f"asking for clusters of {cluster} blocks of {name}")
        return found.value

    def launch(
        self, name: str, blocks: int, threads: int, arguments: Sequence[Any], *, cluster: int = 1,
        dependent: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue on the device's current stream; `arguments` are ctypes values in the kernel's order.

        `cluster`: blocks of a cluster. `dependent`: programmatic dependence: the kernel may start before its
        predecessor has finished, and waits for it itself.
        """
        attributes = (_Attribute * 2)()
        count = 0
        if cluster > 1:
            attributes[count].id = _CLUSTER
            attributes[count].value[:3] = (cluster, 1, 1)
            count += 1
        if dependent:
            attributes[count].id = _DEPENDENT
            attributes[count].value[0] = 1
            count += 1
        stream = torch.cuda.current_stream(self.device).cuda_stream
        config = _Config(blocks, 1, 1, threads, 1, 1, self.shared[name], stream, ctypes.addressof(attributes), count)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        with on(self.device):
            status = driver().cuLaunchKernelEx(ctypes.byref(config), self._functions[name], pointers, None)
        check_driver(status, f"launch of {name}")
