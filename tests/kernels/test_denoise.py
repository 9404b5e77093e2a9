"""The streamed denoise loop (`kernels/loop/`) against what its source expects, without a GPU: what fits, structures
and arguments, shared memory, launches."""

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
from tests.support.smolvla_loops import EXPERTS
from tests.support.streamed_support import LOOPS, LoopCase, RecordedModule, reason, recorded_loop, streamable
from vla_accel.errors import EngineError
from vla_accel.families.pi0.native_loop import sizes_of
from vla_accel.families.smolvla import native_loop as smolvla_expert
from vla_accel.kernels import nvrtc
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import StreamedLoop, launch, why_not
from vla_accel.kernels.loop.arguments import Call, Model
from vla_accel.kernels.loop.schedule import (
    KEYS,
    MAX_CLUSTER,
    NOTHING_YET,
    RANKS,
    STAGE_BYTES,
    THREADS,
    WARPS,
    Attend,
    Schedule,
    held_tiles,
)
from vla_accel.nn.flow import euler_times
from vla_accel.nn.rtc import guidance_weights

PARTS = ("core", "products", "phases", "attention", "attend", "grouped", "step")
SOURCE = nvrtc.source_of({}, *(f"loop/{n}" for n in PARTS))
CODE = re.sub(r"//.*", "", SOURCE)


# -- fits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_the_cases_here_fit(name: str) -> None:
    assert reason(LOOPS[name]) is None


SMALL = LOOPS["demo"].config


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
        (
            {"kind": "pi0", "action_horizon": 64, "discrete_state_input": False},
            "1 x 65 suffix rows are more than 64",
        ),
    ],
)
def test_what_does_not_fit_says_why(change: dict[str, Any], why: str) -> None:
    changes = dict(change)
    expert = changes.pop("expert", {})
    shared = {k: v for k, v in expert.items() if k in ("heads", "head_dim")}
    config = dataclasses.replace(
        SMALL, expert=dataclasses.replace(SMALL.expert, **expert), prefix=dataclasses.replace(SMALL.prefix, **shared),
        **changes,
    )  # fmt: skip
    found = reason(LoopCase(config))
    assert (found is None) == (why == "") and why in (found or "")


def test_batch_weights_and_device_decide_too() -> None:
    sizes = sizes_of(SMALL)
    assert why_not(None, sizes, 1, "bf16") == "there is no GPU"
    assert why_not(H200, sizes, 6, "bf16") is None
    assert why_not(H200, sizes, 7, "bf16") == "7 x 10 suffix rows are more than 64"
    for precision in ("fp32", "fp16", "fp8", "int8"):
        assert why_not(H200, sizes, 1, precision) == f"it takes BF16 weights, not {precision.upper()}"


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_that_is_no_hopper_says_so(name: str) -> None:
    """The portable loop runs there, and the ledger gives this reason."""
    for gpu in (GPUS[name], GPUS[name].portable):
        found = why_not(gpu, sizes_of(SMALL), 1, "bf16")
        expected = f"it needs compute capability 9.0, {gpu.name} has {gpu.version}"
        assert found == (None if gpu.capability == (9, 0) else expected)


FULL = sizes_of(LOOPS["full"].config)


@pytest.mark.parametrize(
    ("gpu", "room"), [(H100, None), (H200, None), (H20, 8), (MIG_SLICE, 2), (MIG_TWO, 4)], ids=lambda v: str(v)[:24]
)
def test_attend_needs_all_of_its_blocks_at_once(gpu: Gpu, room: int | None) -> None:
    """12 clusters of eight blocks wait for each other: a GPU without room for them takes two kernels, and says why."""
    schedule = Schedule.of(FULL, 1, 544, gpu)
    if room is None:
        assert schedule.attend is not None and schedule.apart is None and schedule.clusters["attend"] == RANKS
        assert schedule.attend.blocks <= gpu.multiprocessors
        return
    assert (
        schedule.attend is None and "attend" not in schedule.blocks and {"qkv", "attention"} <= schedule.blocks.keys()
    )
    assert schedule.apart == (
        f"its 12 clusters of 8 blocks must run at once, {gpu.name} has {gpu.multiprocessors} multiprocessors, which "
        f"surely hold {room}; grouped: it is not for heads of 256"
    )
    # A lone cluster beyond eight blocks only where the GPU surely holds all of them at once.
    assert schedule.clusters["attention"] == (10 if room >= 16 else 8)


