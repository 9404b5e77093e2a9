"""JAX parameters to PyTorch tensors: each layout by the product it stands for, and every parameter accounted for."""

from __future__ import annotations

import errno
import json
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.in_memory import ParameterTree, load_file_or_folder
from tests.support.jax_dialect import jax_shapes, jax_tree
from tests.support.openpi_dialect import EMBED_TOKENS, LM_HEAD, ROOT, TOWER, to_openpi
from tests.support.tiny import random_state, tiny_config
from vla_accel.checkpoints.jax_layout import targets
from vla_accel.checkpoints.orbax import OrbaxParameters, _import
from vla_accel.checkpoints.writer import SafetensorsWriter
from vla_accel.cli import main
from vla_accel.errors import CheckpointError, ConfigError, DependencyError, OutputError
from vla_accel.families.pi0.checkpoint import Stated, infer_config
from vla_accel.families.pi0.convert import convert
from vla_accel.families.pi0.network import SIZES, Kind, Pi0Config
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.siglip import SiglipConfig

KINDS: tuple[Kind, ...] = ("pi0", "pi05")


def small(kind: Kind) -> Pi0Config:
    """As the tiny model, with one key/value head and a tower whose heads can be told, as in every real checkpoint."""
    return tiny_config(
        kind,
        vision=SiglipConfig(width=144, depth=2, mlp_dim=20, heads=2, image_size=28, patch_size=14),
        prefix=GemmaConfig(width=18, depth=3, mlp_dim=22, heads=4, head_dim=6),
        expert=GemmaConfig(width=14, depth=3, mlp_dim=26, heads=4, head_dim=6),
    )


