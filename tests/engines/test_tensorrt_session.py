"""The TensorRT runtime over a fake library: addresses, shapes, profiles, shared memory, and refused engines."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.small_components import Doubled, component
from vla_accel.component import Component, Loop, TensorSpec
from vla_accel.config import EngineSpec, TensorrtOptions
from vla_accel.engines import tensorrt, tensorrt_library, tensorrt_session
from vla_accel.engines.cache import Entry
from vla_accel.engines.tensorrt import TensorrtEngine, check_output
from vla_accel.engines.tensorrt_library import Library
from vla_accel.engines.tensorrt_plan import Obtained
from vla_accel.errors import EngineError

CPU = torch.device("cpu")
STREAM = 77


class FakeContext:
    """Doubles float32 arrays at its addresses, and records its calls."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.log = engine, engine.log
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory: tuple[int, int] | None = None
        self.profile: int | None = None

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        self.log.append(f"profile {index}")
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None, "the profile comes first"
        self.shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return next(iter(self.shapes.values()))

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        self.memory = (address, size)

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.capturable

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == STREAM and self.memory is not None
        self.log.append("run")
        if self.engine.broken:
            return False
        count = int(np.prod(next(iter(self.shapes.values()))))
        places = [self.addresses[n] for n in self.engine.names[:2]]
        source, target = (np.ctypeslib.as_array((ctypes.c_float * count).from_address(p)) for p in places)
        target[:] = self.engine.factor * source
        return True


class FakeEngine:
    names = ("x", "y")
    num_io_tensors = 2
    capturable, broken, factor = True, False, 2.0
    device_memory_size_v2 = 1000
    weight_streaming_budget_v2 = -1

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.contexts: list[FakeContext] = []

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_dtype(self, name: str) -> str:
        return "DataType.FLOAT"

    def get_weight_streaming_automatic_budget(self) -> int:
        return 12345

    def create_execution_context(self, strategy: str) -> FakeContext:
        assert strategy == "user managed"
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


class Fake:
    """The module `tensorrt`."""

    __version__ = "10.16.1"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.engines: list[FakeEngine] = []
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed")
        self.loads = True
        self.settings: dict[str, Any] = {}

    def init_libnvinfer_plugins(self, logger: Any, space: str) -> None:
        self.log.append("plugins")

    def Runtime(self, logger: Any) -> Any:
        def load(content: bytes) -> FakeEngine | None:
            self.log.append("deserialise")
            if not self.loads:
                return None
            engine = FakeEngine(self.log)
            vars(engine).update(self.settings)
            self.engines.append(engine)
            return engine

        return SimpleNamespace(deserialize_cuda_engine=load)


@pytest.fixture
def fake(monkeypatch: Any, tmp_path: Path) -> Iterator[Fake]:
    """The library, a plan on disk, and a GPU of compute capability 8.9."""
    trt = Fake()
    library = Library("tensorrt", trt, trt.__version__)
    monkeypatch.setattr(Library, "logger", SimpleNamespace(errors=[]))
    monkeypatch.setattr(tensorrt, "load_library", lambda name: library)
    monkeypatch.setattr(tensorrt_library, "capability_of", lambda device: (8, 9))
    monkeypatch.setattr(tensorrt_library, "stream_of", lambda device: STREAM)
    monkeypatch.setattr(tensorrt_library, "free_memory", lambda device: 10_000)
    path = tmp_path / "double-0.engine"
    path.write_bytes(b"plan")
    profiles = [{"x": [[1, 3], [1, 3], [1, 3]]}, {"x": [[1, 3], [4, 3], [4, 3]]}]
    about = {"profiles": profiles, "library": "tensorrt", "version": "10.16.1", "target": "sm89", "seconds": {}}
    obtained = Obtained(Entry(path, about), built=False)
    monkeypatch.setattr(tensorrt, "obtain", lambda *a, **k: obtained)
    tensorrt_session.scratch_of.cache_clear()
    tensorrt_session.init_plugins.cache_clear()
    yield trt
    tensorrt_session.scratch_of.cache_clear()


def engine(rows: int = 2, **options: Any) -> TensorrtEngine:
    return TensorrtEngine(component(rows), CPU, EngineSpec("tensorrt", tensorrt=TensorrtOptions(**options)))


def test_it_runs_on_our_buffers(fake: Fake) -> None:
    one = engine()
    source = torch.arange(6.0).view(2, 3)
    one.write("x", source)
    before = fake.log.count("run")
    one.run()
    assert fake.log.count("run") == before + 1 and torch.equal(one.outputs["y"], 2 * source)
    context = fake.engines[0].contexts[0]
    assert context.addresses == {"x": one.inputs["x"].data_ptr(), "y": one.outputs["y"].data_ptr()}
    bound = torch.full((2, 3), 5.0)
    one.bind("x", bound)
    one.run()
    assert context.addresses["x"] == bound.data_ptr() and float(one.outputs["y"][0, 0]) == 10.0
    with pytest.raises(EngineError, match=r"double\.x: expected a contiguous tensor"):
        one.bind("x", torch.zeros(3, 2).t())
    fake.engines[0].broken = True
    with pytest.raises(EngineError, match="double: enqueueing failed"):
        one.run()


def test_plugins_are_registered_before_the_engine_and_once(fake: Fake) -> None:
    first = engine()
    assert fake.log[:2] == ["plugins", "deserialise"]
    del first
    gc.collect()
    engine()
    assert fake.log.count("deserialise") == 2 and fake.log.count("plugins") == 1


