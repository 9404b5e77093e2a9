"""The streamed denoise loop (`kernels/loop/`) without a GPU: which loops fit, the plan, and the launches."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.time_phases import stamped, stamps_of
from tests.support import streamed_support
from tests.support.gpus import GPUS, H20, H100, H200, MIG_SLICE, MIG_TWO
from tests.support.streamed_support import EXPERTS, LOOPS, LoopCase, Loops, RecordedModule, reason, recorded_loop
from vla_accel.errors import EngineError
from vla_accel.families.pi0.native_loop import expert_spec
from vla_accel.families.smolvla import native_loop as smolvla
from vla_accel.kernels import nvrtc
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import StreamedLoop, launch, why_not
from vla_accel.kernels.loop.schedule import (
    KEYS,
    MAX_CLUSTER,
    NOTHING_YET,
    RANKS,
    STAGE_BYTES,
    THREADS,
    WARPS,
    Fused,
    Schedule,
    Tiling,
    attend,
    offsets,
)
from vla_accel.kernels.struct import address
from vla_accel.nn import flow
from vla_accel.nn.rtc import step_gains

CODE = re.sub(r"//.*", "", nvrtc.source_of({}))
SMALL = LOOPS["demo"].config
FULL = expert_spec(LOOPS["full"].config)


# -- fits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_the_cases_here_fit(name: str) -> None:
    assert reason(LOOPS[name]) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"expert": {"width": 136}}, "tiles"),
        ({"expert": {"width": 2048}}, "tiles"),
        ({"expert": {"mlp_dim": 528}}, "tiles"),
        ({"expert": {"mlp_dim": 1568}}, "tiles"),
        ({"expert": {"mlp_dim": 1536}}, ""),
        ({"expert": {"head_dim": 96}}, "tiles"),
        ({"expert": {"head_dim": 320}}, "tiles"),
        ({"expert": {"heads": 33}}, "tiles"),
        ({"action_dim": 65}, "tiles"),
        ({"action_horizon": 65}, "1 x 65 suffix rows are more than 64"),
        ({"action_horizon": 64}, ""),
        ({"kind": "pi0", "action_horizon": 64, "discrete_state_input": False}, "1 x 65 suffix rows are more than 64"),
    ],
)
def test_sizes_that_do_not_fit_are_explained(change: dict[str, Any], why: str) -> None:
    changes = dict(change)
    expert = changes.pop("expert", {})
    shared = {k: v for k, v in expert.items() if k in ("heads", "head_dim")}
    config = dataclasses.replace(
        SMALL, expert=dataclasses.replace(SMALL.expert, **expert), prefix=dataclasses.replace(SMALL.prefix, **shared),
        **changes,
    )  # fmt: skip
    found = reason(LoopCase(config))
    assert (found is None) == (why == "") and why in (found or "")


def test_batch_weights_and_device_are_checked() -> None:
    spec = expert_spec(SMALL)
    assert why_not(None, spec, 1, "bf16") == "there is no GPU"
    assert why_not(H200, spec, 6, "bf16") is None
    assert why_not(H200, spec, 7, "bf16") == "7 x 10 suffix rows are more than 64"
    for precision in ("fp32", "fp16", "fp8", "int8"):
        assert why_not(H200, spec, 1, precision) == f"it needs BF16 weights, got {precision.upper()}"
    for gpu in (gpu for one in GPUS.values() for gpu in (one, one.portable)):
        expected = f"it needs compute capability 9.0, {gpu.name} has {gpu.version}"
        assert why_not(gpu, spec, 1, "bf16") == (None if gpu.capability == (9, 0) else expected)


# -- plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "held"), [(H100, None), (H200, None), (H20, 8), (MIG_SLICE, 2), (MIG_TWO, 4)], ids=lambda v: str(v)[:24]
)
def test_attend_needs_all_of_its_blocks_at_once(gpu: Gpu, held: int | None) -> None:
    """12 clusters of eight blocks wait for each other: a GPU that cannot hold them takes two kernels."""
    schedule = Schedule.of(FULL, 1, 544, gpu)
    if held is None:
        assert schedule.apart is None and schedule.clusters["attend"] == RANKS
        assert schedule.blocks["attend"] <= gpu.multiprocessors
        return
    assert schedule.fused is None and {"qkv", "attention"} <= schedule.blocks.keys()
    assert schedule.apart == (
        f"its 12 clusters of 8 blocks must run at once, {gpu.name} has {gpu.multiprocessors} multiprocessors, which "
        f"surely hold {held}; grouped: it is not for heads of 256"
    )
    # Larger clusters than eight blocks only if the GPU surely holds all of them at once.
    assert schedule.clusters["attention"] == (10 if held >= 16 else 8)


@pytest.mark.parametrize(("gpu", "cluster"), [(H200, 11), (H20, 11), (MIG_TWO, 11), (MIG_SLICE, 8)], ids=str)
def test_large_clusters_must_all_fit_on_the_gpu(gpu: Gpu, cluster: int) -> None:
    spec = dataclasses.replace(expert_spec(SMALL), heads=1)
    assert Schedule.of(spec, 1, 640, gpu, apart="of this test").clusters["attention"] == cluster


@pytest.mark.parametrize(
    ("held", "kernels", "cluster"),
    [({}, {"attend"}, None), ({8: 12}, {"attend"}, None), ({8: 11}, {"qkv", "attention"}, 10),
     ({8: 11, 10: 0}, {"qkv", "attention"}, 8)],
)  # fmt: skip
def test_the_device_overrides_the_estimate(
    held: dict[int, int], kernels: set[str], cluster: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_support, "ROOM", held)
    monkeypatch.setattr(nvrtc, "load_module", RecordedModule)
    schedule, module = launch.planned(H200, FULL, 1, 544, torch.device("cpu"))
    assert isinstance(module, RecordedModule)
    assert kernels <= module.shared.keys() and schedule.source == module.source
    assert schedule.clusters.get("attention") == cluster
    if cluster is not None:
        assert schedule.apart == "its 12 clusters of 8 blocks must run at once, the device holds 11"


def test_areas_of_shared_memory_do_not_overlap() -> None:
    assert offsets({"a": 5, "b": 16, "c": 40, "d": 8}) == ({"a": 0, "b": 16, "c": 32, "d": 80}, 88)


@pytest.mark.parametrize(("rows", "units"), [(1, 1), (16, 3), (17, 3), (32, 2), (33, 4), (64, 9)])
def test_the_sums_of_a_normed_product_replace_its_weights_only(rows: int, units: int) -> None:
    """The sums of each group of units begin at its weights, and end before what follows the product."""
    tiling = Tiling(-(-rows // 16))
    together = min(units, tiling.pairs)
    size = tiling.normed_bytes(units)
    assert size >= units * STAGE_BYTES
    for done in range(0, units, together):
        assert done * STAGE_BYTES + WARPS * together * 2 * tiling.held * 4 * 32 * 4 <= size


@pytest.mark.parametrize(("name", "prefix_tokens"), [("full", 544), ("full", 32), ("full pi0", 800), ("full pi0", 17)])
def test_attend_divides_the_keys_among_its_warps(name: str, prefix_tokens: int) -> None:
    spec = expert_spec(LOOPS[name].config)
    fused = attend(spec, 1, prefix_tokens, H200)
    assert isinstance(fused, Fused)
    work: Any = fused.work
    key_warps = WARPS // Tiling(-(-spec.tokens // 16)).row_warps
    keys = work.prefix_keys + work.suffix_keys
    assert work.prefix_keys % 8 == work.suffix_keys % 8 == 0
    assert work.prefix_keys * RANKS >= prefix_tokens and work.suffix_keys * RANKS >= spec.tokens
    assert key_warps * fused.rounds * 8 >= keys > key_warps * (fused.rounds - 1) * 8 - 16
    # The parts replace the weights, the probabilities replace q.
    rows = -(-spec.tokens // 16) * 16
    assert 4 * rows * spec.head_dim <= fused.units * STAGE_BYTES
    assert 2 * rows * (-(-keys // 16) * 16 + 8) <= work.maxima - work.queries


def test_attend_explains_what_it_cannot_run() -> None:
    assert attend(FULL, 2, 544, H200) == "it is for one sequence, not 2"
    assert attend(expert_spec(SMALL), 1, 100, H200) == "it is not for 1 key heads of 64"
    assert re.match(r"its keys need \d+ bytes .* has 232448", str(attend(FULL, 1, 1500, H200)))


@pytest.mark.parametrize("adaptive", [True, False])
def test_gate_up_with_many_rows_fits_next_to_output_and_down(adaptive: bool) -> None:
    spec = expert_spec(LOOPS["full fifty rows" if adaptive else "full pi0"].config)
    schedule = Schedule.of(spec, 1, 800, H200)
    assert schedule.macros["BATCHED_ROWS"] == 1
    for other in ("output", "down"):
        both = sum(-(-schedule.shared[kernel] // 128) * 128 + 1024 for kernel in ("gate_up", other))
        assert both <= H200.shared_per_multiprocessor
    assert not Schedule.of(FULL, 1, 544, H200).macros["BATCHED_ROWS"]
    narrow = dataclasses.replace(spec, width=512 - 32)
    assert not Schedule.of(narrow, 1, 800, H200).macros["BATCHED_ROWS"], "batches would not be whole"


# -- launches ---------------------------------------------------------------------------------------------------------

SLOW = ("full pi0", "full fifty rows", "full pi0 three rows of tiles")
"""Of full size as well, and slow to build."""


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in LOOPS])
def recorded(request: pytest.FixtureRequest) -> tuple[LoopCase, StreamedLoop, RecordedModule]:
    """Each loop, built once."""
    with pytest.MonkeyPatch.context() as patch:
        return LOOPS[request.param], *recorded_loop(LOOPS[request.param], patch)


def inputs_of(case: LoopCase) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
    """A loop's inputs, state token and actions."""
    loops = Loops(case, beyond=0.0)
    return loops.placed(), loops.state, loops.noise