@pytest.fixture(scope="module", params=KINDS)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Config, JAX arrays, PyTorch tensors, folder."""
    config = small(request.param)
    tree, folder = jax_tree(config), tmp_path_factory.mktemp(request.param)
    convert(ParameterTree(tree), folder, action_horizon=5, precision="float32")
    return config, tree, load_file(folder / "model.safetensors"), folder


def close(ours: torch.Tensor, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-4)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


IMG, LLM = "PaliGemma/img/", "PaliGemma/llm/"
BLOCK, HEADS = IMG + "Transformer/encoderblock/", IMG + "Transformer/encoderblock/MultiHeadDotProductAttention_0/"
SIGLIP = TOWER + "encoder.layers.{layer}."
PROJECTOR = ROOT + "paligemma.model.multi_modal_projector.linear"
STACKS = {"": ROOT + "paligemma.model.language_model.", "_1": ROOT + "gemma_expert.model."}
# JAX kernel, openpi's equation and the PyTorch modules of its products.
PRODUCTS: list[tuple[str, str, list[str]]] = [
    *((f"{HEADS}{name}/kernel", "td,dnh->tnh", [f"{SIGLIP}self_attn.{name[0]}_proj"])
      for name in ("query", "key", "value")),
    (HEADS + "out/kernel", "tnh,nhd->td", [SIGLIP + "self_attn.out_proj"]),
    (BLOCK + "MlpBlock_0/Dense_0/kernel", "td,dm->tm", [SIGLIP + "mlp.fc1"]),
    (BLOCK + "MlpBlock_0/Dense_1/kernel", "tm,md->td", [SIGLIP + "mlp.fc2"]),
    (IMG + "head/kernel", "td,do->to", [PROJECTOR]),
    *((f"{LLM}layers/{source}", equation, [f"{STACKS[suffix]}layers.{{layer}}.{name}" for name in names])
      for suffix in STACKS for source, equation, names in (
        (f"attn/q_einsum{suffix}/w", "td,ndh->tnh", ["self_attn.q_proj"]),
        (f"attn/kv_einsum{suffix}/w", "td,ckdh->ctkh", ["self_attn.k_proj", "self_attn.v_proj"]),
        (f"attn/attn_vec_einsum{suffix}/w", "tnh,nhd->td", ["self_attn.o_proj"]),
        (f"mlp{suffix}/gating_einsum", "td,cdm->ctm", ["mlp.gate_proj", "mlp.up_proj"]),
        (f"mlp{suffix}/linear", "tm,md->td", ["mlp.down_proj"]),
        (f"pre_attention_norm{suffix}/Dense_0/kernel", "td,dm->tm", ["input_layernorm.dense"]),
        (f"pre_ffw_norm{suffix}/Dense_0/kernel", "td,dm->tm", ["post_attention_layernorm.dense"]))),
    (LLM + "final_norm_1/Dense_0/kernel", "td,dm->tm", [STACKS["_1"] + "norm.dense"]),
    *((f"{name}/kernel", "td,dm->tm", [name]) for name in (
        "action_in_proj", "action_out_proj", "state_proj", "action_time_mlp_in", "action_time_mlp_out", "time_mlp_in",
        "time_mlp_out")),
]  # fmt: skip
# JAX arrays that only become flat, and their PyTorch tensors.
VECTORS = [
    *((source.removesuffix("kernel") + "bias", modules[0] + ".bias") for source, _, modules in PRODUCTS),
    *((f"{BLOCK}LayerNorm_{i}/{leaf}", f"{SIGLIP}layer_norm{i + 1}.{name}")
      for i in (0, 1) for leaf, name in (("scale", "weight"), ("bias", "bias"))),
    *((f"{LLM}layers/{source}{suffix}/scale", f"{STACKS[suffix]}layers.{{layer}}.{name}.weight") for suffix in STACKS
      for source, name in (("pre_attention_norm", "input_layernorm"), ("pre_ffw_norm", "post_attention_layernorm"))),
    *((f"{LLM}final_norm{suffix}/scale", f"{STACKS[suffix]}norm.weight") for suffix in STACKS),
    (LLM + "embedder/input_embedding", LM_HEAD),
    (IMG + "embedding/bias", TOWER + "embeddings.patch_embedding.bias"),
    (IMG + "pos_embedding", TOWER + "embeddings.position_embedding.weight"),
    (IMG + "Transformer/encoder_norm/scale", TOWER + "post_layernorm.weight"),
    (IMG + "Transformer/encoder_norm/bias", TOWER + "post_layernorm.bias"),
]  # fmt: skip


def test_products_are_openpis(converted: tuple[Any, ...]) -> None:
    """openpi's einsums on one side, x @ weight.T on the other; every parameter is compared."""
    _, tree, tensors, _ = converted
    seen = {IMG + "embedding/kernel"}
    for source, equation, modules in PRODUCTS:
        for layer in range(len(tree[source]) if "{layer}" in modules[0] else 1) if source in tree else ():
            weight = tree[source][layer] if "{layer}" in modules[0] else tree[source]
            first, second = equation.partition("->")[0].split(",")
            sizes = {"t": 5, **dict(zip(second, weight.shape, strict=True))}
            x = draw(*(sizes[axis] for axis in first))
            product = np.einsum(equation, x, weight)
            for part, module in enumerate(modules):
                found = torch.from_numpy(x.reshape(5, -1)) @ tensors[f"{module.format(layer=layer)}.weight"].T
                close(found, (product[part] if len(modules) > 1 else product).reshape(5, -1))
            seen.add(source)
    for source, name in VECTORS:
        for layer in range(len(tree[source]) if "{layer}" in name else 1) if source in tree else ():
            value = tree[source][layer] if "{layer}" in name else tree[source]
            found = tensors[name.format(layer=layer)]
            close(found, value.reshape(found.shape))
            seen.add(source)
    assert seen == tree.keys()
    pixels = draw(1, 28, 28, 3)
    patches = np.einsum("apbqc,pqcd->abd", pixels[0].reshape(2, 14, 2, 14, 3), tree[IMG + "embedding/kernel"])
    kernel = tensors[TOWER + "embeddings.patch_embedding.weight"]
    conv = torch.nn.functional.conv2d(torch.from_numpy(pixels).permute(0, 3, 1, 2), kernel, stride=14)
    close(conv[0].permute(1, 2, 0), patches)


def test_the_names_are_those_openpi_saves(converted: tuple[Any, ...]) -> None:
    config, _, tensors, _ = converted
    expected = to_openpi(random_state(config), config)
    expected.pop(ROOT + "gemma_expert.lm_head.weight")
    assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in expected.items()}


