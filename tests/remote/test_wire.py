"""The wire format: openpi's bytes, exact round trips, errors of hostile messages, a short fuzz run."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_accel.errors import WireError
from vla_accel.remote import wire

msgpack = pytest.importorskip("msgpack", reason="the wire format needs msgpack")
pytest.importorskip("hypothesis", reason="needs hypothesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.extra import numpy as hnp  # noqa: E402

from tests.remote.fuzz_wire import (  # noqa: E402
    LARGEST_CORPUS_FILE,
    SEEDS,
    VALUES,
    allowed_peak,
    check,
    decoder_peak,
    messages,
    outcome,
    packed,
)
from tests.support.eval_support import OBS  # noqa: E402
from tests.support.openpi_wire import openpi_pack, openpi_unpack  # noqa: E402
from tests.support.waiting import PATIENCE_S  # noqa: E402

ROOT = Path(__file__).parents[2]
# The same cases in every run; fuzz_wire.py finds new ones.
QUICK = settings(
    max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)


def array(**changes: Any) -> dict[bytes, Any]:
    """A valid array's map, with changes; None removes a part."""
    parts = {"__ndarray__": True, "data": bytes(24), "dtype": "<f4", "shape": [2, 3], **changes}
    return {k.encode(): v for k, v in parts.items() if v is not None}


def scalar(**changes: Any) -> dict[bytes, Any]:
    parts = {"__npgeneric__": True, "data": 1.5, "dtype": "<f4", **changes}
    return {k.encode(): v for k, v in parts.items() if v is not None}


# -- the format ---------------------------------------------------------------------------------------------------


def test_it_is_openpis_byte_for_byte() -> None:
    for value in (OBS, {"a": np.float32(1.5), "b": [1, "x", None], "c": np.zeros((0, 3)), "d": np.eye(3)[:, 1]}):
        assert wire.pack(value) == openpi_pack(value)
    back = wire.unpack(openpi_pack({"n": np.int64(4), "a": np.eye(2, dtype=np.float32)}))
    assert back["n"] == 4 and back["n"].dtype == np.int64
    np.testing.assert_array_equal(back["a"], np.eye(2))
    assert back["a"].dtype == np.float32 and not back["a"].flags.writeable


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
PLAIN_ARRAYS = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(),
        hnp.unsigned_integer_dtypes(),
        hnp.floating_dtypes(sizes=(16, 32, 64)),
        hnp.unicode_string_dtypes(max_len=4),
        hnp.byte_string_dtypes(max_len=4),
        hnp.datetime64_dtypes(),
    ),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


@pytest.mark.slow
@QUICK
@given(PLAIN_ARRAYS)
def test_arrays_arrive_unchanged(value: np.ndarray) -> None:
    back = wire.unpack(wire.pack(value))
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
    assert openpi_unpack(wire.pack(value)).tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "value", [np.float16(0.5), np.float32(-0.0), np.int8(-7), np.uint64(2**64 - 1), np.bool_(True), np.bytes_(b"ab")]
)
def test_scalars_arrive_unchanged(value: np.generic) -> None:
    back = wire.unpack(wire.pack({"x": value}))["x"]
    # NumPy's own subclasses of Python's types travel as those, as in openpi.
    plain = isinstance(value, bytes)
    assert back == value and (plain or (type(back) is type(value) and back.tobytes() == value.tobytes()))


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.zeros(2, np.complex64),
        np.zeros(1, [("a", "f4")]),
        np.longdouble(1),
        np.array(["a"], dtype=np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else np.array([object()]),
        {1, 2},
        2**64,
        CYCLE,
    ],
    ids=lambda v: type(v).__name__,
)
def test_an_unsupported_value_is_not_sent(value: Any) -> None:
    with pytest.raises(WireError, match="wire format"):
        wire.pack({"x": value})


# -- what is refused ----------------------------------------------------------------------------------------------

