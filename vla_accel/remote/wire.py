"""openpi's wire format: msgpack with NumPy arrays. The decoder trusts no byte of a message.

An array travels as the map `{b"__ndarray__": True, b"data": bytes, b"dtype": str, b"shape": list}`, a NumPy scalar as
`{b"__npgeneric__": True, b"data": number, b"dtype": str}`. Object, void and complex dtypes do not travel.
Source of the format: openpi, `packages/openpi-client` (`msgpack_numpy.py`).

Before it allocates anything, the decoder walks the headers of a message once, and rejects messages that are truncated,
too long, too deeply nested or have too many values. It needs only NumPy and msgpack.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vla_accel.errors import DependencyError, WireError

MAX_VALUES = 16_384
"""Most values (numbers, texts, lists, maps, …) in one message; an array counts as the values of its map."""
MAX_DEPTH = 32
MAX_DIMENSIONS = 32

PREV_CHUNK = "rtc/prev_chunk"
"""Observation key of real-time chunking and of a warm start: the remaining actions, float (k, action_dim), in the
robot's units; row 0 belongs to the control tick of this observation."""
INFERENCE_DELAY = "rtc/inference_delay"
"""Observation key of real-time chunking: control ticks until the answer is used, int."""
BATCH = "batch"
"""The only observation key of a request with several observations (openpi's pull request 941): a list of them; the
answer is a list of results in their order."""
POLICY = "policy"
"""Observation key for a server with several policies: the policy's name."""
POLICIES = "policies"
"""Metadata key: the names of a server's policies, if it has several."""
REAL_TIME_CHUNKING = "real_time_chunking"
"""Metadata key: whether the server's policy takes the two keys above."""

# What NumPy itself writes for plain numbers, text and dates; its own parser accepts far more.
_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|[SU]\d{1,9}|[mM]8(\[\d{0,9}[a-zA-Z]{1,2}\])?)")
_PLAIN_KINDS = "biufSUmM"
_LAST_CHARACTER = 0x10FFFF
_SCALARS = {"b": (bool,), "i": (int,), "u": (int,), "f": (float, int), "S": (bytes,), "U": (str,)}
_NDARRAY_KEYS = {b"__ndarray__", b"data", b"dtype", b"shape"}
_SCALAR_KEYS = {b"__npgeneric__", b"data", b"dtype"}


def pack(value: Any) -> bytes:
    """`value` (maps, lists, text, bytes, numbers, None, NumPy arrays and scalars) as openpi's msgpack.

    Raises WireError for anything else, object, void and complex arrays included.
    """
    with Packer().packed(value) as data:
        return bytes(data)


def pack_list(items: Sequence[bytes]) -> bytes:
    """The message of a list of packed items."""
    return b"".join((_msgpack().Packer().pack_array_header(len(items)), *items))


class Packer:
    """Packs values into memory that it keeps."""

    def __init__(self) -> None:
        self._packer = _msgpack().Packer(default=_encode, autoreset=False)

    @contextlib.contextmanager
    def packed(self, value: Any) -> Iterator[memoryview]:
        """As `pack`; the memory is valid within the block."""
        self._packer.reset()
        try:
            self._packer.pack(value)
        except WireError:
            raise
        except Exception as error:  # msgpack: too deep, an integer of more than 64 bits, lone surrogates
            raise WireError(f"wire format: cannot send this ({type(error).__name__}: {error})") from error
        with self._packer.getbuffer() as data:
            yield data


def unpack(data: bytes | memoryview) -> Any:
    """The inverse of `pack`, with read-only arrays. Time and memory are proportional to the length of `data`.

    Raises WireError for anything but one well-formed message within the limits.
    """
    msgpack = _msgpack()
    survey(data)
    try:
        return msgpack.unpackb(data, object_hook=_decode)
    except WireError:
        raise
    except Exception as error:  # invalid UTF-8, or a key that is neither text nor bytes
        raise WireError(f"wire format: unreadable message ({type(error).__name__}: {error})") from error


def unpack_map(data: Any) -> dict[str, Any]:
    """As `unpack`, for a map with text keys: an observation, metadata or an answer."""
    if not isinstance(data, (bytes, memoryview)):
        raise WireError(f"wire format: expected a binary frame, got {'text' if isinstance(data, str) else _kind(data)}")
    value = unpack(data)
    if not isinstance(value, dict):
        raise WireError(f"wire format: expected a map, got {_kind(value)}")
    wrong = [key for key in value if not isinstance(key, str)]
    if wrong:
        raise WireError(f"wire format: expected text keys, got {wrong[0]!r:.60}")
    return value


def survey(data: bytes | memoryview) -> int:
    """Walk the headers of one message without decoding it. Returns the number of its values.

    Raises WireError: truncated, bytes left over, an extension type, more than `MAX_VALUES`, deeper than `MAX_DEPTH`.
    """
    values = 0

    def end_of(position: int, items: int, depth: int) -> int:
        """The end of `items` values at `position`. Raises IndexError if the data ends before one begins."""
        nonlocal values
        values += items  # counted before any of them is read
        if values > MAX_VALUES:
            raise WireError(f"wire format: expected at most {MAX_VALUES} values, got more")
        if depth > MAX_DEPTH:
            raise WireError(f"wire format: expected at most {MAX_DEPTH} levels, got more")
        for _ in range(items):
            code = data[position]
            position += _SIZES[code]
            kind = _KINDS[code]
            if kind:  # a length precedes `position`
                width, items_each = kind
                if width == 1:
                    length = data[position - 1]
                elif width:
                    length = int.from_bytes(data[position - width : position], "big")
                else:
                    length = code & 0x0F
                if not items_each:
                    position += length
                elif length:
                    position = end_of(position, length * items_each, depth + 1)
        return position

    try:
        end = end_of(0, 1, 0)
    except IndexError:
        end = len(data) + 1
    except KeyError as error:
        text = f"wire format: expected a plain value, got byte 0x{error.args[0]:02x} (an extension, or unused)"
        raise WireError(text) from None
    if end > len(data):
        raise WireError(f"wire format: truncated after {len(data)} bytes")
    if end < len(data):
        raise WireError(f"wire format: {len(data) - end} bytes left over after the message")
    return values


