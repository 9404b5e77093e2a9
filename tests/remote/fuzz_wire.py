"""Fuzz the wire decoder: `python -m tests.remote.fuzz_wire --seconds 300`. Ends with one JSON line.

Messages are random bytes, random msgpack with hostile arrays, and mutations of the corpus. An input with a new kind of
outcome is added to `tests/remote/corpus/wire`, which holds one file for each kind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
import traceback
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from vla_accel.errors import WireError
from vla_accel.remote import wire

CORPUS = Path(__file__).parent / "corpus" / "wire"
LARGEST_CORPUS_FILE = 512

_DTYPES = "<f4 <f8 |u1 |b1 <U3 |S2 <i8 >f4 <M8[ns] O |O V4 <c8 f4,f4 (9,9)f4 <U999999999 |S9999999999 <f99 object"
WIRE_DTYPES = [*_DTYPES.split(), "<M8[x]", "{'a': 1}", "|T16", "<f16", "\x00", ""]

# Four billion items, a gigabyte, forty levels.
LIES = [b"\xdd\xff\xff\xff\xff", b"\xc6\x3b\x9a\xca\x00", b"\x91" * 40]


def hostile_arrays(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Maps in the form of arrays or scalars, with any part valid or invalid."""
    sizes = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**62, 2**63, -(2**63)]), children)
    array = st.fixed_dictionaries(
        {b"__ndarray__": st.sampled_from([True, 1, None])},
        optional={
            b"data": st.one_of(st.binary(max_size=72), children),
            b"dtype": st.one_of(st.sampled_from(WIRE_DTYPES), st.text(max_size=6), children),
            b"shape": st.one_of(st.lists(sizes, max_size=4), st.just([0] * 40), children),
            b"more": children,
        },
    )
    scalar = st.fixed_dictionaries(
        {b"__npgeneric__": st.just(True)},
        optional={b"data": children, b"dtype": st.one_of(st.sampled_from(WIRE_DTYPES), children)},
    )
    return st.one_of(array, scalar)


EXTENSIONS = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8))
NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats())
LEAVES = st.one_of(NUMBERS, st.text(max_size=8), st.binary(max_size=16), EXTENSIONS)
KEYS = st.one_of(st.text(max_size=6), st.binary(max_size=6), st.integers(-3, 300))
VALUES = st.recursive(
    LEAVES,
    lambda c: st.one_of(st.lists(c, max_size=5), st.dictionaries(KEYS, c, max_size=4), hostile_arrays(c)),
    max_leaves=20,
)


def packed(value: Any) -> bytes:
    # Clients may send lone surrogates, which msgpack does not pack by default.
    return msgpack.packb(value, unicode_errors="surrogatepass")  # pyright: ignore[reportReturnType]


# Read once: what hypothesis draws from must not change during a run.
SEEDS = [f.read_bytes() for f in sorted(CORPUS.glob("*.bin"))]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A message with a few bytes changed, dropped, repeated or copied from another."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, what = rng.randint(0, max(len(changed) - 1, 0)), rng.randint(0, 5)
        if what == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif what == 1:
            del changed[at : at + rng.randint(1, 8)]
        elif what == 2:
            changed[at:at] = rng.choice(LIES)
        elif what == 3:
            other = rng.choice(SEEDS)
            start = rng.randrange(max(len(other), 1))
            changed[at:at] = other[start : start + rng.randint(1, 40)]
        elif what == 4:
            changed[at:at] = changed[at : at + rng.randint(1, 40)]
        else:
            del changed[at:]
    return bytes(changed)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Random bytes, well-formed msgpack, or damaged messages."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(st.binary(max_size=64))
    data = draw(st.sampled_from(SEEDS)) if kind == 1 else packed(draw(VALUES))
    return data if kind == 3 else mutated(draw(st.randoms(use_true_random=False)), data)


def outcome(data: bytes) -> str:
    """The kind of outcome of decoding a frame: the value's type, or the line that raised the WireError.

    Any other exception is a failure.
    """
    try:
        value = wire.unpack(data)
    except WireError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        return f"WireError of line {line}, from {type(error.__cause__).__name__}"
    check(value)
    return f"a {type(value).__name__}"


def decoder_peak(data: bytes) -> int:
    """The most bytes that decoding allocates at once: the smaller of two runs, so that caches do not count."""
    peaks = []
    for _ in range(2):
        tracemalloc.start()
        try:
            wire.unpack(data)
        except WireError:
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return min(peaks)


def allowed_peak(data: bytes) -> int:
    """Bytes that decoding may allocate at once: proportional to the message, whatever lengths it claims."""
    return 20_000 + 100 * len(data)


def check(value: Any) -> None:
    """Check that a decoded value holds plain values and valid arrays."""
    if isinstance(value, dict):
        for key, inner in value.items():
            assert isinstance(key, (str, bytes))
            check(inner)
    elif isinstance(value, list):
        for inner in value:
            check(inner)
    elif isinstance(value, (np.ndarray, np.generic)):
        assert value.dtype.kind in "biufSUmM"
        assert isinstance(value, np.generic) or not value.flags.writeable
        value.tobytes()
    else:
        assert value is None or isinstance(value, (bool, int, float, str, bytes)), type(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=300.0)
    seconds = parser.parse_args().seconds
    seen = {outcome(data) for data in SEEDS}
    began, cases, added = time.monotonic(), 0, 0

    def one_case(data: bytes) -> None:
        nonlocal cases, added
        cases += 1
        what, peak = outcome(data), decoder_peak(data)
        assert peak <= allowed_peak(data), f"{peak} bytes for a message of {len(data)}"
        if what not in seen and len(data) <= LARGEST_CORPUS_FILE:
            seen.add(what)
            added += 1
            (CORPUS / f"found-{hashlib.sha256(data).hexdigest()[:8]}.bin").write_bytes(data)

    @settings(
        max_examples=5_000,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(messages())
    def one_round(data: bytes) -> None:
        if time.monotonic() - began < seconds:
            one_case(data)

    rng = random.Random()
    while time.monotonic() - began < seconds:
        one_round()
        # Cheap mutations in between, far more of them.
        for _ in range(100_000):
            if time.monotonic() - began >= seconds:
                break
            one_case(mutated(rng, rng.choice(SEEDS)))
    result = {"cases": cases, "seconds": round(time.monotonic() - began, 1), "outcomes": len(seen), "added": added}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