def test_launches(recorded: tuple[LoopCase, StreamedLoop, RecordedModule]) -> None:
    case, loop, module = recorded
    module.launches.clear()
    config, expert = case.config, case.config.expert
    inputs, state, actions = inputs_of(case)
    with torch.inference_mode():
        loop.run(inputs, state, actions)
    schedule, fused = loop.schedule, loop.schedule.fused
    assert (fused is None) == (loop.values_t is not None)
    if loop.values_t is not None:
        # The kernels read values with the keys along the contiguous axis.
        assert torch.equal(loop.values_t[..., : case.prefix_tokens], inputs["values"].permute(0, 1, 3, 4, 2))
        assert not loop.values_t[..., case.prefix_tokens :].any() and loop.values_t.shape[-1] % KEYS == 0
    phases = [*(("qkv", "attention") if fused is None else (fused.kernel,)), "output", "gate_up", "down"]
    step = ["between", *([] if config.kind == "pi05" else ["mix"]), *phases * expert.depth]
    assert [launch[0] for launch in module.launches] == [*step * case.steps, "between"]
    assert len(step) == loop.kernels_a_step
    assert [launch[-1] for launch in module.launches] == [False] + [True] * (len(module.launches) - 1)
    for kernel, blocks, threads, arguments, cluster, _ in module.launches:
        assert (blocks, threads, cluster) == (schedule.blocks[kernel], THREADS, schedule.clusters.get(kernel, 1))
        assert blocks % cluster == 0 and cluster <= MAX_CLUSTER
        call = arguments[1]
        assert (call.keys, call.lengths) == (inputs["keys"].data_ptr(), inputs["lengths"].data_ptr())
        assert (call.actions, call.target) == (actions.data_ptr(), inputs["target"].data_ptr())
        assert call.follow == inputs["weights"].data_ptr()
        assert call.state == (None if state is None else state.data_ptr())
        assert (call.prefix_tokens, call.steps) == (case.prefix_tokens, case.steps)
    numbers = [(one[0], [a.value for a in one[3][2:] if isinstance(a, ctypes.c_int)]) for one in module.launches]
    of_layers = [n for kernel, n in numbers if kernel in phases and kernel != "attention"]
    repeats = len(phases) - phases.count("attention")
    assert of_layers == [[s, n] for s in range(case.steps) for n in range(expert.depth) for _ in range(repeats)]
    assert [n for kernel, n in numbers if kernel == "between"] == [[s] for s in range(case.steps + 1)]
    # Time, size and gain are those of the evaluation that has just ended.
    floats = [[a.value for a in launch[3][2:] if isinstance(a, ctypes.c_float)] for launch in module.launches]
    got = [n[1:] for launch, n in zip(module.launches, floats, strict=True) if launch[0] == "between"]
    times, dts = case.schedule.times[:-1], case.schedule.dts
    expected = zip(times, dts, step_gains(times, dts, None), strict=True)
    assert got[1:] == [pytest.approx(one) for one in expected]
    assert all(size <= H200.shared_per_block for size in module.shared.values())