_LENGTHS = {code: (0, 2 if code <= 0x8F else 1) for code in range(0x80, 0xA0)}
"""First byte -> (bytes of the length after it, 0 if it contains the length; values per unit of the length, 0 if the
length counts bytes)."""
_LENGTHS |= {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
_LENGTHS |= {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_KINDS = [_LENGTHS.get(code) for code in range(256)]
# First byte -> bytes of a number or a short text; otherwise of the first byte and the length.
_SIZES = dict.fromkeys((*range(0xA0), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)), 1)
_SIZES |= {0xA0 + length: 1 + length for length in range(32)}
_SIZES |= {0xCA: 5, 0xCB: 9} | {0xCC + i: 1 + 2 ** (i % 4) for i in range(8)}
_SIZES |= {code: 1 + width for code, (width, _) in _LENGTHS.items()}


def _encode(value: Any) -> dict[bytes, Any]:
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in _PLAIN_KINDS or not _DTYPE.fullmatch(value.dtype.str):
            raise WireError(f"wire format: expected numbers or text, got dtype {value.dtype}")
        if isinstance(value, np.ndarray):
            return {b"__ndarray__": True, b"data": _bytes_of(value), b"dtype": value.dtype.str, b"shape": value.shape}
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise WireError(f"wire format: expected numbers, text, arrays, lists or mappings, got {type(value).__name__}")


def _bytes_of(array: np.ndarray) -> bytes | memoryview:
    """The elements in C order, without a copy if possible; dates have no memoryview."""
    return array.data if array.flags.c_contiguous and array.dtype.kind in "biuf" else array.tobytes()


def _decode(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return _array(value)
    if b"__npgeneric__" in value:
        return _scalar(value)
    return value


def _array(value: dict[Any, Any]) -> np.ndarray:
    if value.keys() != _NDARRAY_KEYS:
        raise WireError(f"wire format: array: expected data, dtype and shape, got {_names(value)}")
    dtype, shape, data = _dtype(value[b"dtype"]), value[b"shape"], value[b"data"]
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise WireError(f"wire format: array: expected a list of sizes as shape, got {shape!r:.60}")
    if len(shape) > MAX_DIMENSIONS:
        raise WireError(f"wire format: array: expected at most {MAX_DIMENSIONS} dimensions, got {len(shape)}")
    if not isinstance(data, bytes):
        raise WireError(f"wire format: array: expected bytes as data, got {_kind(data)}")
    needed = math.prod(shape) * dtype.itemsize
    if needed != len(data):
        raise WireError(
            f"wire format: array: {dtype} of shape {tuple(shape)!s:.60} needs {needed} bytes, got {len(data)}"
        )
    if dtype.kind == "U" and (np.frombuffer(data, dtype.str[0] + "u4") > _LAST_CHARACTER).any():
        raise WireError("wire format: array: expected characters, got an invalid code point")  # NumPy would fail later
    try:
        return np.ndarray(tuple(shape), dtype, buffer=data)
    except ValueError as error:  # empty, with a size beyond NumPy's range
        raise WireError(f"wire format: array: shape {tuple(shape)!s:.60}: {error}") from error


def _scalar(value: dict[Any, Any]) -> np.generic:
    if value.keys() != _SCALAR_KEYS:
        raise WireError(f"wire format: scalar: expected data and dtype, got {_names(value)}")
    dtype, data = _dtype(value[b"dtype"]), value[b"data"]
    if type(data) not in _SCALARS.get(dtype.kind, ()):
        raise WireError(f"wire format: scalar: expected a value of dtype {dtype}, got {_kind(data)}")
    try:
        with np.errstate(over="raise"):
            return dtype.type(data)
    except (OverflowError, ValueError, FloatingPointError) as error:
        raise WireError(f"wire format: scalar: {data!r:.60} is no {dtype} ({error})") from error


def _dtype(name: Any) -> np.dtype:
    found = _dtype_named(name) if isinstance(name, str) else None
    if found is None:
        raise WireError(f"wire format: expected the dtype of plain numbers or text, got {name!r:.60}")
    return found


@functools.lru_cache(maxsize=256)
def _dtype_named(name: str) -> np.dtype | None:
    if not _DTYPE.fullmatch(name):
        return None
    try:
        return np.dtype(name)
    except (TypeError, ValueError) as error:  # an unknown unit of dates, or too long a text
        raise WireError(f"wire format: expected a dtype, got {name!r:.60} ({error})") from error


def _names(value: Mapping[Any, Any]) -> str:
    return ", ".join(repr(k)[:20] for k in list(value)[:6])


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise DependencyError(
            f"openpi's wire format needs msgpack: pip install 'vla_accel[serve]' ({error})"
        ) from error
    return msgpack
