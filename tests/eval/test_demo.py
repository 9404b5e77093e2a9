"""What trained the demo: the loss is the model's own velocity, labels undo themselves, the store rolls over."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from eval.demo import assets, collect, observations, publish, states, train
from eval.demo.average import Averaged
from eval.demo.collectors import Collectors, Store, tasks_of
from eval.demo.objective import Trainee, augment, initialise
from eval.demo.settings import TrainConfig
from eval.libero.suites import LiberoTask
from tests.support.full_disk import full_disk
from tests.support.tiny_smolvla import tiny_config, tiny_model
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.whole_calls import smolvla_actions
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.checkpoints.weights import read_json
from vla_accel.errors import CheckpointError, ConfigError, OutputError, VlaAccelError
from vla_accel.families.loading import load
from vla_accel.families.pi0.network import Pi0, Pi0Config, pi05_demo
from vla_accel.measure.recording import load_observations
from vla_accel.nn.flow import FlowNetwork
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.siglip import SiglipConfig
from vla_accel.policy import OptimizedPolicy
from vla_accel.transforms.tokenizer import SmallTokenizer


def tiny() -> Pi0Config:
    return pi05_demo(
        vision=SiglipConfig(width=16, depth=1, mlp_dim=32, heads=2, patch_size=56),
        prefix=GemmaConfig(width=16, depth=2, mlp_dim=32, heads=2, head_dim=8),
        expert=GemmaConfig(width=16, depth=2, mlp_dim=32, heads=2, head_dim=8),
        vocab_size=32,
    )


def tiny_pi05() -> FlowNetwork:
    network = Pi0(tiny())
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return network


@pytest.mark.parametrize("make", [tiny_pi05, lambda: tiny_model(tiny_config())])
def test_the_flow_loss_is_the_models_velocity(make: Callable[[], FlowNetwork], monkeypatch: pytest.MonkeyPatch) -> None:
    # Each draw must see its own observation, at its own time.
    monkeypatch.setattr("eval.demo.objective.augment", lambda images: images.float() / 127.5 - 1)
    policy, draws, rows = make(), 3, 2
    config = policy.config
    size, horizon, dim = config.vision.image_size, config.action_horizon, config.action_dim
    monkeypatch.setattr("eval.demo.objective.HORIZON", horizon)
    trainee = Trainee(policy, draws)
    images = torch.randint(0, 256, (rows, 2, size, size, 3), dtype=torch.uint8)
    tokens = torch.randint(0, 32, (rows, 5))
    state, actions = torch.randn(rows, getattr(config, "state_dim", 0)), torch.randn(rows, horizon, dim)
    aux = torch.randn(rows, collect.AUX_DIM)
    noise, times = torch.randn(rows, draws, horizon, dim), torch.rand(rows, draws)
    with torch.no_grad():
        loss = trainee(images, tokens, state, actions, aux, noise, times)[0]
        image_tokens = policy.embed_images((images.float() / 127.5 - 1).permute(0, 1, 4, 2, 3))
        given = () if isinstance(policy, Pi0) else (state,)
        keys, values = policy.prefix_cache(image_tokens, tokens, *given)  # type: ignore[operator]
        weight = torch.tensor([1.0] * 6 + [0.5] * 4)[:horizon]
        errors = []
        for row in range(rows):
            for draw in range(draws):
                t = times[row, draw]
                noisy = t * noise[row, draw] + (1 - t) * actions[row]
                embedding, modulations = policy.conditioning(t[None])
                cache = keys[:, row : row + 1], values[:, row : row + 1]
                modulation = None if modulations is None else modulations[0]
                velocity = policy.velocity(noisy[None], embedding[0], modulation, None, *cache)
                errors.append((velocity[0] - (noise[row, draw] - actions[row])).square().mean(1) * weight)
        expected = torch.stack(errors).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_the_average_acts_as_the_policy_does() -> None:
    policy = tiny_model(tiny_config())
    average = Averaged(policy, 0.5, rows=3, prompt=6)
    rng = np.random.default_rng(0)
    seen = [
        (rng.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8), rng.integers(0, 30, 6), rng.random(10, np.float32))
        for _ in range(2)
    ]
    chunks = average.act(seen)
    images, tokens, states = (torch.from_numpy(np.stack(rows)) for rows in zip(*seen, strict=True))
    pixels = (images.float() / 127.5 - 1).permute(0, 1, 4, 2, 3)
    whole = torch.ones(2, 6, dtype=torch.bool)
    expected = smolvla_actions(policy, pixels, tokens, whole, states, average.noise[:2], 4).clamp(-1, 1)
    torch.testing.assert_close(torch.from_numpy(chunks), expected, rtol=1e-4, atol=1e-4)
    # After a step it lies between what it was and what the policy is.
    before = average.shadow[0].clone()
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    average.update(policy)
    moved = average.shadow[0] - before
    assert ((moved > 0) & (moved < 1)).all() and torch.equal(average.state()[average.names[0]], average.shadow[0])


def test_augmentation_keeps_geometry_and_range() -> None:
    torch.manual_seed(0)
    images = torch.zeros(4, 2, 224, 224, 3, dtype=torch.uint8)
    images[:, :, 100, 50] = 255
    out = augment(images)
    assert out.shape == images.shape and out.min() >= -1 and out.max() <= 1
    assert (out.sum(-1).flatten(2).argmax(-1) == 100 * 224 + 50).all(), "the bright pixel moved"
    assert not torch.equal(out[0], out[1])


def test_state_tokens_start_as_smooth_functions_of_their_value() -> None:
    tokenizer = SmallTokenizer.load(NAMED["demo"] / "tokenizer.json")
    policy = Pi0(pi05_demo(vocab_size=tokenizer.vocab_size))
    initialise(policy, tokenizer, seed=1)
    table = policy.embed.weight[tokenizer.vocab_size - 256 :]
    near, far = (table[1:] - table[:-1]).norm(dim=1).mean(), (table[128:] - table[:128]).norm(dim=1).mean()
    assert near < 0.6 * far


def test_the_store_keeps_the_newest() -> None:
    store = Store(4, 16, 3, 2, 8, torch.device("cpu"))

    def add(marks: list[int]) -> None:
        store.add(
            [
                (
                    (np.full((2, 16, 16, 3), m, np.uint8), np.full(3, m), np.full(2, m, np.float32)),
                    (np.full((10, 7), m, np.float32), np.full(collect.AUX_DIM, m, np.float32)),
                )
                for m in marks
            ]
        )

    add([1, 2, 3])
    assert store.count == 3
    add([4, 5])
    assert store.tokens[: store.count, 0].tolist() == [4, 5, 3]
    images, tokens, states, actions, aux = store.draw(50)
    assert set(tokens[:, 0].tolist()) == {3, 4, 5}
    assert (images[:, 0, 0, 0, 0] == tokens[:, 0]).all() and (aux[:, 0] == tokens[:, 0]).all()
    assert (actions[:, :, :7] == tokens[:, None, :1]).all() and (actions[:, :, 7] == 0).all()
    assert (states == tokens[:, :2]).all()


@pytest.mark.parametrize(("total", "tasks"), [(56, 20), (28, 10), (14, 20), (2, 20), (60, 10), (15, 10)])
def test_collectors_share_the_tasks(total: int, tasks: int) -> None:
    played = [task for index in range(total) for task in tasks_of(index, total, tasks)]
    counts = [played.count(task) for task in range(tasks)]
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1


class _Pipe:
    """A collector's end, with prepared messages."""

    def __init__(self, *messages: tuple) -> None:
        self.messages, self.sent = list(messages), []
        self.poll = lambda: bool(self.messages)
        self.recv = lambda: self.messages.pop(0)
        self.send = self.sent.append