def test_the_shape_decides_the_profile(fake: Fake) -> None:
    for rows, index in ((1, 0), (2, 1), (4, 1)):
        fake.log.clear()
        one = engine(rows)
        assert f"profile {index}" in fake.log and one.session.profile == index


def test_contexts_share_engine_and_scratch(fake: Fake) -> None:
    one, two = engine(2), engine(3)
    assert len(fake.engines) == 1 and len(fake.engines[0].contexts) == 2
    a, b = fake.engines[0].contexts
    assert a.memory == b.memory and a.memory is not None
    # A larger engine moves all contexts; the old memory stays for recorded graphs.
    fake.settings["device_memory_size_v2"] = 5000
    tensorrt_session._engines.clear()
    three = engine(4)
    assert a.memory == b.memory == fake.engines[1].contexts[0].memory and a.memory[1] == 5000
    assert len(tensorrt_session.scratch_of(CPU).old) == 1
    assert all(torch.equal(e.outputs["y"], 2 * e.inputs["x"]) for e in (one, two, three))
    # Contexts of another thread have scratch of their own.
    own, profiles = tensorrt_session.Scratch(CPU), [{"x": ((1, 3), (1, 3), (4, 3))}]
    for rows in (2, 3):
        tensorrt_session.Session(one.session.library, one.session.engine, profiles, component(rows), CPU, own)
    first, second = (context.memory for context in fake.engines[0].contexts[2:])
    assert first == second != a.memory and first is not None
    del two
    gc.collect()
    assert set(tensorrt_session.scratch_of(CPU).sessions) == {one.session, three.session}


def test_weight_streaming_takes_the_librarys_budget(fake: Fake) -> None:
    engine(weight_streaming=True)
    assert fake.engines[0].weight_streaming_budget_v2 == 12345
    tensorrt_session._engines.clear()
    engine()
    assert fake.engines[1].weight_streaming_budget_v2 == -1


@pytest.mark.parametrize("capturable", [True, False])
def test_the_library_says_whether_it_can_be_recorded(fake: Fake, capturable: bool) -> None:
    fake.settings["capturable"] = capturable
    assert engine().capturable is capturable


@pytest.mark.parametrize(
    ("loads", "settings", "parts"),
    [
        (False, {}, ("double-0.engine", "TensorRT 10.16.1", "cannot load")),
        (True, {"device_memory_size_v2": 200 * 2**20}, ("double", "200 MiB", "0 MiB is free")),
        (True, {"names": ("x", "z")}, ("double", "a tensor z", "does not declare")),
        (True, {"get_tensor_dtype": lambda name: "DataType.HALF"}, ("double.x", "torch.float32", "torch.float16")),
        (True, {"factor": float("nan")}, ("double.y", "6 of 6 values", "FP16 overflows at 65504")),
        (True, {"factor": -2.0}, ("double.y", "differs from the module", "cosine -1.0000")),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused(
    fake: Fake, loads: bool, settings: dict[str, Any], parts: tuple[str, ...]
) -> None:
    fake.loads = loads
    fake.settings |= settings
    with pytest.raises(EngineError) as refused:
        engine()
    assert all(part in str(refused.value) for part in parts), refused.value
    if "factor" in settings:
        tensorrt_session._engines.clear()
        assert engine(verify=False).outputs["y"].shape == (2, 3)


def test_nearly_equal_outputs_pass() -> None:
    want = torch.randn(100, generator=torch.Generator().manual_seed(0))
    check_output("y", want.half(), want)
    check_output("y", torch.zeros(3), torch.zeros(3))
    with pytest.raises(EngineError):
        check_output("y", torch.ones(3), torch.zeros(3))


def test_a_loop_runs_its_body_from_buffer_to_buffer(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.settings |= {"names": ("noisy", "next", "row"), "num_io_tensors": 3}
    one = TensorSpec("noisy", (2, 3), torch.float32)
    inputs = (one, dataclasses.replace(one, name="row"))
    body = Component("double", Doubled(), inputs, (dataclasses.replace(one, name="next"),))
    rows = torch.arange(18.0).view(3, 2, 3)
    loop = Loop(body, 3, ("noisy", "next"), "x", "y", {"row": rows})
    whole = dataclasses.replace(component(), module=nn.Sequential(Doubled(), Doubled(), Doubled()), loop=lambda: loop)
    obtained: Any = tensorrt.obtain  # of the fixture
    profiles = [{s.name: [list(s.shape)] * 3 for s in inputs}]
    entry = Entry(obtained().entry.path, {**obtained().entry.about, "profiles": profiles})
    seen: list[Any] = []
    monkeypatch.setattr(tensorrt, "obtain", lambda c, *_, **__: seen.append(c) or Obtained(entry, built=False))
    made = TensorrtEngine(whole, CPU, EngineSpec("tensorrt"))
    assert seen == [body], "the body is what is built"
    steps: list[dict[str, int]] = []
    context = fake.engines[0].contexts[0]
    execute = context.execute_async_v3
    context.execute_async_v3 = lambda stream: steps.append(dict(context.addresses)) or execute(stream)  # type: ignore
    made.write("x", torch.ones(2, 3))
    made.run()
    assert made.outputs["y"].tolist() == [[8.0] * 3] * 2
    assert torch.equal(made.inputs["x"], torch.ones(2, 3)), "the input is only read"
    assert [s["row"] for s in steps] == [r.data_ptr() for r in made._rows["row"]]
    assert steps[0]["noisy"] == made.inputs["x"].data_ptr() and steps[-1]["next"] == made.outputs["y"].data_ptr()
    assert all(a["next"] == b["noisy"] for a, b in itertools.pairwise(steps))
    assert all(s["noisy"] != s["next"] for s in steps)