HOSTILE = {
    "empty": (b"", "truncated after 0 bytes"),
    "unused byte": (b"\xc1", "got byte 0xc1"),
    "extension": (msgpack.packb(msgpack.ExtType(5, b"1234")), "an extension"),
    "timestamp": (msgpack.packb(msgpack.Timestamp(1)), "an extension"),
    "left over": (b"\x01\x02", "1 bytes left over"),
    "truncated number": (b"\xcb\x00\x00", "truncated"),
    "truncated length": (b"\xc6\x00", "truncated"),
    "truncated text": (b"\xa5abc", "truncated after 4 bytes"),
    "a gigabyte of bytes": (b"\xc6\x3b\x9a\xca\x00abc", "truncated after 8 bytes"),
    "four billion items": (b"\xdd\xff\xff\xff\xff", "at most 16384 values"),
    "four billion pairs": (b"\xdf\xff\xff\xff\xff", "at most 16384 values"),
    "deep": (b"\x91" * 5000 + b"\x01", "at most 32 levels"),
    "crowded": (b"\xdc\xff\xff" + b"\x80" * 65535, "at most 16384 values"),
    "crowded in pieces": (b"\x9f" + (b"\xdc\x08\x00" + b"\x90" * 2048) * 15, "at most 16384 values"),
    "not utf-8": (b"\xa1\xff", "unreadable message"),
    "number as key": (b"\x81\x01\x02", "unreadable message"),
    "list as key": (b"\x81\x90\x02", "unreadable message"),
    "object array": (packed(array(dtype="|O")), r"expected the dtype of plain numbers or text, got '\|O'"),
    "void array": (packed(array(dtype="|V4")), "plain numbers or text"),
    "complex array": (packed(array(dtype="<c8")), "plain numbers or text"),
    "structured array": (packed(array(dtype="f4,f4")), "plain numbers or text"),
    "subarray": (packed(array(dtype="(2,3)f4", shape=[])), "plain numbers or text"),
    "pointers": (packed(array(dtype="|T16")), "plain numbers or text"),
    "dtype in bytes": (packed(array(dtype=b"<f4")), "plain numbers or text"),
    "unknown date": (packed(array(dtype="<M8[qq]", data=b"")), "expected a dtype|needs"),
    "enormous text": (packed(array(dtype="<U999999999", shape=[0], data=b"")), "expected a dtype"),
    "too few bytes": (packed(array(data=bytes(23))), r"float32 of shape \(2, 3\) needs 24 bytes, got 23"),
    "too many bytes": (packed(array(data=bytes(25))), "needs 24 bytes, got 25"),
    "overflowing shape": (packed(array(shape=[2**63, 2**63], data=b"")), "needs 3402823"),
    "overflowing empty shape": (packed(array(shape=[0, 2**62, 2**62], data=b"")), r"shape \(0, "),
    "negative shape": (packed(array(shape=[-1, -6])), "list of sizes"),
    "boolean shape": (packed(array(shape=[True], data=bytes(4))), "list of sizes"),
    "shape as text": (packed(array(shape="23")), "list of sizes"),
    "many dimensions": (packed(array(shape=[1] * 33, data=bytes(4))), "at most 32 dimensions"),
    "data as text": (packed(array(data="x" * 24)), "expected bytes as data, got a str"),
    "data as list": (packed(array(data=[0] * 24)), "expected bytes as data, got a list"),
    "no data": (packed(array(data=None)), "expected data, dtype and shape"),
    "no shape": (packed(array(shape=None)), "expected data, dtype and shape"),
    "no character": (packed(array(dtype="<U1", shape=[2], data=b"a\0\0\0\0\0\x11\0")), "expected characters"),
    "no character, big-endian": (packed(array(dtype=">U1", shape=[1], data=b"\0\x11\0\0")), "expected characters"),
    "something more": (packed(array(more=1)), "expected data, dtype and shape"),
    "scalar too large": (packed(scalar(dtype="|i1", data=300)), "300 is no int8"),
    "negative unsigned": (packed(scalar(dtype="|u1", data=-1)), "-1 is no uint8"),
    "scalar of text": (packed(scalar(data="1.5")), "expected a value of dtype float32, got a str"),
    "scalar of a list": (packed(scalar(data=[1.5])), "expected a value of dtype float32, got a list"),
    "boolean as integer": (packed(scalar(dtype="|i1", data=True)), "got a bool"),
    "object scalar": (packed(scalar(dtype="O")), "plain numbers or text"),
    "no dtype": (packed(scalar(dtype=None)), "expected data and dtype"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_messages_are_one_clear_error(name: str) -> None:
    data, message = HOSTILE[name]
    with pytest.raises(WireError, match=message):
        wire.unpack(data)
    with pytest.raises(WireError):  # and inside an observation
        wire.unpack_map(b"\x81\xa1x" + data)


def test_only_a_map_with_text_keys_is_an_observation() -> None:
    assert wire.unpack_map(packed({"a": 1})) == {"a": 1}
    for frame, message in (
        ("text", "expected a binary frame, got text"),
        (b"\x90", "expected a map, got a list"),
        (b"\xc0", "expected a map, got nothing"),
        (packed({b"a": 1}), "expected text keys, got b'a'"),
        (packed(array()), "expected a map, got a ndarray"),
    ):
        with pytest.raises(WireError, match=message):
            wire.unpack_map(frame)


def test_the_limits_allow_what_robots_send_and_a_packer_can_be_used_again() -> None:
    images = {f"cam{i}": np.zeros((480, 640, 3), np.uint8) for i in range(4)}
    lists = {"observation/state": [0.0] * 32, "prev": np.zeros((50, 32)).tolist(), "prompt": "x" * 5000}
    packer = wire.Packer()
    for value in ({**images, **lists}, {"a": 1}):
        with packer.packed(value) as data:
            assert bytes(data) == wire.pack(value) and wire.unpack_map(data).keys() == value.keys()
        with pytest.raises(WireError, match="got object"), packer.packed({"good": 1, "bad": object()}):
            raise AssertionError("it was packed")


@pytest.mark.parametrize("dtype", ["u1", ">f4", "?", "M8[ns]", "U3"])
def test_arrays_of_any_memory_layout_arrive_unchanged(dtype: str) -> None:
    flat = np.arange(24).astype("u1").astype(dtype)
    whole = flat.reshape(2, 3, 4)
    for array in (whole[::-1], whole.T, np.asfortranarray(whole), whole[:, :0], flat[5:6].reshape(())):
        back = wire.unpack(wire.pack(array))
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(back, array)


def test_a_contiguous_array_is_packed_without_another_copy() -> None:
    packer, image, peak = wire.Packer(), np.zeros((480, 640, 3), np.uint8), 0
    for _ in range(2):  # the first time, the packer allocates the memory that it keeps
        tracemalloc.start()
        with packer.packed({"image": image}):
            peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < image.nbytes / 10


def test_claimed_lengths_allocate_nothing() -> None:
    # Each level claims a million items, which the bytes of the inner levels seem to be.
    nested = (b"\xdd\x00\x0f\x42\x40" * 31) + b"\x01" * 1_000_000
    many_maps = b"\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000
    for data in (nested, many_maps):
        with pytest.raises(WireError, match="values"):
            wire.unpack(data)
        assert decoder_peak(data) < 100_000


# -- fuzz ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(QUICK, max_examples=1500)
@given(messages())
def test_any_bytes_are_a_value_or_a_wire_error(data: bytes) -> None:
    outcome(data)
    assert decoder_peak(data) <= allowed_peak(data)


@pytest.mark.slow
@QUICK
@given(VALUES)
def test_the_survey_accepts_what_msgpack_reads(value: Any) -> None:
    data = packed(value)
    try:
        count = wire.survey(data)
    except WireError as error:
        assert "extension" in str(error)
    else:
        assert 1 <= count <= len(data)


def test_every_file_of_the_corpus_is_a_value_or_a_wire_error() -> None:
    assert 20 <= len(SEEDS) <= 60
    for data in SEEDS:
        assert len(data) <= LARGEST_CORPUS_FILE
        if outcome(data).startswith("a "):
            check(wire.unpack(wire.pack(wire.unpack(data))))


def test_the_fuzzer_counts_only_the_decoders_memory_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    data, kept = packed(array()), []
    assert 0 < decoder_peak(data) < 10_000
    monkeypatch.setattr(wire, "unpack", lambda _: kept or kept.append(bytes(10**6)))
    assert decoder_peak(data) < 10_000, "a cache does not count"
    monkeypatch.setattr(wire, "unpack", lambda _: bytes(10**6))
    assert decoder_peak(data) > allowed_peak(data)
    words = [sys.executable, "-m", "tests.remote.fuzz_wire", "--seconds", "0"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert '"cases": 0' in done.stdout.splitlines()[-1]


def test_the_codec_needs_no_torch() -> None:
    code = (
        "import sys, vla_accel.client; from vla_accel.remote import wire; wire.pack({}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