def test_collectors_answer_before_they_label(capsys: pytest.CaptureFixture[str]) -> None:
    image, state = np.zeros(1), np.zeros(1)
    slow, trial = _Pipe(("look", image, state, 4)), _Pipe(("look", image, state, 5), ("label", None))
    encode: Any = lambda task, images, state: (images, task, state)  # noqa: E731
    collectors = Collectors(TrainConfig("", "states", ""), range(0), 1, encode)
    pipes = [slow, trial, _Pipe(("error", "its simulator died"))]
    collectors.pipes, collectors.count = dict(enumerate(pipes)), 3  # type: ignore[assignment]
    collectors.poll()
    assert "collector 2 ended: its simulator died" in capsys.readouterr().err
    chunks = np.arange(2 * 10 * 8).reshape(2, 10, 8)
    assert [seen[1] for seen in collectors.requests()] == [4, 5]
    collectors.answer(chunks, 0.5)
    assert not collectors.ready and np.array_equal(trial.sent[0][0], chunks[1, :, :7]) and trial.sent[0][1] == 0.5
    assert collectors.take_labelled() == [], "nothing is learnt from a trial, nor from what has no label yet"
    slow.messages.append(("label", ("actions", "aux")))
    collectors.poll()
    [(seen, label)] = collectors.take_labelled()
    assert seen[1] == 4 and label == ("actions", "aux") and collectors.take_labelled() == []
    slow.messages.append(("error", "too"))
    with pytest.raises(RuntimeError, match="expected at least half of 3, 1 are left"):
        collectors.poll()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What both families' training starts from: π0.5 for two suites, and SmolVLA for one, from what the demo knows."""
    folders = {name: tmp_path_factory.mktemp(name) for name in assets.DEMOS}
    suites = {"pi05": ("libero_spatial", "libero_object"), "smolvla": ("libero_spatial",)}
    for name, folder in folders.items():
        assets.main(assets.Arguments(folder, name, suites[name], init="demo"))
    return folders


