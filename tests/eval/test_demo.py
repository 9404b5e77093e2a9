"""What trained the demo: the loss is the model's own velocity, labels undo themselves, the store rolls over."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.libero.demo import assets, collect, publish, train
from eval.libero.demo.crew import Store
from eval.libero.demo.objective import Trainee, augment, initialise
from vla_accel.checkpoints.pi0 import load_checkpoint
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.models.gemma import GemmaConfig
from vla_accel.models.pi0 import Pi0, Pi0Config, pi05_demo
from vla_accel.models.siglip import SiglipConfig
from vla_accel.policy.optimized import NAMED
from vla_accel.transforms.tokenizer import SmallTokenizer


def tiny() -> Pi0Config:
    return pi05_demo(
        vision=SiglipConfig(width=16, depth=1, mlp_dim=32, heads=2, patch_size=56),
        prefix=GemmaConfig(width=16, depth=2, mlp_dim=32, heads=2, head_dim=8),
        expert=GemmaConfig(width=16, depth=2, mlp_dim=32, heads=2, head_dim=8),
        vocab_size=32,
    )


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2


def test_the_flow_loss_is_the_models_velocity(monkeypatch: pytest.MonkeyPatch) -> None:
    # All draws of an observation run in one pass, behind a mask; each must equal `Pi0.velocity` at its own time.
    monkeypatch.setattr("eval.libero.demo.objective.augment", lambda images: images.float() / 127.5 - 1)
    config, draws = tiny(), 3
    trainee = Trainee(config, draws)
    randomise(trainee)
    images = torch.randint(0, 256, (2, 2, 224, 224, 3), dtype=torch.uint8)
    tokens = torch.randint(0, 32, (2, 5))
    actions, aux = torch.randn(2, 10, 8), torch.randn(2, collect.AUX_DIM)
    noise, times = torch.randn(2, draws, 10, 8), torch.rand(2, draws)
    with torch.no_grad():
        loss = trainee(images, tokens, actions, aux, noise, times)[0]
        policy = trainee.policy
        image_tokens = policy.embed_images((images.float() / 127.5 - 1).permute(0, 1, 4, 2, 3))
        keys, values = policy.prefix_cache(image_tokens, tokens)
        weight = torch.tensor([1.0] * 6 + [0.5] * 4)
        errors = []
        for row in range(2):
            for draw in range(draws):
                t = times[row, draw]
                noisy = t * noise[row, draw] + (1 - t) * actions[row]
                embedding, modulations = policy.conditioning(t[None])
                cache = keys[:, row : row + 1], values[:, row : row + 1]
                velocity = policy.velocity(noisy[None], embedding[0], modulations[0], None, *cache)  # type: ignore[index]
                errors.append((velocity[0] - (noise[row, draw] - actions[row])).square().mean(1) * weight)
        expected = torch.stack(errors).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


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
    store = Store(4, 3, 8, torch.device("cpu"))

    def add(marks: list[int]) -> None:
        looks = [(np.full((2, 224, 224, 3), m, np.uint8), np.full(3, m)) for m in marks]
        labels = [(np.full((10, 7), m, np.float32), np.full(collect.AUX_DIM, m, np.float32)) for m in marks]
        store.add(looks, labels)

    add([1, 2, 3])
    assert store.count == 3
    add([4, 5])
    assert store.tokens[: store.count, 0].tolist() == [4, 5, 3]
    images, tokens, actions, aux = store.draw(50)
    assert set(tokens[:, 0].tolist()) == {3, 4, 5}
    assert (images[:, 0, 0, 0, 0] == tokens[:, 0]).all() and (aux[:, 0] == tokens[:, 0]).all()
    assert (actions[:, :, :7] == tokens[:, None, :1]).all() and (actions[:, :, 7] == 0).all()


def test_the_learning_rate_rises_then_falls() -> None:
    config = train.TrainConfig(states="", out="", warmup=10, lr=1.0, final_lr=0.0)
    assert train.learning_rate(config, 0, 0.0) == pytest.approx(0.1)
    assert train.learning_rate(config, 99, 0.5) == pytest.approx(0.5)
    assert train.learning_rate(config, 99, 1.0) == pytest.approx(0.0)


def test_the_fixed_assets_are_what_is_shipped(tmp_path: Path) -> None:
    assets.main(assets.Arguments(tmp_path))
    for name in ("tokenizer.json", "instructions.json", "norm_stats.json"):
        assert (tmp_path / name).read_text() == (NAMED["demo"] / name).read_text(), name


def test_the_assets_of_two_suites_hold_both(tmp_path: Path) -> None:
    assets.main(assets.Arguments(tmp_path, ("libero_spatial", "libero_object")))
    instructions = json.loads((tmp_path / "instructions.json").read_text())
    assert len(instructions) == 20 and instructions[10] == "pick up the alphabet soup and place it in the basket"
    assert (tmp_path / "tokenizer.json").read_text() == (NAMED["demo"] / "tokenizer.json").read_text()
    # The state of a hand at libero_object's floor lies within the bounds.
    low, high = (np.array(assets.statistics(("libero_object",))["norm_stats"]["state"][q]) for q in ("q01", "q99"))
    hand = np.array([-0.12, -0.24, 0.01, 3.1, 0.0, 0.0, 0.02, -0.02])
    assert (low < hand).all() and (hand < high).all() and (hand < np.array(assets.STATE_LOW)).any()
    config = train.TrainConfig(states="s", out="o", assets=str(tmp_path), suites=("libero_spatial", "libero_object"))
    tokenizer = SmallTokenizer.load(tmp_path / "tokenizer.json")
    encode = train.prompt_encoder(config, tokenizer, 64)
    assert not np.array_equal(encode(10, hand), encode(11, hand))
    with pytest.raises(ConfigError, match=r"instructions\.json: expected the 10 of libero_object, got 20"):
        train.prompt_encoder(replace(config, suites=("libero_object",)), tokenizer, 64)


def test_tasks_are_numbered_through_the_suites() -> None:
    one = collect.CollectConfig("states")
    both = replace(one, suites=("libero_spatial", "libero_object"))
    assert (one.tasks, both.tasks) == (10, 20)
    assert one.start_states(3) == Path("states/task_03.npz")
    assert both.start_states(13) == Path("states/libero_object/task_03.npz")
    assert both.start_states(3) == Path("states/libero_spatial/task_03.npz")


def test_exported_weights_load_back(tmp_path: Path) -> None:
    model = load_checkpoint(NAMED["demo"])
    train.export(model.state_dict(), tmp_path / "run", {"history": []})
    back = train.load_shards(tmp_path / "run")
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[k], v) for k, v in model.state_dict().items())


def test_publishing_refuses_a_run_that_lacks_weights(tmp_path: Path) -> None:
    run, states, output = tmp_path / "run", tmp_path / "states", tmp_path / "out"
    for folder in (run, states, output):
        folder.mkdir()
    (states / "manifest.json").write_text("{}")
    (output / "tokenizer.json").write_text((NAMED["demo"] / "tokenizer.json").read_text())
    state = load_checkpoint(NAMED["demo"]).state_dict()
    del state["projector.bias"]
    train.export(state, run, {"history": []})
    with pytest.raises(CheckpointError, match=r"1 missing: projector\.bias"):
        publish.main(publish.Arguments(run, states, output))
    assert [p.name for p in output.iterdir()] == ["tokenizer.json"], "nothing may be written"


@pytest.mark.slow
def test_a_collector_plays_labels_and_obeys(tmp_path: Path) -> None:
    # The real simulator: one episode under the expert, answered over the pipe as the trainer does.
    from eval.libero.suites import load_suite

    task = load_suite("libero_spatial").tasks[2]
    np.savez(tmp_path / "task_02.npz", states=task.start_states[:1])  # a test trains nothing
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    settings = collect.CollectConfig(str(tmp_path), noise=0.0, max_steps=150)
    process = context.Process(target=collect.collector, args=(theirs, 0, [2], 5, settings), daemon=True)
    process.start()
    theirs.close()
    labels: list[np.ndarray] = []
    while True:
        message = ours.recv()
        if message[0] == "look":
            assert message[1].shape == (2, 224, 224, 3) and message[1].dtype == np.uint8 and message[3] == 2
            assert message[2].shape == (8,)
        elif message[0] == "label":
            assert message[1].shape == (10, 7) and np.isfinite(message[1]).all() and np.abs(message[1]).max() <= 1
            assert message[2].shape == (collect.AUX_DIM,) and np.isfinite(message[2]).all()
            labels.append(message[1])
            ours.send((None, 0.0))
        else:
            break
    ours.close()
    assert message[0] == "end" and message[1:4] == (2, "expert", True), message
    # Without noise the expert does what it said it would: the label's second half is the next label's first.
    np.testing.assert_allclose(labels[0][5:], labels[1][:5], atol=1e-5)
    process.join(timeout=60)
    assert process.exitcode == 0, "a collector must end quietly when its trainer hangs up"


def test_the_record_says_what_was_run() -> None:
    record = json.loads((NAMED["demo"] / "training.json").read_text())
    assert record["complete"] and record["steps"] >= record["history"][-1]["step"] > 1000
    assert [line["s"] for line in record["history"]] == sorted(line["s"] for line in record["history"])
    assert record["start_states"]["tasks"].keys() == {str(i) for i in range(10)}