@pytest.mark.slow
def test_equal_steps_are_one_over_n_rounded_once() -> None:
    """The kernel's `dt` is the quotient in float32, whichever side divides."""
    for steps in range(1, 1001):
        dts = torch.tensor(flow.Schedule.uniform(steps).dts)
        assert torch.equal(dts, -(torch.tensor(1.0) / torch.tensor(float(steps))).expand(steps))


def test_a_first_step_that_overlaps_the_prefix_waits_for_each_layer(
    recorded: tuple[LoopCase, StreamedLoop, RecordedModule],
) -> None:
    """A launch after a wait for another stream does not start before its predecessors have ended."""
    case, loop, module = recorded
    module.launches.clear()
    inputs = inputs_of(case)
    waits: list[int] = []
    with torch.inference_mode():
        with loop.chain:
            loop.first_step(*inputs, lambda layer: waits.append(len(module.launches)))
        first = len(module.launches)
        with loop.chain:
            loop.other_steps(*inputs)
        apart = list(module.launches)
        module.launches.clear()
        loop.run(*inputs)
    assert [launch[:3] for launch in apart] == [launch[:3] for launch in module.launches]
    assert waits == [i for i in range(first) if apart[i][0] in ("attend", "grouped", "qkv")]
    assert len(waits) == case.config.expert.depth
    assert {i for i, launch in enumerate(apart) if not launch[-1]} == {0, *waits, first}
    assert loop.reads_by_layer == ("attention" not in loop.schedule.blocks)


