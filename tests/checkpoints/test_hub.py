"""Checkpoints on the hub: names with a revision and a folder, and which files are fetched. huggingface_hub's own code
talks to a server on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints.test_lora import factors, write_adapter
from tests.support import groot_folders
from tests.support.local_hub import COMMIT, TAGGED, LocalHub, served
from tests.support.published_folders import same_weights, write_lerobot, write_openpi
from vla_accel.checkpoints.hub import HubName
from vla_accel.errors import CheckpointError, DependencyError
from vla_accel.families.loading import base_and_lora, find, load

MANY, ONE, RLINF = "nvidia/GR00T-N1.7-LIBERO", "lerobot/pi05_libero", "someone/rlinf"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A repository of several checkpoints, one of lerobot's with its training state, and one without assets/."""
    many, one, tagged, rlinf = (tmp_path / name for name in ("many", "one", "tagged", "rlinf"))
    for name in ("libero_10", "libero_goal"):
        groot_folders.write_isaac(many / name)
    (many / "README.md").write_text("")
    write_lerobot(one, "pi05")
    for extra in ("training_state/optimizer_state.safetensors", "checkpoints/100/model.safetensors", "optimizer.pt",
                  "pytorch_model.bin", "checkpoints/100/config.json", "optimizer.safetensors"):  # fmt: skip
        (one / extra).parent.mkdir(parents=True, exist_ok=True)
        (one / extra).write_bytes(b"never fetched")
    write_lerobot(tagged, "pi0")
    write_openpi(rlinf, "pi05")
    (rlinf / "assets" / "physical-intelligence").rename(rlinf / "physical-intelligence")
    monkeypatch.chdir(tmp_path)
    repositories = {(MANY, COMMIT): many, (ONE, COMMIT): one, (ONE, TAGGED): tagged, (RLINF, COMMIT): rlinf}
    with served(LocalHub(repositories), tmp_path / "cache", monkeypatch) as running:
        yield running


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("lerobot/pi05_base", HubName("lerobot/pi05_base")),
        ("lerobot/pi05_base@v1.0", HubName("lerobot/pi05_base", revision="v1.0")),
        ("nvidia/GR00T/libero_10", HubName("nvidia/GR00T", "libero_10")),
        ("a/b@refs/pr/5/c/d", HubName("a/b", "c/d", "refs/pr/5")),
        ("a/b@0123abc/c", HubName("a/b", "c", "0123abc")),
        ("a/b/c@main", None), ("a", None), ("/a/b", None), ("a/b/../c", None), ("a/b//c", None), ("a/b@", None),
    ],
)  # fmt: skip
def test_a_name_is_repository_revision_and_folder(text: str, name: HubName | None) -> None:
    assert HubName.parse(text) == name
    assert name is None or str(name) == text


def test_a_checkpoint_in_a_folder_of_a_repository_is_fetched_alone(hub: LocalHub) -> None:
    found = load(f"{MANY}/libero_10", whole=False)
    assert found.family.name == "groot" and found.folder is not None and found.folder.name == "libero_10"
    assert {name.split("/")[0] for name in hub.fetched} == {"libero_10"}
    assert {Path(name).name for name in hub.fetched} > {"config.json", "statistics.json", "tokenizer.json"}


@pytest.mark.parametrize("asked", [MANY, f"{MANY}/libero_object"])
def test_a_repository_of_folders_lists_them_and_fetches_nothing(asked: str, hub: LocalHub) -> None:
    with pytest.raises(CheckpointError, match=f"one of {MANY}/libero_10, {MANY}/libero_goal, got '{asked}'"):
        find(asked)
    assert not hub.fetched


def test_no_pickle_no_optimizer_and_no_other_checkpoint_is_fetched(hub: LocalHub) -> None:
    found = load(ONE)
    same_weights(found.model, write_lerobot(Path("expected"), "pi05"))
    assert found.folder is not None
    files = {p.name for p in Path("expected").iterdir() if p.is_file()}
    assert {p.name for p in found.folder.iterdir()} == files
    assert set(hub.fetched) <= files


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["v1", TAGGED, "refs/pr/5"])
def test_a_revision_is_another_checkpoint(revision: str, hub: LocalHub) -> None:
    assert load(f"{ONE}@{revision}", whole=False).family.name == "pi0"
    assert load(ONE, whole=False).family.name == "pi05"


def test_statistics_in_deeper_folders_are_fetched(hub: LocalHub) -> None:
    write_openpi(hub.repositories[RLINF, COMMIT] / "openpi", "pi05")
    for name, asset in ((RLINF, "physical-intelligence"), (f"{RLINF}/openpi", "assets/physical-intelligence")):
        folder = load(name, whole=False).folder
        assert folder is not None and (folder / asset / "libero" / "norm_stats.json").is_file()


@pytest.mark.slow
def test_what_was_fetched_before_is_found_without_a_connection(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    before = [find(name) for name in (ONE, f"{ONE}@v1", f"{MANY}/libero_10")]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert [find(name) for name in (ONE, f"{ONE}@v1", f"{MANY}/libero_10")] == before
    with pytest.raises(CheckpointError, match=f"'{MANY}/libero_goal' is not a folder here and could not be fetched"):
        find(f"{MANY}/libero_goal")


@pytest.mark.parametrize("name", ["nobody/nothing", f"{ONE}@v9"])
def test_what_the_hub_lacks_is_one_error(name: str, hub: LocalHub) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}' is not a folder here and could not be fetched from the hub: "):
        find(name)


def test_without_huggingface_hub_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DependencyError, match=r"'lerobot/pi05_base' is not a folder here; .*pip install 'vla_accel\["):
        find("lerobot/pi05_base")


@pytest.mark.slow
def test_an_adapter_and_its_base_may_be_folders_and_revisions(hub: LocalHub, tmp_path: Path) -> None:
    """The base is the revision that the adapter's configuration names."""
    repository = tmp_path / "adapters"
    write_adapter(repository / "run_1", factors(), base_model_name_or_path=ONE, revision="v1")
    hub.repositories["someone/adapters", COMMIT] = repository
    base, adapter = base_and_lora("someone/adapters/run_1")
    assert json.loads((base / "config.json").read_text())["type"] == "pi0"
    assert adapter is not None and adapter.name == "run_1"
    assert base_and_lora(f"{ONE}@v1", "someone/adapters/run_1") == (base, adapter)
    with pytest.raises(CheckpointError, match=f"expected the base {ONE}@v1, .*, got {MANY}/libero_10"):
        base_and_lora(f"{MANY}/libero_10", "someone/adapters/run_1")