def test_the_start_of_the_shipped_demo_has_its_files(tmp_path: Path) -> None:
    settings = json.loads((NAMED["demo"] / "training.json").read_text())["settings"]
    assets.main(assets.Arguments(tmp_path, suites=tuple(settings["suites"])))
    for name in ("tokenizer.json", "instructions.json", "norm_stats.json", "config.json"):
        assert (tmp_path / name).read_text() == (NAMED["demo"] / name).read_text(), name


@pytest.mark.parametrize("wrong", [{"suites": ("nothing",)}, {"init": "nowhere"}])
def test_a_start_is_written_whole_or_not_at_all(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(VlaAccelError, match="expected"):
        assets.main(assets.Arguments(tmp_path, **wrong))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_start_for_two_suites_holds_both(started: dict[str, Path]) -> None:
    folder = started["pi05"]
    instructions = json.loads((folder / "instructions.json").read_text())
    assert len(instructions) == 20 and instructions[10] == "pick up the alphabet soup and place it in the basket"
    # The state of a hand at libero_object's floor lies within the bounds.
    low, high = assets.bounds(("libero_object",))
    hand = np.array([-0.12, -0.24, 0.01, 3.1, 0.0, 0.0, 0.02, -0.02])
    assert (low < hand).all() and (hand < high).all() and (hand < np.array(assets.STATE_LOW)).any()
    encode = train.encoder(folder, load(folder).processor, 20)
    views = np.zeros((2, 224, 224, 3), np.uint8)
    assert not np.array_equal(encode(10, views, hand)[1], encode(11, views, hand)[1])
    with pytest.raises(ConfigError, match=r"instructions\.json: expected one for each of 10 tasks, got 20"):
        train.encoder(folder, load(folder).processor, 10)


@pytest.mark.slow
def test_a_start_knows_what_its_source_knew(started: dict[str, Path], tmp_path: Path) -> None:
    assets.main(assets.Arguments(tmp_path / "table", seed=1))
    assets.main(
        assets.Arguments(tmp_path / "both", suites=("libero_spatial", "libero_object"), init=str(tmp_path / "table"))
    )
    demo, new = load(tmp_path / "table"), load(tmp_path / "both")
    assert torch.equal(demo.model.state_dict()["projector.weight"], new.model.state_dict()["projector.weight"])
    # Heights are binned over another range: where both know a height, its row is that of the old bin.
    height, first = 1.2, 2165 - 8 * 256 + 2 * 256
    old, fresh = (
        first + int((c.processor.state.normalise(np.full(8, height))[2] + 1) * 128) for c in (demo, new)
    )  # fmt: skip
    tables = [c.model.state_dict()["embed.weight"] for c in (demo, new)]
    assert old != fresh
    distances = (tables[0][first : first + 256] - tables[1][fresh]).norm(dim=1)
    assert abs(int(distances.argmin()) - (old - first)) <= 2 and float(distances.min()) == 0
    demo, smolvla = load("demo", dtype=torch.float32), load(started["smolvla"])
    assert smolvla.family.name == "smolvla" and not smolvla.processor.discrete_state
    vision = [name for name in smolvla.model.state_dict() if name.startswith("vision.")]
    assert all(torch.equal(smolvla.model.state_dict()[n], demo.model.state_dict()[n]) for n in vision)


def test_tasks_are_numbered_through_the_suites() -> None:
    both = TrainConfig("", "states", "", ("libero_spatial", "libero_object"), held_out="held")
    assert both.tasks == 20 and both.start_states(3) == Path("states/libero_spatial/task_03.npz")
    assert both.start_states(13, held_out=True) == Path("held/libero_object/task_03.npz")


def exported(start: Path, run: Path, steps: int, **more: object) -> FlowNetwork:
    """A run's checkpoint whose weights are those of `start`."""
    model = load(start, dtype=torch.float32).model
    assert isinstance(model, FlowNetwork)
    config = {"suites": ["libero_spatial"], "start": str(start), "batch": 3}
    about = {"done": False, "world": 1, "gpu": "NVIDIA X", "seconds": 2, **more}
    note = {"steps": steps, "config": config, "history": [], **about}
    train.export(model, model.state_dict(), start, run, note)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", list(assets.DEMOS))
def test_a_killed_run_leaves_a_checkpoint_that_is_published(
    family: str, started: dict[str, Path], tmp_path: Path
) -> None:
    run, states, output = tmp_path / "run", tmp_path / "states", tmp_path / "out"
    for steps in (7, 30, 200):
        model = exported(started[family], run, steps)
    assert [p.name for p in sorted(run.iterdir())] == ["000030", "000200"]
    (run / ".000300").mkdir()  # what a run that was killed while it wrote leaves
    (states / "libero_spatial").mkdir(parents=True)
    (states / "libero_spatial" / "manifest.json").write_text('{"seed": 5}')
    output.mkdir()
    (output / "fp8_scales.json").write_text("of former weights")
    publish.main(publish.Arguments(run, states, output))
    back = load(output)
    assert back.family.name == family and not (output / "fp8_scales.json").exists()
    state = back.model.state_dict()
    assert all(torch.equal(state[k], v.half()) for k, v in model.state_dict().items())
    record = read_json(output / "training.json")
    assert (record["steps"], record["complete"], record["settings"]["batch"]) == (200, False, 3)
    assert "start" not in record["settings"] and record["start_states"] == {"libero_spatial": {"seed": 5}}
    # What the first weights knew was trained before; a run that starts from this one counts both.
    demo = assets.earlier_training("demo", family)
    assert all(run.get("tower_of") == (None if family == "pi05" else "pi05") for run in demo)
    assert record["earlier"] == demo and not (output / assets.EARLIER).exists()
    mine = {"suites": ["libero_spatial"], "gpus": 1, "gpu": "NVIDIA X", "steps": 200, "seconds": 2, "batch": 3}
    assert assets.earlier_training(str(output), family) == [*demo, mine]
    assert sum(p.stat().st_size for p in output.iterdir()) <= assets.DEMOS[family][1]
    if family == "smolvla":
        policy = OptimizedPolicy.from_pretrained(output, device="cpu", num_steps=1)
        assert policy.infer(back.processor.example())["actions"].shape == (10, 7)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_does_not_begin_where_another_lies(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first checkpoints would be the oldest, which go, and the other's would be published."""
    monkeypatch.setattr(train, "worker", lambda *_: pytest.fail("begun"))
    (tmp_path / "000200").mkdir()
    config = TrainConfig("start", "states", str(tmp_path), resume=str(tmp_path) if resumed else "")
    with pytest.raises(
        ConfigError, match=r"out: expected a folder without checkpoints, found .*/000200; pass a new folder"
    ):
        train.main(config)
    begun: list[Any] = []
    monkeypatch.setattr(train, "worker", lambda *words: begun.append(words))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    train.main(replace(config, out=str(tmp_path / "another")))
    assert len(begun) == 1


def test_publishing_refuses_a_run_that_lacks_weights(started: dict[str, Path], tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "out"
    exported(started["pi05"], run, 1)
    (run / "000001" / "model-1.safetensors").unlink()
    output.mkdir()
    with pytest.raises(CheckpointError, match=r"81 missing: prefix\.layers\.4"):
        publish.main(publish.Arguments(run, tmp_path, output))
    assert not list(output.iterdir()), "nothing may be written"
    with pytest.raises(CheckpointError, match="expected a checkpoint in it, found none"):
        publish.main(publish.Arguments(tmp_path, tmp_path, output))


@pytest.mark.parametrize("there", [False, True])
def test_publishing_on_a_full_disk_changes_nothing(there: bool, started: dict[str, Path], tmp_path: Path) -> None:
    run, states, output = tmp_path / "run", tmp_path / "states", tmp_path / "out"
    exported(started["smolvla"], run, 1)
    (states / "libero_spatial").mkdir(parents=True)
    (states / "libero_spatial" / "manifest.json").write_text("{}")
    former = ("model.safetensors", "fp8_scales.json", "config.json") if there else ()
    for name in former:
        output.mkdir(exist_ok=True)
        (output / name).write_text("old")
    with full_disk(room=1_000_000), pytest.raises(OutputError, match=r"model\.safetensors: cannot be written"):
        publish.main(publish.Arguments(run, states, output))
    assert output.exists() == there
    assert not there or {p.name: p.read_text() for p in output.iterdir()} == dict.fromkeys(former, "old")


class CountingEnv:
    """A toy whose state counts its steps; an episode is won three steps after a multiple of 100."""

    begun: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, task: Any, render: bool) -> None:
        self.task, self.steps, self.success = task, 0, False

    def reset_to(self, state: np.ndarray) -> None:
        self.steps, self.success = int(state[0]), False
        self.begun.append((self.task.instruction, self.steps))

    def step(self, action: np.ndarray, look: bool) -> None:
        self.steps += 1
        self.success = self.steps % 100 == 3

    def observation(self) -> dict[str, Any]:
        return {"observation/state": np.full(8, self.steps), "observation/image": np.zeros((2, 2, 3), np.uint8)}

    def close(self) -> None: ...


def test_observations_are_recorded_suite_by_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
        for i in range(2):
            np.savez(tmp_path / name / f"task_{i:02d}.npz", states=np.array([[100.0], [200.0]]))
    suite: Any = lambda n: SimpleNamespace(tasks=[SimpleNamespace(id=i, instruction=f"{n} {i}") for i in (0, 1)])  # noqa: E731
    monkeypatch.setattr("eval.libero.simulator.LiberoEnv", CountingEnv)
    monkeypatch.setattr("eval.libero.expert.Expert", lambda: SimpleNamespace(act=lambda env: [2.0] * 7))
    monkeypatch.setattr("eval.libero.suites.load_suite", suite)
    monkeypatch.setattr(CountingEnv, "begun", begun := [])
    output = tmp_path / "observations.npz"
    observations.run(observations.Arguments(tmp_path, output, ("near", "far"), per_task=3, every=2, first=1))
    # An episode has two observations before it is won: the third is another one's first.
    assert begun == [(f"{name} {i}", n) for name in ("near", "far") for i in range(2) for n in (200, 100)]
    found = load_observations(output)
    assert [o["prompt"] for o in found] == [f"{name} {i}" for name in ("near", "far") for i in range(2) for _ in "abc"]
    assert [o["observation/state"][0] for o in found[:3]] == [200, 202, 100]
    # A task without start states is an error before the first is played.
    begun.clear()
    (tmp_path / "far" / "task_01.npz").unlink()
    with pytest.raises(ConfigError, match=r"found no .*task_01\.npz; make them: python -m eval\.demo\.states "):
        observations.run(observations.Arguments(tmp_path, output, ("far",)))
    assert not begun


def test_states_near_shipped_ones_are_refused_and_replaced(tmp_path: Path) -> None:
    task, path = LiberoTask(2, "bowl", "pick up the bowl", np.zeros((50, 3)), Path("bowl.bddl")), tmp_path / "x.npz"
    stored: list[list[int]] = []

    def blocks() -> Iterator[tuple[list[str], list[states.Sampled]]]:
        for first in (500, 504):
            yield (
                ["bowl"],
                [(s, np.full(3, float(s)), 0.0 if s in (501, 502) else s / 1e4) for s in range(first, first + 4)],
            )
            stored.append(np.load(path)["seeds"].tolist())

    entry = states.keep(task, 4, path, blocks())
    assert stored == [[500, 503]], "the file can be used before it is complete"
    assert np.load(path)["states"][:, 0].tolist() == [500, 503, 504, 505]
    assert (entry["first_seed"], entry["last_seed"], entry["refused_seeds"]) == (500, 505, [501, 502])
    assert entry["min_distance_m"] == 0.05 and entry["objects"] == ["bowl"]


def test_processes_that_sample_end_with_an_interruption() -> None:
    asked: list[Future[None]] = []
    with pytest.raises(KeyboardInterrupt), states._processes(1) as pool:
        asked += [pool.submit(time.sleep, 5) for _ in range(3)]
        eventually(asked[0].running)
        raise KeyboardInterrupt
    assert all(isinstance(one.exception(), BrokenProcessPool) for one in asked), "none came to its end"


def test_progress_of_sampling_is_reported_and_a_finished_task_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sample(suite: str, task: int, seeds: range) -> tuple[list[str], list[states.Sampled]]:
        return [], [(seed, np.zeros(1), 0.0 if seed % 1000 == 1 else 1.0) for seed in seeds]

    tasks = [SimpleNamespace(id=i, name=f"task {i}", start_states=[]) for i in range(2)]
    monkeypatch.setattr(states, "load_suite", lambda name: SimpleNamespace(tasks=tasks))
    monkeypatch.setattr(states, "_processes", lambda count: ThreadPoolExecutor(1))
    monkeypatch.setattr(states, "BLOCK", 2)
    monkeypatch.setattr(states, "sample_block", sample)
    states.main(states.Arguments(tmp_path, per_task=4, tasks=(1,)))
    expected = ["task 1: 1 of 4 states", "task 1: 3 of 4 states", "task 1: 4 states, nearest shipped state 1000.0 mm"]
    assert capsys.readouterr().err.splitlines() == expected
    states.main(states.Arguments(tmp_path, per_task=4))
    assert all(line.startswith("task 0:") for line in capsys.readouterr().err.splitlines())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["tasks"]["1"]["refused_seeds"] == [1_100_001] and set(manifest["tasks"]) == {"0", "1"}


@pytest.mark.slow
def test_states_do_not_depend_on_how_many_processes_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "BLOCK", 1)
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        states.main(states.Arguments(folder, per_task=3, seed=700_000, tasks=(2,), workers=workers))
    one, two = (np.load(tmp_path / name / "task_02.npz") for name in ("1", "2"))
    assert one["seeds"].tolist() == two["seeds"].tolist() == [2_700_000, 2_700_001, 2_700_002]
    np.testing.assert_array_equal(one["states"], two["states"])
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("1", "2")]
    assert manifests[0] == manifests[1] and manifests[0]["tasks"]["2"]["min_distance_m"] > states.TOLERANCE


