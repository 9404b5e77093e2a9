"""π0-FAST's native decode program against the eager module: in the ops' torch references, and, in a process of its own,
in their Triton kernels through the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.scales import scales_of_any
from tests.support.scripts import lines_of, needs_triton
from tests.support.tiny_pi0_fast import BOS, tiny_config, tiny_model
from vla_accel.config import EngineSpec
from vla_accel.errors import EngineError
from vla_accel.families.pi0.native import Pi0FastStore
from vla_accel.families.pi0_fast.family import PI0_FAST
from vla_accel.families.pi0_fast.native_decode import TURN, NativeDecode
from vla_accel.families.pi0_fast.network import Pi0Fast, Pi0FastConfig
from vla_accel.families.prompted import PromptShape
from vla_accel.nn.flow import Schedule

ROOT = Path(__file__).parents[2]
BATCH, LENGTH, STEPS = 3, 32, 10
LENGTHS = (9, 32, 17)


def inputs_of(config: Pi0FastConfig) -> dict[str, Tensor]:
    """Three observations with prompts of three lengths, each of which ends in <bos>."""
    generator = torch.Generator().manual_seed(5)
    side = config.vision.image_size
    tokens = torch.randint(3, config.vocab_size, (BATCH, LENGTH), generator=generator)
    for row, length in enumerate(LENGTHS):
        tokens[row, length - 1] = BOS
    return {
        "images": torch.randint(0, 256, (BATCH, 2, side, side, 3), generator=generator, dtype=torch.uint8),
        "tokens": tokens,
        "lengths": torch.tensor([config.prefix_tokens(2, n) for n in LENGTHS], dtype=torch.int32),
    }


def outputs_of(
    model: Pi0Fast, store: Pi0FastStore | None, steps: int = STEPS, **precisions: str
) -> tuple[dict[str, Tensor], list[str]]:
    """All outputs, eager without a store, and the programs' details."""
    buffers, details = inputs_of(model.config), []
    shape = PromptShape(BATCH, Schedule.uniform(steps), 2, LENGTH, True)
    for component in PI0_FAST.components(model, shape, store=store):
        outputs = {o.name: o.empty(torch.device("cpu")) for o in component.outputs}
        with torch.inference_mode():
            if store is None:
                results = component.module(*(buffers[i.name] for i in component.inputs))
                results = results if isinstance(results, tuple) else (results,)
                outputs = dict(zip(outputs, results, strict=True))
            else:
                assert component.native is not None
                program = component.native(EngineSpec("native", precision=precisions.get(component.name, "auto")))  # type: ignore[arg-type]
                program(buffers, outputs)
                details.append(program.detail)
        buffers |= outputs
    return buffers, details


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("steps", [1, TURN, STEPS])
def test_tokens_are_those_of_eager(tied: bool, steps: int) -> None:
    model = tiny_model(tiny_config(tied=tied, stop_token=None))
    eager, _ = outputs_of(model, None, steps)
    native, details = outputs_of(model, Pi0FastStore(model), steps)
    assert torch.equal(native["action_tokens"], eager["action_tokens"])
    assert details[-1].startswith("fused ops, torch.float32, 4 tokens a turn")
    assert steps == 1 or len(eager["action_tokens"].unique()) > 3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_ends_with_the_turn_in_which_all_rows_have_stopped(seed: int) -> None:
    endless, _ = outputs_of(tiny_model(tiny_config(stop_token=None), seed), None, 16)
    rows = endless["action_tokens"].tolist()
    in_all = set(rows[0]) & set(rows[1]) & set(rows[2])
    stops = {token: max(row.index(token) for row in rows) for token in in_all}
    assert seed == 0 or any(TURN <= last < 12 for last in stops.values()), "nothing to stop at in the middle"
    # One that some row never has.
    stops[next(token for token in rows[0] if token not in in_all)] = 15
    for stop, last in stops.items():
        model = tiny_model(tiny_config(stop_token=stop), seed)
        found = outputs_of(model, Pi0FastStore(model), 16)[0]["action_tokens"]
        turn = (last // TURN + 1) * TURN
        assert torch.equal(found[:, :turn], endless["action_tokens"][:, :turn])
        assert not found[:, turn:].any()


def test_a_program_begins_anew() -> None:
    """What an earlier call wrote, or found finished, changes nothing."""
    model = tiny_model(tiny_config(stop_token=None))
    buffers, _ = outputs_of(model, None)
    program = Pi0FastStore(model).decode(BATCH, buffers["keys"].shape[2], STEPS, EngineSpec("native"))
    assert isinstance(program, NativeDecode)
    found = {"action_tokens": torch.full((BATCH, STEPS), 7)}
    with torch.inference_mode():
        program(buffers, found)
        program.finished.fill_(True)
        program(buffers, found)
    assert torch.equal(found["action_tokens"], buffers["action_tokens"])


def test_prefix_and_decode_read_the_same_weights() -> None:
    model = tiny_model(tiny_config())
    store = Pi0FastStore(model)
    outputs_of(model, store)
    prepared = store.tensors()
    own = {t.data_ptr() for t in prepared["decode"]} - {t.data_ptr() for t in prepared["kv_cache"]}
    # The last layer's four, of which the prefix has the keys and values alone, and the last norm's factors.
    assert len(own) == 5 and len({t.data_ptr() for t in prepared["decode"]}) == 4 * 3 + 2


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("parts", [("decode",), ("kv_cache", "decode")])
def test_weights_of_one_byte(precision: str, parts: tuple[str, ...]) -> None:
    """Another number of bytes, and the first token's logits hardly moved."""
    model = tiny_model(tiny_config(stop_token=None)).to_compute_dtype(torch.bfloat16)
    kind = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[precision]
    store = Pi0FastStore(model, scales_of_any(32.0))
    found, details = outputs_of(model, store, 4, **dict.fromkeys(parts, precision))
    assert details[-1].startswith(f"fused ops, {precision.upper()} weights")
    narrow = [t for t in store.tensors()["decode"] if t.dtype == kind]
    assert len(narrow) == 4 * model.config.prefix.depth
    shared = {t.data_ptr() for t in narrow} & {t.data_ptr() for t in store.tensors()["kv_cache"]}
    # Never q/k/v, which the prefix keeps in BF16, and nothing of the last layer, where it stops early.
    assert len(shared) == (3 * (model.config.prefix.depth - 1) if "kv_cache" in parts else 0)
    assert found["action_tokens"].shape == (BATCH, 4)
    with pytest.raises(EngineError, match="decode: keep: its weights are stored in one byte all or none"):
        store.decode(BATCH, 40, 4, EngineSpec("native", precision=precision, keep=("o_proj",)))  # type: ignore[arg-type]


def test_logits_of_weights_of_one_byte_are_close() -> None:
    model = tiny_model(tiny_config(stop_token=None)).to_compute_dtype(torch.bfloat16)
    buffers, _ = outputs_of(model, None)
    logits = []
    for precision in ("auto", "fp8", "int8"):
        program = Pi0FastStore(model).decode(
            BATCH, buffers["keys"].shape[2], 1, EngineSpec("native", precision=precision)  # type: ignore[arg-type]
        )  # fmt: skip
        assert isinstance(program, NativeDecode)
        with torch.inference_mode():
            program.begin(buffers)
            program.decode_next()
        logits.append(program.logits.clone())
    for other in logits[1:]:
        error = (other - logits[0]).square().mean().sqrt() / logits[0].square().mean().sqrt()
        assert 0 < error < 0.2


@pytest.mark.slow
@needs_triton
def test_the_kernels_write_the_same_tokens() -> None:
    found = json.loads(*lines_of("interpret_decode"))
    assert found["triton"] == found["reference"] and found["logits"] < 1e-4


@pytest.mark.slow
@needs_triton
def test_a_token_launches_few_kernels() -> None:
    """At the published size: five a layer, the last norm, the head."""
    assert json.loads(*lines_of("compile_each", "decode", "--count")) == dict.fromkeys(("token", "one row"), 5 * 18 + 2)


@pytest.mark.slow
@needs_triton
def test_every_kernel_compiles_for_hopper_and_fits(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in lines_of("compile_each", "decode", cache=tmp_path)]
    products = {"_skinny_pair", "_skinny_columns", "_row_pair", "_row_columns"}
    assert products | {"_suffix_attention", "_add_norm"} <= {r["kernel"] for r in rows}
    assert [row for row in rows if row["bytes"] <= 1000 or not row["fits"] or row["spilled"] > 128] == []
