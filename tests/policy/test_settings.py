"""Every setting of a policy's configuration: it changes something, or it is refused by its name. A field of
`PolicyConfig`, `CheckpointSpec` or `RtcConfig` without an entry here fails; tests/core/test_engine_options.py has those
of `EngineSpec`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import fastwam_folders, groot_folders, tiny_pi0_fast, tiny_smolvla, xvla_folders
from tests.support.published_folders import write_lerobot, write_openpi
from tests.support.tiny import WORDS, tiny_observation, write_robot, write_tiny_checkpoint
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.config import CheckpointSpec, EngineSpec, NativeOptions, RtcConfig, load_config
from vla_accel.errors import ConfigError, EngineError, VlaAccelError
from vla_accel.families.loading import load
from vla_accel.transforms.tokenizer import SmallTokenizer

EAGER = {"device": "cpu", "num_steps": 3, "vision": "eager", "kv_cache": "eager", "denoise": "eager"}
PROMPT = "pick up the bowl"


@dataclass(frozen=True)
class Case:
    """A setting's `value` in a configuration that has `beside`, for the checkpoint of a name. `refused`: the error's
    words, where the value cannot be had here; `prev_chunk`: with real-time chunking; `prompt`: None leaves it out."""

    value: Any
    beside: dict[str, Any] = field(default_factory=dict)
    checkpoint: str = "pi05"
    refused: str = ""
    prev_chunk: int = 0
    prompt: str | None = PROMPT


TRAINED = {"rtc": {"trained": True}}
CASES: dict[str, Case] = {
    "num_steps": Case(2),
    "schedule": Case("cubic"),
    "warm_start": Case(0.5, prev_chunk=4),
    "precision": Case("bf16"),
    "device": Case("cuda:63", refused="cuda:63"),
    "strict": Case(True, {"kv_cache": {"engine": "tensorrt", "fallback": ["eager"]}}, refused="strict mode: kv_cache"),
    "seed": Case(7),
    "deterministic": Case(True, {"vision": "native"}),
    "default_prompt": Case(PROMPT, prompt=None),
    "pipeline_memory_gib": Case(1.0),
    "preset": Case("ROBOT", refused="missing front, wrist"),
    "warm_up": Case(["bowl " * 3]),
    "vision": Case("native"),
    "kv_cache": Case("native"),
    "denoise": Case("native"),
    "engines": Case({"denoise": "native"}, {"denoise": "auto"}),
    "native": Case({"kernels": "portable"}, refused="native: expected a component in engine native"),
    "checkpoint.asset_id": Case("droid", checkpoint="two assets", refused="missing observation/exterior_image"),
    "checkpoint.tokenizer": Case("TOKENIZER"),
    "checkpoint.action_horizon": Case(4),
    "checkpoint.max_token_len": Case(5, refused="prompt: expected at most 5 tokens"),
    "checkpoint.discrete_state_input": Case(False),
    "checkpoint.embodiment": Case("gr1", checkpoint="groot", refused="expected an embodiment of libero_sim; got 'gr1'"),
    "checkpoint.lora": Case("no/such/adapter", refused="lora: "),
    "checkpoint.action_tokenizer": Case("FAST", {"checkpoint": {"relaxed_actions": True}}, "pi0_fast"),
    "checkpoint.relaxed_actions": Case(True, checkpoint="pi0_fast"),
    "checkpoint.wan": Case("no/such/folder", checkpoint="fastwam", refused="checkpoint.wan"),
    "checkpoint.text_encoder": Case(True, checkpoint="fastwam"),
    "checkpoint.domain": Case(1, checkpoint="xvla"),
    "rtc.schedule": Case("exp", prev_chunk=4),
    "rtc.max_guidance_weight": Case(0.25, prev_chunk=4),
    "rtc.execution_horizon": Case(2, prev_chunk=4),
    "rtc.trained": Case(True, prev_chunk=4),
    "rtc.max_delay": Case(1, TRAINED, prev_chunk=4, refused="inference_delay: expected at most 1 action"),
}
ON_A_GPU_ALONE = {"cuda_graph": "tests/gpu/test_gpu_calls.py"}
"""Settings that change nothing on a CPU, and the tests that show what they change on a GPU."""
BLOCKS = {"checkpoint": CheckpointSpec, "rtc": RtcConfig}


@pytest.fixture(scope="module")
def folders(small_images: None, groot_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("settings")
    write_tiny_checkpoint(root / "pi05")
    write_openpi(root / "two assets", "pi05", discrete_state_input=True)
    write_openpi(root / "two assets", "pi05", "droid", discrete_state_input=True)
    write_lerobot(root / "lerobot", "pi05")
    tiny_smolvla.write_lerobot(root / "smolvla")
    fastwam_folders.write(root / "fastwam")
    xvla_folders.write(root / "xvla")
    tiny_pi0_fast.write_lerobot(root / "pi0_fast", change=_unchecked)
    tiny_pi0_fast.write_fast(root / "FAST", scale=3.0)
    write_robot(root / "ROBOT.yaml").rename(root / "ROBOT")
    (root / "ROBOT").rename(root / "robot.yaml")
    SmallTokenizer(tuple(reversed(WORDS)), state_dim=8, fill_to=0).save(root / "TOKENIZER")
    (root / "TOKENIZER").rename(root / "tokenizer.json")
    return {**{path.name: path for path in root.iterdir()}, "groot": groot_folder,
            "ROBOT": root / "robot.yaml", "TOKENIZER": root / "tokenizer.json"}  # fmt: skip


def _unchecked(files: dict[str, Any]) -> None:
    """Tokens of random weights begin with anything."""
    files["config"]["validate_action_token_prefix"] = False


def observation(case: Case) -> dict[str, Any]:
    if case.checkpoint in (folders := {"fastwam": fastwam_folders, "xvla": xvla_folders}):
        return {**folders[case.checkpoint].given()[0], "task": PROMPT}
    make = {"pi0_fast": tiny_pi0_fast.observation, "groot": groot_folders.observation}
    made = make.get(case.checkpoint, tiny_observation)(0, case.prompt or PROMPT)
    return made if case.prompt else {k: v for k, v in made.items() if k != "prompt"}


def seen(folder: Path, content: dict[str, Any], case: Case) -> Any:
    """All that a user can see of a policy: actions, engines, what is kept ready; or its error."""
    try:
        policy = OptimizedPolicy.from_pretrained(folder, {**EAGER, **content})
        chunk = {}
        if case.prev_chunk:
            previous = np.linspace(-1.0, 1.0, 7 * case.prev_chunk).reshape(case.prev_chunk, 7)
            chunk = {"prev_chunk": previous, "inference_delay": 2}
        actions = policy.infer(observation(case), **chunk)["actions"]
    except VlaAccelError as error:
        return str(error)
    told = [{k: v for k, v in row.items() if k != "requested"} for row in policy.metadata["engines"]]
    return actions.tolist(), told, len(policy.pipelines), policy.pipelines.budget, str(policy.device)


def with_value(name: str, value: Any, beside: dict[str, Any]) -> dict[str, Any]:
    block, _, inner = name.rpartition(".")
    return {**beside, block: {**beside.get(block, {}), inner: value}} if block else {**beside, name: value}


def test_every_setting_has_an_entry_here() -> None:
    found = {f.name for f in dataclasses.fields(PolicyConfig)} - {*BLOCKS}
    found |= {f"{block}.{f.name}" for block, kind in BLOCKS.items() for f in dataclasses.fields(kind)}
    assert found == {*CASES, *ON_A_GPU_ALONE}
    assert all((Path(__file__).parents[2] / where).is_file() for where in ON_A_GPU_ALONE.values())


@pytest.mark.parametrize("name", CASES)
def test_a_setting_changes_something_or_is_refused(name: str, folders: dict[str, Path]) -> None:
    case = CASES[name]
    value = str(folders[case.value]) if isinstance(case.value, str) and case.value.isupper() else case.value
    folder = folders[case.checkpoint]
    plain, changed = (seen(folder, content, case) for content in (case.beside, with_value(name, value, case.beside)))
    assert changed != plain
    if case.refused:
        assert isinstance(changed, str) and case.refused in changed
    else:
        assert not isinstance(changed, str), changed


@pytest.mark.parametrize("name", ON_A_GPU_ALONE)
def test_what_is_for_a_gpu_changes_nothing_here(name: str, folders: dict[str, Path]) -> None:
    case = Case(False)
    assert seen(folders["pi05"], {name: False}, case) == seen(folders["pi05"], {}, case)


OTHERS: dict[str, Any] = {
    "asset_id": "droid", "discrete_state_input": False, "embodiment": "gr1",
    "action_tokenizer": "fast", "relaxed_actions": True,
}  # fmt: skip
"""Settings of some checkpoints."""
READ = {
    "pi05": {"discrete_state_input"},
    "lerobot": {"discrete_state_input"},
    "two assets": {"asset_id", "discrete_state_input"},
    "smolvla": set(),
    "pi0_fast": {"action_tokenizer", "relaxed_actions"},
    "groot": {"embodiment"},
}


@pytest.mark.parametrize(
    ("name", "rtc", "takes"),
    [
        *(("pi0_fast", rtc, "no real-time chunking") for rtc in
          ({"trained": True}, {"schedule": "exp"}, {"execution_horizon": 2})),
        *(("groot", rtc, "only execution_horizon") for rtc in
          ({"schedule": "exp"}, {"max_guidance_weight": 5.0}, {"trained": True, "max_delay": 2})),
    ],
)  # fmt: skip
def test_settings_of_other_families_real_time_chunking_are_refused(
    name: str, rtc: dict[str, Any], takes: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=rf"rtc\.{next(iter(rtc))}: expected none for {name}, .*{takes}"):
        OptimizedPolicy.from_pretrained(folders[name], {"device": "cpu", "rtc": rtc})


@pytest.mark.parametrize("name", READ)
def test_a_setting_that_a_checkpoint_does_not_have_is_refused(name: str, folders: dict[str, Path]) -> None:
    for setting, value in OTHERS.items():
        if setting not in READ[name]:
            with pytest.raises(ConfigError, match=rf"checkpoint\.{setting}: "):
                load(folders[name], load_config({"checkpoint": {setting: value}}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"kv_cache": {"engine": "eager", "precision": "fp8"}, "strict": True}, r"kv_cache\.precision: .*fp8"),
        ({"kv_cache": {"engine": "eager", "precision": "fp16"}}, r"kv_cache\.precision: .*fp16"),
        ({"kv_cache": {"engine": "eager", "precision": "bf16"}}, "kv_cache: .*eager: .*fp32, got bf16"),
        ({"denoise": {"engine": "eager", "precision": "bf16"}}, "denoise: .*eager: .*fp32, got bf16"),
        ({"precision": "bf16", "denoise": {"engine": "eager", "precision": "fp32"}}, "denoise: .*bf16, got fp32"),
        ({"kv_cache": {"precision": "int8"}}, "kv_cache: engine auto chooses eager .*there is no GPU: .*int8"),
        ({"kv_cache": {"precision": "bf16"}}, "kv_cache: .*there is no GPU; eager: .*fp32, got bf16"),
        ({"vision": {"attention": "sdpa"}}, r"vision: engine auto chooses eager here.*attention"),
        ({"vision": {"native": {"kernels": "portable"}}}, r"vision\.native: engine auto chooses eager here"),
        ({"native": {"kernels": "portable"}}, r"vision\.native: engine auto chooses eager here"),
        ({"vision": {"engine": "eager", "tensorrt": {"refit": True}}}, r"vision\.tensorrt\.refit: .*got eager"),
        ({"vision": {"engine": "native", "native": {"embeddings": "host"}}}, r"pi05 supports host for kv_cache"),
        ({"native": {"embeddings": "host"}, "kv_cache": "native"}, r"groot supports host for no component"),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_here_is_refused(
    content: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    folder = folders["groot" if "groot" in message else "pi05"]
    with pytest.raises((ConfigError, EngineError), match=message):
        OptimizedPolicy.from_pretrained(folder, content, device="cpu", num_steps=1)


def test_a_precision_that_an_engine_lacks_falls_back_where_that_is_allowed(folders: dict[str, Path]) -> None:
    chain = {"engine": "eager", "precision": "fp16", "fallback": ["native"]}
    policy = OptimizedPolicy.from_pretrained(folders["pi05"], {"vision": chain}, device="cpu", num_steps=1)
    entry = policy.ledger.entries["vision"]
    assert (entry.requested, entry.used, entry.fell_back) == ("eager", "native", True) and "fp16" in entry.reason


def test_options_of_native_engines_count_where_one_component_reads_them(folders: dict[str, Path]) -> None:
    config = {"native": {"kernels": "portable"}, "denoise": "native"}
    policy = OptimizedPolicy.from_pretrained(folders["pi05"], config, device="cpu", num_steps=1)
    assert policy.specs["denoise"].native == NativeOptions(kernels="portable")
    assert policy.specs["vision"] == EngineSpec("eager")


@pytest.mark.parametrize("name", ["pi05", "two assets", "lerobot", "smolvla", "pi0_fast"])
def test_a_size_that_contradicts_the_folder_is_logged(
    name: str, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    def horizon(value: int | None) -> int:
        spec = CheckpointSpec(action_horizon=value, asset_id="droid" if name == "two assets" else None)
        return load(folders[name], PolicyConfig(checkpoint=spec)).model.config.action_horizon

    assert horizon(horizon(None)) == horizon(None) and "instead of" not in caplog.text
    assert horizon(3) == 3
    assert len(re.findall(r"checkpoint\.action_horizon: 3 instead of .*own \d+", caplog.text)) == 1


def test_a_folder_that_does_not_say_its_horizon_is_no_contradiction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_openpi(tmp_path, "pi05", action_horizon=None)
    settings = PolicyConfig(checkpoint=CheckpointSpec(action_horizon=7))
    assert load(tmp_path, settings).model.config.action_horizon == 7 and not caplog.messages


def test_another_number_of_cameras_is_logged_and_another_resize_refused(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    robot = tmp_path / "robot.yaml"
    robot.write_text("base: libero\nimages: [front]\n")
    load(folders["lerobot"], PolicyConfig(preset=str(robot)))
    (told,) = caplog.messages
    assert told.startswith("preset: 1 cameras of") and told.endswith("trained with 2")
    robot.write_text("base: libero\nresize: corner\n")
    with pytest.raises(ConfigError, match=r"preset\.resize: expected bilinear.*got corner"):
        load(folders["lerobot"], PolicyConfig(preset=str(robot)))


def test_a_tilde_is_the_home_folder(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint, a configuration, a robot and a tokenizer."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "folder").symlink_to(folders["pi05"])
    write_robot(tmp_path / "robot.yaml")
    (tmp_path / "tokenizer.json").symlink_to(folders["TOKENIZER"])
    (tmp_path / "mine.yaml").write_text("preset: ~/robot.yaml\ncheckpoint: {tokenizer: ~/tokenizer.json}\n")
    for config in ("~/mine.yaml", Path("~/mine.yaml")):
        checkpoint = load("~/folder", load_config(config))
        assert checkpoint.processor.preset.images == ("front", "wrist") and checkpoint.folder == tmp_path / "folder"
    with pytest.raises(VlaAccelError, match="lora"):
        load("~/folder", PolicyConfig(checkpoint=CheckpointSpec(lora="~/adapter")))


def test_what_a_checkpoint_was_not_loaded_with_is_refused(folders: dict[str, Path]) -> None:
    """A checkpoint that is there already has its robot, its prompt and its sizes."""
    made = load(folders["pi05"], PolicyConfig(default_prompt="pick"))
    assert OptimizedPolicy(made, PolicyConfig(device="cpu", default_prompt="pick")).processor.default_prompt == "pick"
    assert OptimizedPolicy(made, PolicyConfig(device="cpu")).processor.default_prompt == "pick"
    others: dict[str, Any] = {"preset": "droid", "default_prompt": "place", "checkpoint": {"action_horizon": 3}}
    for name, value in others.items():
        with pytest.raises(ConfigError, match=f"{name}: expected what .* was loaded with"):
            OptimizedPolicy(made, load_config({"device": "cpu", name: value}))


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_autocast_does_not_change_the_configured_precision(engine: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    config = {**EAGER, "precision": "fp32", **dict.fromkeys(("vision", "kv_cache", "denoise"), engine)}

    def actions(policy: OptimizedPolicy) -> np.ndarray:
        policy.reset()
        return policy.infer(tiny_observation())["actions"]

    policy = OptimizedPolicy.from_pretrained(tmp_path, config)
    want = actions(policy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert np.array_equal(actions(policy), want)
        assert np.array_equal(actions(OptimizedPolicy.from_pretrained(tmp_path, config)), want)
