"""What is proposed, from what was found so far."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.gpus import H200, RTX_4090
from vla_accel.config import EnginePrecision, EngineSpec, PolicyConfig
from vla_accel.engines import ENGINES
from vla_accel.fp8 import Products
from vla_accel.kernels.gpu import Gpu
from vla_accel.tune import candidates
from vla_accel.tune.search import Candidate, Tried

PARTS = ("vision", "kv_cache", "denoise")
PRODUCTS = Products(("o_proj", "down_proj"))
TENSORRT = Products(("o_proj", "down_proj"), precisions=("fp8",))
LOWER = {"vision": {"native": PRODUCTS}, "kv_cache": {"native": PRODUCTS, "tensorrt": TENSORRT}, "denoise": {}}
BASE = PolicyConfig(num_steps=4, device="cpu", strict=True)


def tried(name: str, engine: str, ms: float, dropped: str | None = None) -> Tried:
    config = BASE.with_specs({part: EngineSpec(engine) for part in PARTS})  # type: ignore[arg-type]
    return Tried(Candidate(name, config, ""), latency={"median_ms": ms}, dropped=dropped)


FOUND = [tried("eager_fp32", "eager", 1.0), tried("eager", "eager", 9.0), tried("native", "native", 3.0),
         tried("tensorrt", "tensorrt", 2.0, "gate one")]  # fmt: skip


def test_engines_that_cannot_run_here_are_left_out_with_a_reason() -> None:
    found, left_out = candidates.engines(BASE, PARTS, torch.device("cpu"))
    able = [name for name, engine in ENGINES.items() if engine.why_not(torch.device("cpu")) is None]
    assert [c.name for c in found] == [f"{name} bf16" for name in able] and "eager" in able
    assert "needs a GPU" in left_out["native"] and set(left_out) == {"native", "tensorrt", "tensorrt_rtx",
                                                                     "torch_tensorrt"}  # fmt: skip
    assert found[0].config.strict, "what falls back would be measured under a wrong name"


def test_low_precisions_are_tried_in_every_set_of_components_of_the_fastest_engine() -> None:
    lower = {**LOWER, "denoise": {"native": Products(("o_proj",), activations=False)}}
    found = candidates.precisions(FOUND, lambda: lower)
    sets = [{n: s.precision for n, s in c.config.specs(PARTS).items() if s.precision != "auto"} for c in found]
    assert sets[:3] == [{"vision": "fp8"}, {"kv_cache": "fp8"}, {"denoise": "fp8"}] and len(sets) == 7 + 7
    assert sets[7:] == [dict.fromkeys(chosen, "int8") for chosen in sets[:7]]
    assert {s.engine for c in found for s in c.config.specs(PARTS).values()} == {"native"}
    assert [c.name for c in found][-1] == "native int8 vision kv_cache denoise"
    assert candidates.precisions(FOUND[:1], lambda: LOWER) == []
    tensorrt = [FOUND[0], tried("tensorrt", "tensorrt", 2.0)]
    assert [c.name for c in candidates.precisions(tensorrt, lambda: LOWER)] == ["tensorrt fp8 kv_cache"]


@pytest.mark.parametrize(
    ("gpu", "names"), [(H200, ["native bf16", "native portable bf16"]), (RTX_4090, ["native bf16"])]
)
def test_portable_kernels_are_tried_where_others_would_run(
    gpu: Gpu, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, engine in ENGINES.items():
        monkeypatch.setattr(engine, "why_not", lambda device, here=name == "native": None if here else "not here")
    monkeypatch.setattr(Gpu, "of", lambda device: gpu)
    found = candidates.engines(BASE, PARTS, torch.device("cuda"))[0]
    assert [c.name for c in found] == names
    assert [s.native.kernels for s in found[-1].config.specs(PARTS).values()] == [found[-1].config.native.kernels] * 3
    assert (found[-1].config.native.kernels == "portable") == (len(names) == 2)


def test_attention_is_tried_where_the_native_engine_has_a_choice() -> None:
    found = candidates.attentions(FOUND, PARTS)
    assert [c.config.vision.attention for c in found] == ["sdpa", "flash_attn", "fastest"]
    assert all(c.config.denoise == EngineSpec("native") for c in found)
    assert candidates.attentions(FOUND[:2], PARTS) == [], "eager has none"


def test_other_steps_are_another_policy() -> None:
    found = candidates.steps(FOUND, (2, 1))
    assert [(c.config.num_steps, c.other_policy) for c in found] == [(2, True), (1, True)]
    assert {c.config.vision.engine for c in found} == {"native"}


def failed(component: str, ms: float = 2.5, precision: EnginePrecision = "fp8") -> Tried:
    """A low precision in one component, which gate one refused."""
    config = FOUND[2].candidate.config
    config = config.with_specs({**config.specs(PARTS), component: EngineSpec("native", precision=precision)})
    agreement = {"passed": False, "cosine": 0.5, "reasons": ["cosine"]}
    return Tried(Candidate(f"{precision} {component}", config, ""), agreement, {"median_ms": ms}, dropped="gate one")


def test_products_that_round_worst_are_kept_where_a_low_precision_failed() -> None:
    found = candidates.products([*FOUND, failed("vision"), failed("kv_cache", precision="int8")], lambda: LOWER, 1)
    assert [c.config.vision.keep for c in found] == [("o_proj",), ("down_proj",), (), ()]
    assert [c.config.kv_cache.keep for c in found][2:] == [("o_proj",), ("down_proj",)]
    assert [c.config.kv_cache.precision for c in found] == ["auto", "auto", "int8", "int8"]
    assert candidates.products(FOUND, lambda: LOWER, 1) == [], "nothing failed"
    assert candidates.products([*FOUND, failed("vision")], lambda: LOWER, 2) == [], "all of them is BF16"


def test_more_products_than_suffice_are_not_kept() -> None:
    lower = {"vision": {"native": Products(("a", "b", "c"))}, "kv_cache": {}, "denoise": {}}
    one = candidates.products([*FOUND, failed("vision")], lambda: lower, 1)
    refused = [replace(failed("vision"), candidate=c) for c in one[1:]]
    tries = [*FOUND, failed("vision"), Tried(one[0], latency={"median_ms": 2.0}), *refused]
    found = candidates.products(tries, lambda: lower, 2)
    assert [c.config.vision.keep for c in found] == [("b", "c")], "a alone sufficed"


def test_what_agreed_alone_is_tried_together() -> None:
    (kept, _), plain = candidates.products([failed("vision")], lambda: LOWER, 1), failed("kv_cache")
    agreed = [*FOUND, Tried(kept, latency={"median_ms": 2.0}), Tried(plain.candidate, latency={"median_ms": 2.2})]
    (both,) = candidates.together(agreed, PARTS)
    assert both.config.vision == kept.config.vision and both.config.kv_cache == plain.candidate.config.kv_cache
    assert both.name == "native fp8 vision but o_proj, fp8 kv_cache"
    assert candidates.together([*FOUND, Tried(kept, latency={"median_ms": 2.0})], PARTS) == []


def test_what_agreed_in_different_precisions_is_tried_together() -> None:
    vision = Tried(failed("vision", precision="int8").candidate, latency={"median_ms": 2.0})
    cache = Tried(failed("kv_cache").candidate, latency={"median_ms": 2.2})
    (both,) = candidates.together([*FOUND, vision, cache], PARTS)
    assert (both.config.vision.precision, both.config.kv_cache.precision) == ("int8", "fp8")
    alike = Tried(failed("vision").candidate, latency={"median_ms": 2.0})
    assert candidates.together([*FOUND, alike, cache], PARTS) == [], "a set of `precisions`"


def flow_row(name: str, n: int, schedule: object, error: float, passed: bool) -> dict[str, object]:
    return {"name": name, "num_steps": n, "schedule": schedule, "error": {"value": error}, "passed": passed}


FLOW = {
    "rows": [
        flow_row("4 uniform", 4, "uniform", 0.06, True),
        flow_row("4 cubic", 4, "cubic", 0.02, True),
        flow_row("3 cubic", 3, "cubic", 0.05, True),
        flow_row("3 searched", 3, [1.0, 0.1, 0.01, 0.0], 0.04, True),
        flow_row("2 uniform", 2, "uniform", 0.05, False),
        flow_row("1 uniform", 1, "uniform", 0.06, True),
    ]
}


def test_fewer_steps_that_end_no_further_from_the_exact_flow_are_tried_like_any_candidate() -> None:
    found = candidates.schedules(FOUND, lambda: FLOW)
    steps = [(c.config.num_steps, c.config.schedule) for c in found]
    assert steps == [(1, "uniform"), (3, (1.0, 0.1, 0.01, 0.0))], (
        "the closest of each number, and none that may be further"
    )
    assert not any(c.other_policy for c in found)
    assert found[1].config.denoise == EngineSpec("native") and found[1].name == "native, 3 searched"
    assert found[1].why == "4.0% of the actions' spread from the exact flow, the checkpoint's own 6.0%"
    few = [
        replace(one, candidate=replace(one.candidate, config=replace(one.candidate.config, num_steps=3)))
        for one in FOUND
    ]
    assert [c.config.num_steps for c in candidates.schedules(few, lambda: FLOW)] == [1]
