"""Policy configurations: files, mappings, and every way to be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_accel.config import EngineSpec, PolicyConfig, load_config, shipped_configs
from vla_accel.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_yaml_json_and_mapping_agree(tmp_path: Path) -> None:
    plain = {"num_steps": 3, "precision": "fp32", "strict": True, "default_prompt": "pick"}
    content = {**plain, "vision": "eager", "denoise": {"engine": "native", "fallback": ["eager"]}}
    expected = PolicyConfig(**plain, vision=EngineSpec("eager"), denoise=EngineSpec("native", ("eager",)))  # type: ignore[arg-type]
    text = (
        "num_steps: 3\nprecision: fp32\nstrict: true\ndefault_prompt: pick\nvision: eager\n"
        "denoise:\n  engine: native\n  fallback: [eager]\n"
    )
    assert load_config(content) == expected
    assert load_config(write(tmp_path, "a.json", json.dumps(content))) == expected
    assert load_config(write(tmp_path, "a.yaml", text)) == expected
    assert load_config(str(write(tmp_path, "a.yml", text))) == expected
    assert load_config(expected) is expected


def test_defaults() -> None:
    config = load_config(None)
    assert config == PolicyConfig() == load_config({}) == load_config("auto")
    assert (config.num_steps, config.precision, config.device, config.seed) == (None, "auto", "auto", 0)
    assert not config.strict and config.default_prompt is None and config.denoise == EngineSpec("auto", ())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_step": 3}, r"unknown key num_step: did you mean num_steps\?"),
        ({"kvcache": "eager"}, r"unknown key kvcache: did you mean kv_cache\?"),
        ({"vision": {"engin": "eager"}}, r"unknown key vision\.engin: did you mean vision\.engine\?"),
        ({3: 4}, "unknown key 3: expected one of num_steps, "),
        ({"num_steps": 0}, "num_steps: expected 1 to 1000, got 0"),
        ({"num_steps": 1001}, "num_steps: expected 1 to 1000, got 1001"),
        ({"num_steps": "3"}, "num_steps: expected int, got '3'"),
        ({"num_steps": 2.5}, r"num_steps: expected int, got 2\.5"),
        ({"strict": 1}, "strict: expected bool, got 1"),
        ({"device": 0}, "device: expected str, got 0"),
        ({"default_prompt": 1}, "default_prompt: expected str, got 1"),
        ({"precision": "fp8"}, "precision: expected one of auto, fp32, bf16, got 'fp8'$"),
        ({"precision": "pf32"}, r"precision: expected one of auto, fp32, bf16, got 'pf32': did you mean fp32\?$"),
        ({"precision": ["fp32"]}, "precision: expected one of"),
        ({"vision": "warp"}, r"vision\.engine: expected one of auto, eager.*, got 'warp'"),
        ({"denoise": {"fallback": ["eager", "warp"]}}, r"denoise\.fallback\[1\]: expected one of .*, got 'warp'"),
        ({"denoise": {"fallback": "eager"}}, r"denoise\.fallback: expected a list, got 'eager'"),
        ({"kv_cache": 3}, "kv_cache: expected an engine's name or a mapping, got 3"),
    ],
)
def test_a_bad_value_is_named(content: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(content)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: [", "readable YAML or JSON"),
        ("a.json", "{", "readable YAML or JSON"),
        ("a.yaml", "- 1", "expected a mapping, got list"),
        ("a.json", "3", "expected a mapping, got int"),
        ("a.yaml", "", "expected a mapping, got nothing in it"),
        ("a.yaml", "vision:\n\tengine: native", "readable YAML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(write(tmp_path, name, text))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    for name in ("none.yaml", "binary.yaml"):
        with pytest.raises(ConfigError, match=name):
            load_config(tmp_path / name)


def test_a_shipped_config_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in CONFIGS:
        assert load_config(path.stem) == load_config(Path(path.stem)) == load_config(path)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "native_fp8", "num_steps: 3")
    assert load_config("native_fp8").num_steps is None, "a file of that name does not hide it"
    assert load_config("./native_fp8").num_steps == 3
    write(tmp_path, "mine", "num_steps: 4")
    assert load_config("mine").num_steps == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("native_fp9", r"expected a file or one of auto, eager, .*, got 'native_fp9': did you mean native_fp8\?"),
        ("tensorrt_rx", r"did you mean tensorrt_rtx\?"),
        ("Q", r"got 'Q'$"),
        ("folder/native", r"got 'folder/native'"),
        ("no.yaml", r"config no\.yaml: expected a readable YAML or JSON file"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(name)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_config_loads(path: Path) -> None:
    assert path.name in {p.name for p in shipped_configs().values()}
    assert load_config(path).num_steps is None, "the model's own"
    assert path.read_text().startswith("#"), "a comment on its purpose"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_steps: 2\nnum_steps: 3", "num_steps: this key appears twice"),
        ("vision: {engine: native, engine: eager}", r"vision\.engine: this key appears twice"),
        ("warm_up: [{a: 1, a: 2}]", r"warm_up\.a: this key appears twice"),
        ("visoin: native", r"unknown key visoin: did you mean vision\?"),
        ("vision: null", "vision: expected an engine's name or a mapping, got None"),
        ("pipeline_memory_gib: .nan", "pipeline_memory_gib: expected at least 0, got nan"),
        ("pipeline_memory_gib: -1", "pipeline_memory_gib: expected at least 0"),
        ("seed: -1", "seed: expected 0 to 9223372036854775807, got -1"),
        (f"seed: {2**63}", "seed: expected 0 to"),
    ],
)
def test_a_file_with_a_bad_value_is_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "a.yaml", text)
    with pytest.raises(ConfigError, match=f"^config {path}: {message}") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_python_values_are_checked_as_those_of_a_file() -> None:
    given: Any = {"vision": "native", "warm_up": ["pick"], "engines": {"expert": "eager"}, "pipeline_memory_gib": 2}
    made = PolicyConfig(**given)
    assert made == load_config(given) and made.vision == EngineSpec("native") and made.warm_up == ("pick",)


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        (PolicyConfig, "num_steps", [0, -1, True, 2.5, "3", np.float32(3)]),
        (PolicyConfig, "precision", ["fp8", np.zeros(2)]),
        (PolicyConfig, "vision", [np.zeros(2)]),
        (PolicyConfig, "seed", ["x", 1.5]),
        (PolicyConfig, "warm_up", ["pick"]),
        (EngineSpec, "precision", ["fp7"]),
        (EngineSpec, "engine", [["eager"], None, 3, {"a": 1}]),
        (EngineSpec, "fallback", ["eager", None, 3, [3]]),
    ],
)
def test_a_bad_python_value_is_named(kind: Any, field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"{field}.*: expected"):
            kind(**{field: value})


@pytest.mark.parametrize("source", [3, [1], b"native", EngineSpec(), ""])
def test_what_is_no_configuration_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config: expected "):
        load_config(source)


def test_numbers_may_be_those_of_numpy() -> None:
    config = PolicyConfig(num_steps=np.int64(3), seed=np.uint8(4), pipeline_memory_gib=np.float32(0.5))  # type: ignore[arg-type]
    assert config == PolicyConfig(num_steps=3, seed=4, pipeline_memory_gib=0.5)
    assert [type(v) for v in (config.num_steps, config.seed, config.pipeline_memory_gib)] == [int, int, float]