@pytest.mark.parametrize(("gpu", "cluster"), [(H200, 11), (H20, 11), (MIG_TWO, 11), (MIG_SLICE, 8)], ids=str)
def test_clusters_beyond_eight_need_room_for_all(gpu: Gpu, cluster: int) -> None:
    sizes = sizes_of(LOOPS["demo"].config)  # heads of 64: no `attend`; three tiles of rows
    schedule = Schedule.of(dataclasses.replace(sizes, heads=1), 1, 640, gpu, apart="a test asks for it")
    assert schedule.clusters["attention"] == cluster


@pytest.mark.parametrize(
    ("room", "kernels", "cluster"),
    [({}, {"attend"}, None), ({8: 12}, {"attend"}, None), ({8: 11}, {"qkv", "attention"}, 10),
     ({8: 11, 10: 0}, {"qkv", "attention"}, 8)],
)  # fmt: skip
def test_the_device_has_the_last_word(
    room: dict[int, int], kernels: set[str], cluster: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arithmetic allows and the device does not hold is planned again."""
    monkeypatch.setattr(streamed_support, "ROOM", room)
    monkeypatch.setattr(nvrtc, "load_module", RecordedModule)
    schedule, module = launch.planned(H200, FULL, 1, 544, torch.device("cpu"))
    assert isinstance(module, RecordedModule)
    assert kernels <= module.shared.keys() and schedule.source == module.source
    assert schedule.clusters.get("attention") == cluster
    if cluster is not None:
        assert schedule.apart == "its 12 clusters of 8 blocks must run at once, the device holds 11"


# -- what is handed to the kernels -----------------------------------------------------------------------------------


def parameters_of(kernel: str) -> list[type]:
    match = re.search(rf"\b{kernel}\(const __grid_constant__ Model m, const __grid_constant__ Call c([^)]*)\)", CODE)
    assert match, kernel
    kinds = {"float": ctypes.c_float, "int": ctypes.c_int}
    rest = [kinds[p.split()[0]] for p in match[1].split(",") if p.strip()]
    return [Model, Call, *rest]


SECOND = ("full pi0", "full fifty rows", "full pi0 three rows of tiles")
"""Of full size, too, and as long in building."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name in SECOND else ()) for name in LOOPS]
)
def recorded(request: pytest.FixtureRequest) -> tuple[LoopCase, StreamedLoop, RecordedModule]:
    """Each loop, built once."""
    with pytest.MonkeyPatch.context() as patch:
        return LOOPS[request.param], *recorded_loop(LOOPS[request.param], patch)


def given_to(case: LoopCase) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
    """A loop's inputs, state token and actions."""
    config, expert = case.config, case.config.expert
    cache = (expert.depth, case.batch, case.prefix_tokens, expert.kv_heads, expert.head_dim)
    given = {name: torch.randn(cache).bfloat16() for name in ("keys", "values")}
    given["lengths"] = torch.full((case.batch,), case.prefix_tokens, dtype=torch.int32)
    actions, given["target"] = torch.zeros(2, case.batch, config.action_horizon, config.action_dim)
    given["weights"] = torch.zeros(case.batch, config.action_horizon)
    state = None if config.kind == "pi05" else torch.zeros(case.batch, expert.width)
    return given, state, actions