def test_the_result_loads(converted: tuple[Any, ...]) -> None:
    config, tree, _, folder = converted
    written = json.loads((folder / "config.json").read_text())
    assert written == {
        "action_dim": 8,
        "action_horizon": 5,
        "precision": "float32",
        "pi05": config.kind == "pi05",
        "max_token_len": 200 if config.kind == "pi05" else 48,
    }
    state = load_file_or_folder(folder, config).state_dict()
    close(state["embed.weight"], tree["PaliGemma/llm/embedder/input_embedding"])
    for file in folder.iterdir():
        assert file.stat().st_mode & stat.S_IROTH, f"{file.name} is not readable by all"


def test_a_scale_of_adapters_that_are_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora_scale: expected a checkpoint with LoRA adapters of attention, got 2"):
        convert(ParameterTree(jax_tree(small("pi05"))), tmp_path, action_horizon=5, lora_scale=2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_report(kind: Kind, tmp_path: Path) -> None:
    config = small(kind)
    tree = jax_tree(config)
    seen: list[str] = []
    report = convert(
        ParameterTree(tree), tmp_path, action_horizon=5, source="here", unused_head=True, advance=seen.append
    )
    assert sorted(seen) == sorted(tree) and len(seen) == len(set(seen))
    assert json.loads((tmp_path / "conversion.json").read_text()) == report
    assert {r["source"] for r in report["rows"]} == tree.keys()
    assert report["parameters"] == sum(a.size for a in tree.values()), "every number has one place"
    row = next(r for r in report["rows"] if r["target"].endswith("language_model.layers.1.mlp.up_proj.weight"))
    up = tree["PaliGemma/llm/layers/mlp/gating_einsum"][1, 1]
    assert (row["index"], row["shape"], row["source_dtype"]) == ([1, 1], [22, 18], "float32")
    assert row["rms"] == pytest.approx(float(np.sqrt(np.square(up).mean())), rel=1e-5)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata()[EMBED_TOKENS] == LM_HEAD
        head = file.get_tensor(ROOT + "gemma_expert.lm_head.weight")
    assert head.shape == (40, 14) and not head.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["mixed", "bfloat16", "float32"])
def test_precision(kind: Kind, stored: str, precision: Any, tmp_path: Path) -> None:
    dtype: Any = np.float32
    if stored == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 of its own").bfloat16
    tree = {k: v.astype(dtype) for k, v in jax_tree(small(kind)).items()}
    convert(ParameterTree(tree), tmp_path, action_horizon=5, precision=precision)
    tensors = load_file(tmp_path / "model.safetensors")
    wide, narrow = tensors["action_in_proj.weight"], tensors[LM_HEAD]
    assert wide.dtype == (torch.bfloat16 if precision == "bfloat16" else torch.float32)
    assert narrow.dtype == (torch.float32 if precision == "float32" else torch.bfloat16)
    for found, source in (wide.T, "action_in_proj/kernel"), (narrow, LLM + "embedder/input_embedding"):
        assert torch.equal(found, torch.from_numpy(tree[source].astype(np.float32)).to(found.dtype))


def test_several_key_heads_keep_their_order() -> None:
    """No published model has them; the layout says how they would go."""
    array = draw(3, 2, 2, 5, 4)  # layers, keys and values, heads, width, head
    name = "PaliGemma/llm/layers/attn/kv_einsum/w"
    places = {t.index: t for t in targets({name: array.shape}, "x")}
    assert set(places) == {(layer, part) for layer in range(3) for part in (0, 1)}
    x = draw(6, 5)
    product = np.einsum("td,kdh->tkh", x, array[1, 0]).reshape(6, 8)
    np.testing.assert_allclose(x @ places[1, 0].cut(array).T, product, atol=1e-5)


