"""LoRA adapters: what is folded acts as what is not, and an adapter of another base is one error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.in_memory import ParameterTree
from tests.support.jax_dialect import jax_tree
from tests.support.openpi_dialect import EXPERT, LANGUAGE, TOWER
from tests.support.published_folders import real_config, write_lerobot, write_openpi
from tests.support.tiny import tiny_config, tiny_observation, write_tiny_checkpoint
from vla_accel.checkpoints.jax_lora import FoldedParameters
from vla_accel.checkpoints.lora import CONFIG, WEIGHTS, read_lora
from vla_accel.cli import main
from vla_accel.config import PolicyConfig, load_config
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.loading import load
from vla_accel.families.pi0.convert import convert
from vla_accel.fp8 import fingerprint
from vla_accel.policy import OptimizedPolicy
from vla_accel.policy import ahead_of_time as building

RANK, ALPHA = 3, 5.0
BOUND = 1e-5

# Stored name, the module that holds it here, its first row there, and its rows and columns in the tiny model.
MODULES: dict[str, tuple[str, int, int, int]] = {
    f"{LANGUAGE}layers.0.self_attn.q_proj": ("prefix.layers.0.qkv_proj", 0, 24, 18),
    f"{LANGUAGE}layers.0.self_attn.v_proj": ("prefix.layers.0.qkv_proj", 36, 12, 18),
    f"{LANGUAGE}layers.1.mlp.up_proj": ("prefix.layers.1.gate_up_proj", 22, 22, 18),
    f"{EXPERT}layers.1.self_attn.k_proj": ("expert.layers.1.qkv_proj", 24, 12, 14),
    f"{EXPERT}layers.2.self_attn.o_proj": ("expert.layers.2.o_proj", 0, 14, 24),
    f"{EXPERT}layers.2.mlp.down_proj": ("expert.layers.2.down_proj", 0, 14, 26),
    f"{TOWER}encoder.layers.1.self_attn.k_proj": ("vision.layers.1.qkv_proj", 12, 12, 12),
    f"{TOWER}encoder.layers.0.mlp.fc2": ("vision.layers.0.fc2", 0, 12, 20),
    "action_in_proj": ("action_in_proj", 0, 14, 8),
}


Pairs = Mapping[str, tuple[Tensor, Tensor]]


def factors(rank: int = RANK) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def draw(rows: int, columns: int) -> Tensor:
        return 0.3 * torch.randn(rows, columns, generator=generator)

    return {name: (draw(rank, columns), draw(rows, rank)) for name, (_, _, rows, columns) in MODULES.items()}


def write_adapter(
    folder: Path, pairs: Pairs, *, wrapped: str = "", more: Mapping[str, Tensor] | None = None, **config: Any
) -> Path:
    """peft's folder; `wrapped`: what stands between peft's prefix and a module's name; `more`: whole weights."""
    folder.mkdir(parents=True, exist_ok=True)
    start = f"base_model.model.{wrapped}"
    tensors = {start + name: value for name, value in (more or {}).items()}
    for name, (a, b) in pairs.items():
        tensors |= {f"{start}{name}.lora_A.weight": a.contiguous(), f"{start}{name}.lora_B.weight": b.contiguous()}
    save_file(tensors, folder / WEIGHTS)
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": None, **config}
    (folder / CONFIG).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "base"
    write_tiny_checkpoint(folder, max_token_len=200)
    return folder


def unfolded(base: Path, pairs: Pairs, scale: float) -> np.ndarray:
    """Actions of the base whose modules add s·B(A x) to what they return, as peft computes it."""
    policy = OptimizedPolicy.from_pretrained(base, {"precision": "fp32"}, device="cpu", num_steps=2)
    policy.model.fetch()

    def hook(a: Tensor, b: Tensor, rows: slice) -> Callable[[Any, Any, Tensor], Tensor]:
        def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[..., rows] += scale * (inputs[0] @ a.T) @ b.T
            return output

        return add

    for name, (a, b) in pairs.items():
        module, start, rows, _ = MODULES[name]
        policy.model.get_submodule(module).register_forward_hook(hook(a, b, slice(start, start + rows)))
    return actions(policy)