def test_missing_numbers_are_told_from_all_others() -> None:
    """`is_there` on pairs of BF16 numbers: a number of ones alone is missing. Rounding makes none: its NaN is 0x7fff
    (PTX manual, cvt)."""
    one, sign = re.findall(r"- (0x\w+)u\) & ~w\[i\] & (0x\w+)u", CODE)[0]
    numbers = torch.arange(1 << 16, dtype=torch.int64)
    for other in (0, 1, 0x7FFF, 0x7FC0, 0x8000, 0xFFFE, 0xFFFF, 0x1234):
        for word in (numbers << 16 | other, other << 16 | numbers):
            w = ~word & 0xFFFFFFFF
            missing = (w - int(one, 16)) & 0xFFFFFFFF & ~w & int(sign, 16)
            assert torch.equal(missing != 0, ((word >> 16) == 0xFFFF) | ((word & 0xFFFF) == 0xFFFF))
    assert torch.full((1,), NOTHING_YET, dtype=torch.int32).view(torch.int16).tolist() == [-1, -1]


def test_a_run_erases_the_suffix_of_an_interrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, module = recorded_loop(LOOPS["full"], monkeypatch)
    with torch.inference_mode():
        loop._suffix.zero_()
        loop.run(*inputs_of(LOOPS["full"]))
    assert bool((loop._suffix.view(torch.int16) == -1).all())
    call = next(launch[3][1] for launch in module.launches if launch[0] == "attend")
    assert (call.ks, call.vs) == (loop._suffix[0].data_ptr(), loop._suffix[1].data_ptr())


def test_stamps_find_their_lines() -> None:
    """`benchmarks.time_phases` writes into the source."""
    grouped = smolvla.expert_spec(EXPERTS["full"].config)
    lines = (
        (FULL, "attend", "float o[ROW_TILES][VALUE_TILES][4];"),
        (grouped, "grouped", "attention.arrived.wait_cluster();"),
    )
    for spec, attention, line in lines:
        source = Schedule.of(spec, 1, 177, H200).source
        assert stamped(source, attention).count("  stamp(") == len(stamps_of(attention))
        with pytest.raises(ValueError):
            stamped(source.replace(line, ""), attention)


def test_a_buffer_that_is_not_dense_is_refused() -> None:
    with pytest.raises(EngineError, match=r"keys: expected a contiguous tensor .* got \(4, 4\) with strides \(1, 4\)"):
        address("keys", torch.zeros(4, 4).t())
    with pytest.raises(EngineError, match="4 bytes beyond a multiple"):
        address("keys", torch.zeros(5)[1:])
    assert address("target", torch.zeros(5)[1:], 4) is not None
    assert address("state", None) is None