# -- accounting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_size(kind: Kind) -> None:
    """Real names and shapes: 3.2 billion numbers, none of them made."""
    config = SIZES[kind](action_horizon=10)
    places = targets(jax_shapes(config), "published")
    shapes = {t.name: t.shape for t in places}
    assert infer_config(shapes, "", Stated(action_horizon=10, variants=("gemma_2b", "gemma_300m")), "x") == config
    assert len(shapes) == {"pi0": 776, "pi05": 811}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_needed(kind: Kind, tmp_path: Path) -> None:
    tree = jax_tree(small(kind))
    for name in tree.keys() - {"PaliGemma/llm/final_norm/scale"}:
        with pytest.raises(CheckpointError):
            convert(ParameterTree({k: v for k, v in tree.items() if k != name}), tmp_path / "out", action_horizon=5)
    assert not (tmp_path / "out").exists(), "nothing is written before everything is checked"


ATTENTION = LLM + "layers/attn/"
Q, KV = ATTENTION + "q_einsum/w", ATTENTION + "kv_einsum/w"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": (
        {ATTENTION + "q_norm/scale": np.zeros(3)},
        rf"1 parameters do not belong to π0: {ATTENTION}q_norm/scale",
    ),
    "half an adapter": (
        {ATTENTION + "q_einsum/lora_a": np.zeros((3, 4, 18, 2))},
        rf"expected LoRA factors a and b of a weight, got {ATTENTION}q_einsum/lora_a",
    ),
    "another rank": (
        {ATTENTION + "q_einsum/lora_a": np.zeros((3, 4, 18, 2)), ATTENTION + "q_einsum/lora_b": np.zeros((3, 4, 3, 6))},
        r"expected factors of a weight \(3, 4, 18, 6\), got \(3, 4, 18, 2\) and \(3, 4, 3, 6\)",
    ),
    "axes": ({Q: np.zeros((4, 18, 6))}, rf"{Q}: expected 4 axes \(n d h -> \(n h\) d\), got shape \(4, 18, 6\)"),
    "parts": ({KV: np.zeros((3, 1, 1, 18, 6))}, r"kv_einsum/w: expected 2 parts, got shape"),
    "depth": ({Q: np.zeros((2, 4, 18, 6))}, r"1 missing: .*language_model\.layers\.2\.self_attn\.q_proj\.weight"),
    "both kinds": (
        {k: v for k, v in jax_tree(small("pi0")).items() if k.startswith("state_proj")},
        r"expected weights of π0 .* or of π0\.5",
    ),
    "not finite": ({Q: np.full((3, 4, 18, 6), np.nan, np.float32)}, rf"non-finite values in {Q}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tree_is_named(name: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    with pytest.raises(CheckpointError, match=message):
        convert(ParameterTree({**jax_tree(small("pi05")), **changes}), tmp_path, action_horizon=5)
    assert not (tmp_path / "model.safetensors").exists()


def test_assets_come_along(tmp_path: Path) -> None:
    assets = tmp_path / "assets" / "droid"
    assets.mkdir(parents=True)
    (assets / "norm_stats.json").write_text("{}")
    convert(
        ParameterTree(jax_tree(small("pi05"))),
        tmp_path / "out",
        action_horizon=5,
        assets=tmp_path / "assets",
        preset="droid",
        discrete_state_input=True,
    )
    assert (tmp_path / "out/assets/droid/norm_stats.json").read_text() == "{}"
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["preset"], written["discrete_state_input"]) == ("droid", True)