def test_launches(recorded: tuple[LoopCase, StreamedLoop, RecordedModule]) -> None:
    case, loop, module = recorded
    module.launches.clear()
    config, adaptive, expert = case.config, case.config.kind == "pi05", case.config.expert
    given, state, actions = given_to(case)
    keys, values, lengths, target, weights = (
        given[name] for name in ("keys", "values", "lengths", "target", "weights")
    )
    with torch.inference_mode():
        loop.run(given, state, actions)
    attend, grouped = loop.schedule.attend, loop.schedule.grouped
    assert (attend is None and grouped is None) == (loop.values_t is not None)
    if loop.values_t is not None:
        # The kernels read values with the keys along the contiguous axis.
        assert torch.equal(loop.values_t[..., : case.prefix_tokens], values.permute(0, 1, 3, 4, 2))
        assert not loop.values_t[..., case.prefix_tokens :].any() and loop.values_t.shape[-1] % KEYS == 0

    apart = ("qkv", "attention") if grouped is None else ("grouped",)
    phases = [*(apart if attend is None else ("attend",)), "output", "gate_up", "down"]
    step = ["between", *([] if adaptive else ["mix"]), *phases * expert.depth]
    assert [launch[0] for launch in module.launches] == [*step * case.steps, "between"]
    assert [launch[-1] for launch in module.launches] == [False] + [True] * (len(module.launches) - 1)
    defines = module.defines
    rows = case.batch * config.suffix_tokens
    assert (defines["M"], defines["MT"], defines["T"]) == (rows, -(-rows // 16), config.suffix_tokens)
    grids = {
        "qkv": (expert.heads + 2 * expert.kv_heads) * expert.head_dim // 16,
        "output": expert.width // 8, "down": expert.width // 8, "mix": expert.width // 8,
        "between": defines["STEP_BLOCKS"] * case.batch * (config.action_horizon + (not adaptive)),
        "gate_up": -(-expert.mlp_dim // 8 // defines["GATE_UP_UNITS"]),
        "attention": defines["CLUSTER"] * case.batch * expert.kv_heads
        * -(-config.suffix_tokens * (expert.heads // expert.kv_heads) // 16),
        "attend": RANKS * expert.heads + 2 * expert.kv_heads * expert.head_dim // 16,
        "grouped": defines["GROUP_RANKS"] * expert.kv_heads,
    }  # fmt: skip
    clusters = {
        "attention": defines["CLUSTER"], "attend": RANKS, "grouped": defines["GROUP_RANKS"],
        "down": defines["DOWN_SPLIT"],
        "output": defines["OUTPUT_SPLIT"], "mix": defines["MIX_SPLIT"], "between": defines["STEP_BLOCKS"],
    }  # fmt: skip
    for kernel, blocks, threads, arguments, cluster, _ in module.launches:
        assert [type(a) for a in arguments] == parameters_of(kernel), kernel
        assert (blocks, threads, cluster) == (grids[kernel], THREADS, clusters.get(kernel, 1)), kernel
        assert blocks % cluster == 0 and cluster <= MAX_CLUSTER
        call = arguments[1]
        assert (call.keys, call.lengths, call.actions) == (keys.data_ptr(), lengths.data_ptr(), actions.data_ptr())
        assert call.state == (None if state is None else state.data_ptr())
        assert (call.target, call.follow) == (target.data_ptr(), weights.data_ptr())
        assert (call.s, call.sp, call.steps) == (case.prefix_tokens, -(-case.prefix_tokens // KEYS) * KEYS, case.steps)
    numbers = [[a.value for a in launch[3][2:] if isinstance(a, ctypes.c_int)] for launch in module.launches]
    of_phase = [
        [
            *([[s, n, attend.prefix_keys, attend.suffix_keys]] if attend else [[s, n]] if grouped else [[s, n], [n]]),
            [s, n],
            [s, n],
            [s, n],
        ]
        for s in range(case.steps)
        for n in range(expert.depth)
    ]
    got = [n for launch, n in zip(module.launches, numbers, strict=True) if launch[0] in phases]
    assert got == [one for layer in of_phase for one in layer]
    assert [n for launch, n in zip(module.launches, numbers, strict=True) if launch[0] == "between"] == [
        [s] for s in range(case.steps + 1)
    ]
    # Time and gain are those of the evaluation that has just ended.
    floats = [[a.value for a in launch[3][2:] if isinstance(a, ctypes.c_float)] for launch in module.launches]
    got = [n[1:] for launch, n in zip(module.launches, floats, strict=True) if launch[0] == "between"]
    times = euler_times(case.steps).tolist()
    assert got[1:] == [pytest.approx(pair) for pair in zip(times, guidance_weights(times, case.steps), strict=True)]


def test_a_first_step_beside_the_prefix_asks_for_each_layer(
    recorded: tuple[LoopCase, StreamedLoop, RecordedModule],
) -> None:
    """What follows a wait for another stream does not start before its predecessors have ended."""
    case, loop, module = recorded
    module.launches.clear()
    inputs = given_to(case)
    asked: list[int] = []
    with torch.inference_mode():
        with loop.chain:
            loop.begin(*inputs, lambda layer: asked.append(len(module.launches)))
        first = len(module.launches)
        with loop.chain:
            loop.go_on(*inputs)
        apart, joined = list(module.launches), {first}
        module.launches.clear()
        loop.run(*inputs)
    assert [launch[:3] for launch in apart] == [launch[:3] for launch in module.launches]
    assert asked == [i for i in range(first) if apart[i][0] in ("attend", "grouped", "qkv")]
    assert len(asked) == case.config.expert.depth
    late = {i for i, launch in enumerate(apart) if not launch[-1]}
    assert late == {0, *asked, *joined}
    assert loop.reads_by_layer == ("attention" not in loop.schedule.blocks)


def test_shared_memory_holds_what_the_kernels_put_there(
    recorded: tuple[LoopCase, StreamedLoop, RecordedModule],
) -> None:
    """Each area as the kernels lay it out: weights, then barriers, then what the reductions need."""
    case, _, module = recorded
    sizes, expert = module.defines, case.config.expert
    tiles, units, held = sizes["MT"], sizes["GATE_UP_UNITS"], held_tiles(sizes["M"])
    pairs = 2 if tiles == 2 else 4
    squares, stage = 16 * (WARPS * held + tiles) * 4, sizes["STAGE_BYTES"]
    for kernel, count in (("qkv", 1), ("gate_up", units)):
        if kernel not in module.shared:
            continue
        assert 16 * 2 * expert.width <= stage
        # Behind the weights lie the factors of rows that are loaded in batches.
        factors = 2 * expert.width * (kernel == "gate_up" and sizes["BATCHED_ROWS"])
        assert module.shared[kernel] >= count * (stage + 8) + factors + squares
        # The sums take the place of the weights of `together` units, the last of which may be fewer.
        together = min(count, pairs)
        for done in range(0, count, together):
            room = module.shared[kernel] - squares - 8 * count - factors - done * stage
            assert WARPS * together * 2 * held * 4 * 32 * 4 <= max(room, 0), (kernel, done)
    for kernel, k in (("output", expert.heads * expert.head_dim), ("mix", expert.width), ("down", expert.mlp_dim)):
        if kernel not in module.shared:
            continue
        split = sizes[f"{kernel.upper()}_SPLIT"]
        part = k // split
        room = max(part * split * 8 * 2, WARPS * split * held * 4 * 128)
        assert module.shared[kernel] >= room + split * tiles * 128 * 4 + 8 * -(-part // 1024)
        # Barriers are words of eight bytes, and follow the parts.
        assert (room + split * tiles * 128 * 4) % 8 == 0
    assert all(size <= 227 * 1024 for size in module.shared.values())


@pytest.mark.parametrize(
    ("name", "prefix_tokens"),
    [("full", 544), ("full", 32), ("full pi0", 800), ("full pi0", 17)],
)
def test_attend_deals_out_every_key_once(name: str, prefix_tokens: int) -> None:
    config, stage = LOOPS[name].config, STAGE_BYTES
    attend = Attend.of(sizes_of(config), 1, prefix_tokens, H200)
    assert isinstance(attend, Attend)
    tokens, rows, d = config.suffix_tokens, -(-config.suffix_tokens // 16) * 16, config.expert.head_dim
    keys = attend.prefix_keys + attend.suffix_keys
    assert attend.prefix_keys % 8 == attend.suffix_keys % 8 == 0
    taken = torch.zeros(prefix_tokens + tokens, dtype=torch.int32)
    key_warps = WARPS if rows <= 32 else WARPS // 4
    for rank in range(RANKS):
        for warp in range(key_warps):
            for turn in range(attend.rounds):
                tile = (warp + key_warps * turn) * 8
                for key in range(tile, tile + 8):
                    of_prefix, of_suffix = (
                        rank * attend.prefix_keys + key,
                        rank * attend.suffix_keys - attend.prefix_keys + key,
                    )
                    if key < attend.prefix_keys and of_prefix < prefix_tokens:
                        taken[of_prefix] += 1
                    elif attend.prefix_keys <= key < keys and of_suffix < tokens:
                        taken[prefix_tokens + of_suffix] += 1
    assert torch.equal(taken, torch.ones_like(taken))
    # The areas one after the other: weights and what their sums need, keys, values, q, statistics, own q, two barriers.
    units, sixteen = d // 16 // RANKS, -(-keys // 16) * 16
    areas = -(-(units * (stage + 8) + 4 * (WARPS * held_tiles(rows) * 16 + rows)) // 16) * 16
    areas += 2 * (d + 8) * (keys + sixteen + rows) + 4 * rows * (2 * WARPS + 2 * RANKS) + 2 * rows * d // RANKS
    assert attend.shared == areas + 2 * 8
    # The parts take the place of the weights, the probabilities that of q.
    assert 4 * rows * d <= units * stage and 2 * rows * (sixteen + 8) <= 2 * rows * (d + 8)


def test_attend_declines_what_it_cannot_hold() -> None:
    demo = sizes_of(LOOPS["demo"].config)
    assert Attend.of(FULL, 2, 544, H200) == "it is for one sequence, not 2"
    assert Attend.of(demo, 1, 100, H200) == "it is not for 1 key heads of 64"
    assert re.match(r"its keys need \d+ bytes .* has 232448", str(Attend.of(FULL, 1, 1500, H200)))


def test_a_number_that_is_not_there_is_told_from_every_other() -> None:
    """`is_there` on pairs of BF16 numbers: one of ones alone is not there. Rounding gives none: its NaN is 0x7fff (PTX
    manual, cvt)."""
    one, sign = re.findall(r"- (0x\w+)u\) & ~w\[i\] & (0x\w+)u", CODE)[0]
    numbers = torch.arange(1 << 16, dtype=torch.int64)
    for other in (0, 1, 0x7FFF, 0x7FC0, 0x8000, 0xFFFE, 0xFFFF, 0x1234):
        for word in (numbers << 16 | other, other << 16 | numbers):
            w = ~word & 0xFFFFFFFF
            missing = (w - int(one, 16)) & 0xFFFFFFFF & ~w & int(sign, 16)
            assert torch.equal(missing != 0, ((word >> 16) == 0xFFFF) | ((word & 0xFFFF) == 0xFFFF))
    assert torch.full((1,), NOTHING_YET, dtype=torch.int32).view(torch.int16).tolist() == [-1, -1]


def test_the_suffix_is_not_there_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an interrupted run left."""
    case = LOOPS["full"]
    loop, module = recorded_loop(case, monkeypatch)
    keys = torch.zeros(2, 1, case.prefix_tokens, 1, 256, dtype=torch.bfloat16)
    target, weights = torch.zeros(1, 10, 32), torch.zeros(1, 10)
    given = {"keys": keys, "values": keys, "lengths": torch.zeros(1, dtype=torch.int32)}
    with torch.inference_mode():
        loop._suffix.zero_()
        loop.run(given | {"target": target, "weights": weights}, None, torch.zeros(1, 10, 32))
    assert bool((loop._suffix.view(torch.int16) == -1).all())
    call = next(launch[3][1] for launch in module.launches if launch[0] == "attend")
    assert (call.ks, call.vs) == (loop._suffix[0].data_ptr(), loop._suffix[1].data_ptr())


@pytest.mark.parametrize("adaptive", [True, False])
def test_blocks_of_gate_up_with_many_rows_lie_beside_those_of_output_and_down(adaptive: bool) -> None:
    sizes = sizes_of(LOOPS["full fifty rows" if adaptive else "full pi0"].config)
    schedule = Schedule.of(sizes, 1, 800, H200)
    assert schedule.macros["BATCHED_ROWS"] == 1
    for other in ("output", "down"):
        both = sum(-(-schedule.shared[kernel] // 128) * 128 + 1024 for kernel in ("gate_up", other))
        assert both <= H200.shared_per_multiprocessor
    assert not Schedule.of(FULL, 1, 544, H200).macros["BATCHED_ROWS"]
    narrow = dataclasses.replace(sizes, width=512 - 32)
    assert not Schedule.of(narrow, 1, 800, H200).macros["BATCHED_ROWS"], "batches would not be whole"


def test_stamps_find_their_lines() -> None:
    """`benchmarks.time_phases` writes into the source."""
    smolvla = smolvla_expert.sizes_of(EXPERTS["full"].config)
    lines = ((FULL, "attend", "float o[MT][VT][4];"), (smolvla, "grouped", "float o[D / 8][4];"))
    for sizes, attention, line in lines:
        source = Schedule.of(sizes, 1, 177, H200).source
        assert stamped(source, attention).count("  stamp(") == len(stamps_of(attention))
        with pytest.raises(ValueError):
            stamped(source.replace(line, ""), attention)


def test_a_buffer_that_is_not_dense_is_refused() -> None:
    with pytest.raises(EngineError, match=r"keys: expected a contiguous tensor .* got \(4, 4\) with strides \(1, 4\)"):
        launch._address("keys", torch.zeros(4, 4).t())
    with pytest.raises(EngineError, match="4 bytes beyond a multiple"):
        launch._address("keys", torch.zeros(5)[1:])
    assert launch._address("target", torch.zeros(5)[1:], 4) is not None
    assert launch._address("state", None) is None


def test_streamable_differs_by_kind() -> None:
    assert streamable("pi0", width=64, mlp=64, heads=1).suffix_tokens == 11
