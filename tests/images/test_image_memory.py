"""An autoencoder that does not fit into the GPU's memory is an error before it runs, and tiles fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.support.images import CPU, ENGINES, VAES, accelerated, engine_sizes, make_parts, make_vae
from vla_accel.errors import DeviceMemoryError
from vla_accel.images import AcceleratedVae, memory, plug_in
from vla_accel.images.autoencoder import split_autoencoder
from vla_accel.images.stable import Request
from vla_accel.images.stage import Stage
from vla_accel.images.vae_component import vae_component


def needed(vae: Any, height: int, width: int, batch: int = 1) -> int:
    _, decoder = split_autoencoder(vae)
    return memory.required_bytes(vae_component(decoder, "decoder", (height, width), batch=batch))


@pytest.fixture
def vae() -> Any:
    return make_vae()


@pytest.mark.parametrize("name", VAES)
def test_the_estimate_holds_what_a_decode_has_alive_at_one_time(name: str) -> None:
    _, decoder = split_autoencoder(make_vae(name))
    component = vae_component(decoder, "decoder", (96, 160))
    (source,) = component.inputs
    with torch.inference_mode(), memory._OwnAttention(), memory._Alive() as alive:
        decoder(source.empty(CPU))
    least = alive.peak + source.empty(CPU).nbytes + 4 * 3 * 96 * 160
    estimate = memory.required_bytes(component)
    assert least <= estimate <= (1.1 + memory.MARGIN) * least
    # The widest features at the size of the picture: a block's input, and what its convolutions read and write.
    assert estimate > 3 * 4 * 8 * 96 * 160


def test_the_estimate_grows_with_pixels_images_and_bytes(vae: Any) -> None:
    one = needed(vae, 128, 128)
    assert needed(vae, 256, 128) == pytest.approx(2 * one, rel=0.01)
    assert needed(vae, 128, 128, batch=3) == pytest.approx(3 * one, rel=0.01)
    assert needed(make_vae(dtype=torch.float16), 128, 128) < 0.8 * one
    assert memory.free_bytes(CPU) is None


def fake_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: (free, 2 * free))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_size_that_does_not_fit_is_refused_before_it_runs_and_tiles_fit(
    vae: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    latents = torch.randn(1, 4, 1, 16, 32, generator=torch.Generator().manual_seed(0))
    tiles = (64, 64, 48, 48)
    vae.enable_tiling(*tiles)
    with torch.inference_mode():
        want = vae.decode(latents).sample
    vae.disable_tiling()
    free = needed(vae, 128, 256) - 1
    fake_gpu(monkeypatch, free)
    plug_in(vae, AcceleratedVae(vae, {"vae_type": engine}))
    with monkeypatch.context() as patch:
        patch.setattr(Stage, "__init__", lambda *_, **__: pytest.fail("an engine was made"))
        with pytest.raises(DeviceMemoryError, match=r"vae_decoder: \(1, 4, 1, 16, 32\) needs about .*enable_tiling"):
            vae.decode(latents)
    vae.enable_tiling(*tiles)
    torch.testing.assert_close(vae.decode(latents).sample, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_error_has_both_numbers_and_offers_slices_for_several_images(
    vae: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch, 1_000_000)
    plug_in(vae, AcceleratedVae(vae))
    with pytest.raises(DeviceMemoryError) as caught:
        vae.decode(torch.zeros(5, 4, 1, 16, 16))
    text = str(caught.value)
    assert re.search(rf"about {needed(vae, 128, 128, 5) / 1e9:.2f} GB", text)
    assert "0.00 of 0.00 GB are free" in text and "enable_slicing()" in text
    fake_gpu(monkeypatch, needed(vae, 128, 128))
    vae.enable_slicing()
    assert vae.decode(torch.zeros(5, 4, 1, 16, 16)).sample.shape == (5, 3, 1, 128, 128)


def test_engines_of_other_sizes_are_dropped_first(vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = AcceleratedVae(vae)
    fast.decode(torch.zeros(1, 4, 1, 8, 8))
    fast.encode(torch.zeros(1, 3, 1, 64, 64))
    enough = needed(vae, 64, 128)
    # Each dropped engine frees the memory that the next one needs.
    monkeypatch.setattr(memory, "free_bytes", lambda _: (enough - len(fast.cache.made), 2 * enough))
    fast.decode(torch.zeros(1, 4, 1, 8, 16))
    assert engine_sizes(fast) == ["decoder 128x64"]


def test_our_own_pipeline_checks_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts()
    pipeline = accelerated(parts)
    fake_gpu(monkeypatch, 1_000_000)
    request = Request("a bowl", height=128, width=128, steps=2)
    with pytest.raises(DeviceMemoryError, match="vae_decoder"):
        pipeline.generate(request, on_step=lambda *_: pytest.fail("denoised"))
    parts.vae.enable_tiling()
    parts.vae.tile_sample_min_size, parts.vae.tile_latent_min_size = 64, 8
    monkeypatch.setattr(memory, "free_bytes", lambda _: (needed(parts.vae, 64, 64), 1 << 40))
    assert pipeline.generate(request).pixels.shape == (128, 128, 3)