def actions(policy: OptimizedPolicy) -> np.ndarray:
    noise = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    return policy.infer(tiny_observation(), noise=noise)["actions"]


def adapted(base: Path, adapter: Path) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(base, {"precision": "fp32"}, device="cpu", num_steps=2, lora=adapter)


@pytest.mark.parametrize("rslora", [False, True])
def test_folded_acts_as_unfolded(base: Path, tmp_path: Path, rslora: bool) -> None:
    pairs = factors()
    # lerobot's policies have their model as `model`.
    adapter = write_adapter(tmp_path / "adapter", pairs, wrapped="model." if rslora else "", use_rslora=rslora)
    want = unfolded(base, pairs, ALPHA / (math.sqrt(RANK) if rslora else RANK))
    plain = actions(OptimizedPolicy.from_pretrained(base, {"precision": "fp32"}, device="cpu", num_steps=2))
    assert np.abs(want - plain).max() > 1e-2, "the adapter must matter"
    assert np.abs(actions(adapted(base, adapter)) - want).max() <= BOUND * np.abs(want).max()


def test_ranks_and_alphas_by_pattern_and_whole_weights(base: Path, tmp_path: Path) -> None:
    special = f"{EXPERT}layers.1.self_attn.k_proj"
    pairs = {**factors(), special: factors(rank=2)[special]}
    bias = torch.arange(14.0)
    adapter = write_adapter(
        tmp_path / "adapter",
        pairs,
        more={"action_in_proj.bias": bias},
        rank_pattern={r"gemma_expert\.model\.layers\.1\.self_attn\.k_proj": 2},
        alpha_pattern={"k_proj": 8.0},
    )
    plain, folded = (load(base, s).model for s in (PolicyConfig(), PolicyConfig().with_lora(str(adapter))))
    a, b = pairs[special]
    for name, start, rows, change in (
        ("expert.layers.1.qkv_proj", 24, 12, 8.0 / 2 * b @ a),
        ("expert.layers.1.qkv_proj", 0, 24, torch.zeros(24, 14)),
    ):
        before, after = (m.get_parameter(f"{name}.weight")[start : start + rows] for m in (plain, folded))
        torch.testing.assert_close(after, before + change)
    torch.testing.assert_close(folded.get_parameter("action_in_proj.bias").detach(), bias)


