"""What is proposed, from what was found so far."""

from __future__ import annotations

import torch

from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.fp8 import Products
from vla_accel.tune import candidates
from vla_accel.tune.search import Candidate, Tried

PARTS = ("vision", "kv_cache", "denoise")
PRODUCTS = Products(("o_proj", "down_proj"))
LOWER = {"vision": {"native": PRODUCTS}, "kv_cache": {"native": PRODUCTS, "tensorrt": PRODUCTS}, "denoise": {}}
BASE = PolicyConfig(num_steps=4, device="cpu", strict=True)


def tried(name: str, engine: str, ms: float, dropped: str | None = None) -> Tried:
    config = BASE.with_specs({part: EngineSpec(engine) for part in PARTS})  # type: ignore[arg-type]
    return Tried(Candidate(name, config, ""), latency={"median_ms": ms}, dropped=dropped)


FOUND = [tried("eager_fp32", "eager", 1.0), tried("eager", "eager", 9.0), tried("native", "native", 3.0),
         tried("tensorrt", "tensorrt", 2.0, "gate one")]  # fmt: skip


def test_the_reference_is_fp32_eager() -> None:
    config = candidates.reference(BASE, PARTS).config
    assert config.precision == "fp32" and config.num_steps == 4
    assert {spec.engine for spec in config.specs(PARTS).values()} == {"eager"}


def test_engines_that_cannot_run_here_are_left_out_with_a_reason() -> None:
    stage, left_out = candidates.engines(BASE, PARTS, torch.device("cpu"))
    assert [c.name for c in stage([])] == ["eager bf16"]
    assert "needs a GPU" in left_out["native"] and set(left_out) == {"native", "tensorrt", "tensorrt_rtx",
                                                                     "torch_tensorrt"}  # fmt: skip
    assert stage([])[0].config.strict, "what falls back would be measured under a wrong name"


def test_fp8_is_tried_in_every_set_of_components_of_the_fastest_engine() -> None:
    found = candidates.precisions(lambda: LOWER)(FOUND)
    sets = [{n for n, s in c.config.specs(PARTS).items() if s.precision == "fp8"} for c in found]
    assert sets == [{"vision"}, {"kv_cache"}, {"vision", "kv_cache"}]
    assert {s.engine for c in found for s in c.config.specs(PARTS).values()} == {"native"}
    assert [c.name for c in found][-1] == "native fp8 vision kv_cache"
    assert candidates.precisions(lambda: LOWER)(FOUND[:1]) == []


def test_attention_is_tried_where_the_native_engine_has_a_choice() -> None:
    found = candidates.attentions(PARTS)(FOUND)
    assert [c.config.vision.attention for c in found] == ["sdpa", "flash_attn", "fastest"]
    assert all(c.config.denoise == EngineSpec("native") for c in found)
    assert candidates.attentions(PARTS)(FOUND[:2]) == [], "eager has none"


def test_other_steps_are_another_policy() -> None:
    found = candidates.steps((2, 1))(FOUND)
    assert [(c.config.num_steps, c.other_policy) for c in found] == [(2, True), (1, True)]
    assert {c.config.vision.engine for c in found} == {"native"}


def failed(component: str, ms: float = 2.5) -> Tried:
    """FP8 in one component, which gate one refused."""
    config = FOUND[2].candidate.config
    config = config.with_specs({**config.specs(PARTS), component: EngineSpec("native", precision="fp8")})
    agreement = {"passed": False, "cosine": 0.5, "reasons": ["cosine"]}
    return Tried(Candidate(f"fp8 {component}", config, ""), agreement, {"median_ms": ms}, dropped="gate one")


def test_products_that_round_worst_are_kept_where_fp8_failed() -> None:
    found = candidates.products(lambda: LOWER)([*FOUND, failed("vision")])
    assert [c.config.vision.keep for c in found] == [("o_proj",), ("down_proj",)]
    assert all(c.config.vision.precision == "fp8" and c.config.kv_cache == EngineSpec("native") for c in found)
    assert candidates.products(lambda: LOWER)(FOUND) == [], "nothing failed"


def test_what_agreed_alone_is_tried_together() -> None:
    (kept, _), plain = candidates.products(lambda: LOWER)([failed("vision")]), failed("kv_cache")
    agreed = [*FOUND, Tried(kept, latency={"median_ms": 2.0}), Tried(plain.candidate, latency={"median_ms": 2.2})]
    (both,) = candidates.together(PARTS)(agreed)
    assert both.config.vision == kept.config.vision and both.config.kv_cache == plain.candidate.config.kv_cache
    assert candidates.together(PARTS)([*FOUND, Tried(kept, latency={"median_ms": 2.0})]) == []