@pytest.mark.slow
def test_a_collector_plays_labels_and_obeys(tmp_path: Path) -> None:
    # The real simulator: one episode under the expert, answered over the pipe as the trainer does.
    from eval.libero.suites import load_suite

    task = load_suite("libero_spatial").tasks[2]
    (tmp_path / "libero_spatial").mkdir()
    np.savez(tmp_path / "libero_spatial" / "task_02.npz", states=task.start_states[:1])  # a test trains nothing
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # Nor does it play by itself: once a share of episodes is the policy's, all of them are trials here.
    config = TrainConfig("", str(tmp_path), "", held_out=str(tmp_path), trial_share=1.0, noise=0.0, seed=5)
    process = context.Process(target=collect.collector, args=(theirs, 0, [2], config, -1), daemon=True)
    process.start()
    theirs.close()
    labels: list[np.ndarray] = []
    while True:
        message = ours.recv()
        if message[0] == "look":
            assert message[1].shape == (2, 224, 224, 3) and message[1].dtype == np.uint8 and message[3] == 2
            assert message[2].shape == (8,)
        elif message[0] == "label":
            actions, aux = message[1]
            assert actions.shape == (10, 7) and np.isfinite(actions).all() and np.abs(actions).max() <= 1
            assert aux.shape == (collect.AUX_DIM,) and np.isfinite(aux).all()
            labels.append(actions)
            ours.send((None, 1.0))
        else:
            break
    assert ours.recv()[0] == "look" and ours.recv() == ("label", None), "of a trial nothing is learnt"
    ours.close()
    assert message[0] == "end" and message[1:4] == (2, "expert", True), message
    # Without noise the expert does what it said it would: the label's second half is the next label's first.
    np.testing.assert_allclose(labels[0][5:], labels[1][:5], atol=1e-5)
    process.join(PATIENCE_S)
    assert process.exitcode == 0, "a collector must end quietly when its trainer hangs up"