def test_the_base_may_have_openpis_names(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_openpi(base, "pi05")
    name = f"{EXPERT}layers.0.self_attn.o_proj"
    shape = load(base).model.get_parameter("expert.layers.0.o_proj.weight").shape
    pairs = {name: (torch.randn(RANK, shape[1]), torch.randn(shape[0], RANK))}
    adapter = write_adapter(tmp_path / "adapter", pairs, wrapped="model.")
    before, after = (
        load(base, settings).model.get_parameter("expert.layers.0.o_proj.weight")
        for settings in (PolicyConfig(), PolicyConfig().with_lora(str(adapter)))
    )
    a, b = pairs[name]
    torch.testing.assert_close(after.float(), (before.float() + ALPHA / RANK * b @ a), rtol=1e-5, atol=1e-5)


def test_an_adapter_stands_for_its_base_and_brings_lerobots_statistics(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_lerobot(base, "pi05")
    write_lerobot(adapter, "pi05", lambda files: files["config"].update(use_peft=True, chunk_size=4, n_action_steps=4))
    (adapter / "model.safetensors").unlink()
    shape = load(base).model.get_parameter("expert.layers.0.o_proj.weight").shape
    pairs = {f"{EXPERT}layers.0.self_attn.o_proj": (torch.randn(RANK, shape[1]), torch.randn(shape[0], RANK))}
    write_adapter(adapter, pairs, wrapped="model.", base_model_name_or_path=str(base))
    checkpoint = load(adapter)
    assert (checkpoint.folder, checkpoint.lora, checkpoint.kept) == (base, adapter, adapter)
    assert checkpoint.model.config.action_horizon == 4, "what the adapter was trained with"
    with pytest.raises(ConfigError, match="expected a checkpoint of whole weights"):
        load(adapter, PolicyConfig().with_lora(str(adapter)))


def test_scales_of_the_base_are_not_those_of_the_adapted(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", factors())
    settings = PolicyConfig().with_lora(str(adapter))
    deferred = load(base, settings, whole=False).model
    whole = load(base, settings).model
    assert deferred.origin is not None
    for name in ("prefix.layers.0.qkv_proj.weight", "prefix.layers.0.o_proj.weight"):
        assert torch.equal(deferred.origin.sample(name, 7), whole.get_parameter(name).reshape(-1)[::7])
    assert (
        fingerprint(deferred, ["prefix"]) == fingerprint(whole, ["prefix"]) != fingerprint(load(base).model, ["prefix"])
    )


OTHER = {"paligemma_with_expert.gemma_expert.model.layers.9.self_attn.o_proj": (torch.zeros(3, 24), torch.zeros(14, 3))}
WIDE = {f"{EXPERT}layers.2.self_attn.o_proj": (torch.zeros(3, 25), torch.zeros(14, 3))}


@pytest.mark.parametrize(
    ("pairs", "config", "message"),
    [
        (OTHER, {}, r"it adapts another model: this one lacks .*layers\.9\.self_attn\.o_proj\.weight"),
        (WIDE, {}, r"it adapts another model: .*o_proj\.weight \(expected \(14, 24\), got \(14, 25\)\)"),
        (factors(), {"base_model_name_or_path": "lerobot/pi05_base"}, "expected the base lerobot/pi05_base, which its"),
        (factors(), {"peft_type": "IA3"}, "expected peft_type LORA in adapter_config.json, got 'IA3'"),
        (factors(), {"r": None}, "expected a number as r of .* in adapter_config.json, got None"),
        (factors(), {"alpha_pattern": {".*": "16"}}, "expected a number as lora_alpha of .*, got '16'"),
        (factors(), {"r": 4}, r"expected factors of rank 4, got \(3, 8\) and \(14, 3\)"),
        ({}, {}, "expected at least one adapted weight, found none"),
    ],
)
def test_an_adapter_of_another_base_is_one_error(
    base: Path, tmp_path: Path, pairs: Pairs, config: dict[str, Any], message: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", pairs, **config)
    with pytest.raises(CheckpointError, match=message):
        load(base, PolicyConfig().with_lora(str(adapter)))


def test_halves_and_missing_files_are_named(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {}, more={"action_in_proj.lora_A.weight": torch.zeros(3, 8)})
    with pytest.raises(CheckpointError, match="expected lora_A and lora_B of action_in_proj, got only lora_A"):
        read_lora(adapter)
    (adapter / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"expected adapter_model\.safetensors, found adapter_config.json"):
        load(base, PolicyConfig().with_lora(str(adapter)))


def test_the_option_reaches_the_weights(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "adapter", OTHER)
    assert main(["parity", str(base), "--lora", str(adapter), "--device", "cpu"]) == 1
    assert "it adapts another model" in capsys.readouterr().err


ADAPTED_COMMANDS = [
    ("bench", "--config eager --steps 1 --calls 1", lambda line: line["rows"][0]["steps"] == 1),
    ("tune", "--quick --num-steps 1 --calls 1", lambda line: line["chosen"].startswith("eager")),
    ("build", "--dry-run --targets sm89", lambda line: set(line["states"]) == {"to build"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "words", "right"), ADAPTED_COMMANDS)
def test_commands_take_an_adapter_that_names_its_base(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str, words: str, right: Callable[[Any], bool],
) -> None:  # fmt: skip
    """peft's two files alone, as its own trainers leave them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(building, "check_libraries", lambda *_: None)
    adapter = write_adapter(tmp_path / "adapter", factors(), base_model_name_or_path=str(base))
    there = [] if command == "build" else ["--device", "cpu"]
    assert main([command, str(adapter), *words.split(), *there]) == 0
    assert right(json.loads(capsys.readouterr().out.splitlines()[-1]))


@pytest.mark.parametrize("command", ["bench", "tune --quick", "build --targets sm89", "parity"])
def test_commands_say_what_an_adapter_without_a_base_lacks(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", factors())
    assert main([*command.split(), str(adapter)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"lora {adapter}: expected base_model_name_or_path in {CONFIG}, got none; name the base" in said


@pytest.mark.slow
def test_tune_measures_the_adapted_policy(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --lora, and it is written into what was found; an adapter that changed is another search."""
    adapter, out = write_adapter(tmp_path / "adapter", factors()), tmp_path / "out"
    words = ["tune", str(base), "--lora", str(adapter), "--quick", "--num-steps", "1", "--calls", "1"]
    assert main([*words, "--device", "cpu", "--output", str(out)]) == 0
    assert load_config(str(out / "tuned.yaml")).checkpoint.lora == str(adapter)
    assert list(json.loads((out / "tune.json").read_text())["settings"]["lora"]) == [CONFIG, WEIGHTS]
    write_adapter(adapter, {name: (a, 2 * b) for name, (a, b) in factors().items()})
    capsys.readouterr()
    assert main([*words, "--device", "cpu", "--output", str(out)]) == 1
    assert "--overwrite" in capsys.readouterr().err


# -- openpi's JAX parameters --------------------------------------------------------------------------------------

LAYERS = "PaliGemma/llm/layers/"
# openpi's equation of each product, and those of its two factors (models/lora.py), the layer left out.
EQUATIONS = {
    "attn/q_einsum/w": ("td,ndh->tnh", "td,ndr->tnr", "tnr,nrh->tnh"),
    "attn/kv_einsum_1/w": ("td,ckdh->ctkh", "td,ckdr->ctkr", "ctkr,ckrh->ctkh"),
    "attn/attn_vec_einsum/w": ("tnh,nhd->td", "tnh,nhr->tr", "tr,nrd->td"),
    "mlp_1/linear": ("tm,md->td", "tm,mr->tr", "tr,rd->td"),
    "mlp/gating_einsum": ("td,cdm->ctm", "td,cdr->ctr", "ctr,crm->ctm"),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_openpis_products_are_those_of_the_folded_weights(name: str) -> None:
    tree = jax_tree(tiny_config("pi05"))
    weight, stem = LAYERS + name, LAYERS + (f"{name[:-1]}lora_" if name.endswith("/w") else f"{name}_lora_")
    shape, rng = tree[weight].shape, np.random.default_rng(0)
    tree[stem + "a"] = rng.standard_normal((*shape[:-1], RANK)).astype(np.float32)
    tree[stem + "b"] = rng.standard_normal((*shape[:-2], RANK, shape[-1])).astype(np.float32)
    scale = 2.5 if "attn" in name else 1.0  # openpi does not scale the MLP's
    found = FoldedParameters(ParameterTree(tree), 2.5)
    assert found.adapters == 1 and found.shapes.keys() == jax_tree(tiny_config("pi05")).keys()
    product, first, second = EQUATIONS[name]
    head = "nh" if name.startswith("attn/attn_vec") else "x"
    x = rng.standard_normal((2, *shape[1:3]) if head == "nh" else (2, shape[-2])).astype(np.float32)
    for layer in (0, 2):
        through = np.einsum(first, x, tree[stem + "a"][layer])
        want = np.einsum(product, x, tree[weight][layer]) + scale * np.einsum(second, through, tree[stem + "b"][layer])
        got = np.einsum(product, x, found.read(weight)[layer])
        assert np.abs(got - want).max() <= BOUND * np.abs(want).max()


def test_a_converted_checkpoint_has_its_adapters_folded(tmp_path: Path) -> None:
    tree = jax_tree(real_config("pi05"))
    weight = LAYERS + "mlp_1/linear"
    shape = tree[weight].shape
    tree[weight + "_lora_a"] = np.ones((*shape[:-1], 2), np.float32)
    tree[weight + "_lora_b"] = np.full((shape[0], 2, shape[-1]), 0.5, np.float32)
    report = convert(ParameterTree(tree), tmp_path, action_horizon=5, precision="float32")
    stored = load_file(tmp_path / "model.safetensors")
    assert report["adapters"] == 1 and not [name for name in stored if "lora" in name]
    want = tree[weight][1].T + 1.0
    np.testing.assert_allclose(stored[f"{EXPERT}layers.1.mlp.down_proj.weight"].numpy(), want, rtol=1e-6, atol=1e-6)