# -- the command, and reading without jax -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "action-horizon: expected it or --config, because no parameter shows it, got neither"),
        (("--config", "pi05_libero", "--action-horizon", "50"), "--action-horizon 50 and --config pi05_libero (10)"),
        (("--config", "pi06"), "config: expected one of pi0_libero, "),
        (("--config", "pi05_libro"), "got 'pi05_libro': did you mean pi05_libero?"),
        (
            ("--config", "pi05_libero", "--assets", "nowhere"),
            "assets: expected a folder with <asset_id>/norm_stats.json",
        ),
    ],
)
def test_the_command_asks_for_a_horizon(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params").mkdir()
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith("vla-accel convert: ") and message in said


@pytest.mark.parametrize(
    ("entry", "name", "message"),
    [
        ("sd/unet/", "no/such", "expected a folder with params/, got"),
        ("sd/unet/", "sd", "expected a folder with params/, got"),
        ("sd/model_index.json", "sd/model_index.json", "expected a folder with params/, got"),
        ("model.safetensors", "", "expected a folder with params/, found model.safetensors, which needs no"),
        ("model-00001-of-00002.safetensors", "", "params/, found model-00001-of-00002.safetensors, which needs no"),
        ("29999/params/", "", "29999: name one of them\n"),
    ],
)
def test_a_folder_without_jax_parameters_is_refused_without_jax(
    entry: str, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "jax", None)
    path = tmp_path / entry
    (path if entry.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
    if not entry.endswith("/"):
        path.touch()
    for words in (("--config", "pi05_libero"), ()):
        assert main(["convert", str(tmp_path / name), str(tmp_path / "out"), *words]) == 1
        said = capsys.readouterr().err
        assert message in said and len(said.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ParameterTree:
    """A π0.5 as orbax would read it."""
    tree: Any = ParameterTree(jax_tree(small("pi05")))
    tree.folder = tmp_path / "params"
    tree.folder.mkdir()
    monkeypatch.setattr("vla_accel.cli.convert.OrbaxParameters", lambda folder: tree)
    return tree


def test_the_command_says_what_came_of_it_and_what_to_type(
    stored: ParameterTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vla_accel.progress.INTERVAL_S", 0.0)
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--config", "pi05_libero"]) == 0
    printed = capsys.readouterr()
    assert "converting: 100 %\n" in printed.err, "no terminal: lines now and then"
    line = json.loads(printed.out.splitlines()[-1])
    assert (line["kind"], line["tensors"]) == ("pi05", len(targets(stored.shapes, "")))
    assert line["bytes"] == (tmp_path / "out/model.safetensors").stat().st_size
    assert len(printed.out.splitlines()) == 2, "no table to scroll past: conversion.json has it"
    out = str(tmp_path / "out")
    assert printed.out.startswith(f"{out}: pi05, ") and f"vla-accel serve {out}" in printed.out
    assert "no assets/<asset_id>/norm_stats.json" in printed.err
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["action_horizon"], written["discrete_state_input"], written["preset"]) == (10, False, "libero")


@pytest.mark.parametrize(
    ("config", "asset", "numbers", "message"),
    [
        ("pi0_droid", "droid", 32, "expected weights of pi0, found pi05"),
        ("pi05_droid", "physical-intelligence/libero", 32, "expected statistics of droid, found assets/physical-"),
        ("pi05_aloha", "mine", 8, "expected at least 14 numbers of state, found 8 in "),
        ("pi05_droid", "mine", 8, None),
    ],
)
def test_a_config_of_another_robot_is_refused_and_nothing_written(
    config: str, asset: str, numbers: int, message: str | None, stored: ParameterTree, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    place = tmp_path / "assets" / asset
    place.mkdir(parents=True)
    one = dict.fromkeys(("mean", "std", "q01", "q99"), [0.5] * numbers)
    (place / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": one, "actions": one}}))
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--config", config]) == (message is not None)
    said = capsys.readouterr().err
    if message is not None:
        assert f"config: {config} is of another checkpoint than {tmp_path}: {message}" in said
        assert len(said.splitlines()) == 1
    assert (tmp_path / "out").exists() == (message is None)


def test_statistics_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "assets" / "droid").mkdir(parents=True)
    (tmp_path / "assets" / "droid" / "norm_stats.json").write_text("{}")

    def full(source: str, target: Path) -> None:
        Path(target).write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr("shutil.copyfile", full)
    tree = ParameterTree(jax_tree(small("pi05")))
    with pytest.raises(OutputError, match=r"norm_stats\.json: cannot be written: No space left"):
        convert(tree, tmp_path / "out", action_horizon=10, assets=tmp_path / "assets")
    assert not [p for p in (tmp_path / "out" / "assets").rglob("*") if p.is_file()]


def test_without_jax_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    (tmp_path / "params").mkdir()
    with pytest.raises(DependencyError, match=r"pip install 'vla_accel\[jax\]'"):
        OrbaxParameters(tmp_path)


def test_a_folder_without_its_arrays_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)  # before jax is asked for
    (tmp_path / "params" / "d").mkdir(parents=True)
    (tmp_path / "params" / "manifest.ocdbt").touch()
    with pytest.raises(CheckpointError, match="params: expected arrays in d/, found none: copy it whole"):
        OrbaxParameters(tmp_path)


def test_a_folder_without_some_of_its_arrays_is_one_sentence_and_no_traceback_of_orbaxs_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    # What orbax does there: it finds nothing, and threads that outlive its loop speak to it.
    jax, orbax, checkpoint = ModuleType("jax"), ModuleType("orbax"), ModuleType("orbax.checkpoint")
    orbax.checkpoint = checkpoint  # type: ignore[attr-defined]
    checkpoint.PyTreeCheckpointer = lambda: SimpleNamespace(metadata=lambda folder: {})  # type: ignore[attr-defined]
    for name, module in (("jax", jax), ("orbax", orbax), ("orbax.checkpoint", checkpoint)):
        monkeypatch.setitem(sys.modules, name, module)
    _import.cache_clear()
    (tmp_path / "_METADATA").touch()  # the folder may be params/ itself
    with pytest.raises(CheckpointError, match="expected parameters of orbax, found none: copy it whole"):
        OrbaxParameters(tmp_path)
    for text in ("Event loop is closed", "another"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))  # type: ignore[arg-type]
    assert [str(one.exc_value) for one in told] == ["another"]
    _import.cache_clear()


def test_orbax_round_trip(tmp_path: Path) -> None:
    """Saved by orbax with openpi's outer `params` and nnx's inner `value`, in a process that may import jax."""
    pytest.importorskip("orbax.checkpoint", reason="NOT RUN: needs pip install 'vla_accel[jax]'")
    tree: Any = jax_tree(small("pi05"))
    np.savez(tmp_path / "tree.npz", **tree)
    script = f"""
import numpy as np, orbax.checkpoint as ocp
from pathlib import Path
from types import ModuleType, SimpleNamespace
from vla_accel.checkpoints.orbax import OrbaxParameters
tree = {{}}
arrays = dict(np.load({str(tmp_path / "tree.npz")!r}))
for name, value in arrays.items():
    place = tree
    for key in name.split("/"):
        place = place.setdefault(key, {{}})
    place["value"] = value
ocp.PyTreeCheckpointer().save(Path({str(tmp_path / "params")!r}), {{"params": tree}})
read = OrbaxParameters(Path({str(tmp_path)!r}))
assert read.shapes == {{k: v.shape for k, v in arrays.items()}}
assert set(read.dtypes.values()) == {{"float32"}}
assert all(np.array_equal(read.read(k), v) for k, v in arrays.items())
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)


# -- the writer ---------------------------------------------------------------------------------------------------


def test_the_writer_writes_safetensors(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5).bfloat16(),
        "a": torch.randn(7),
        "c": torch.randn(1, 1).double(),
        "d": torch.ones(()),
    }
    with SafetensorsWriter(tmp_path / "x", {k: (v.dtype, tuple(v.shape)) for k, v in tensors.items()}, {"m": "n"}) as w:
        for name in ("c", "a", "d", "b"):
            w.write(name, tensors[name])
    loaded = load_file(tmp_path / "x")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[k], v) for k, v in tensors.items())
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "m": "n"}


def test_the_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    entries = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    for sizes, message in (
        ((2,), r"1 tensors were not written: \['b'\]"),
        ((3,), r"a: expected shape \(2,\), once"),
        ((2, 2), r"a: expected shape \(2,\), once"),
    ):
        with pytest.raises(ValueError, match=message), SafetensorsWriter(tmp_path / "x", entries) as writer:
            for size in sizes:
                writer.write("a", torch.zeros(size))


def test_a_config_that_is_no_pi0_is_refused(tmp_path: Path) -> None:
    config = replace(small("pi05"), vision=SiglipConfig(width=100, depth=1, mlp_dim=8, heads=2, image_size=28))
    with pytest.raises(CheckpointError, match=r"vision\.width: expected a multiple of 72.*, got 100"):
        convert(ParameterTree(jax_tree(config)), tmp_path, action_horizon=5)
