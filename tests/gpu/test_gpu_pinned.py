"""Trained real-time chunking in the native engine: pinned actions are exact, the others are eager's."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from tests.support.gpu_policies import BF16_COSINE, EAGER, NATIVE, cosines, demo_observation, noise_for
from vla_accel import OptimizedPolicy
from vla_accel.config import Kernels, NativeOptions, RtcConfig

pytestmark = pytest.mark.gpu
TRAINED = RtcConfig(trained=True, max_delay=4)


@pytest.mark.parametrize("kernels", get_args(Kernels))
def test_pinned_actions_are_exact_and_the_others_are_eagers(kernels: Kernels) -> None:
    native = OptimizedPolicy.from_pretrained(
        "demo", replace(NATIVE, rtc=TRAINED, strict=True, native=NativeOptions(kernels=kernels))
    )
    eager = OptimizedPolicy.from_pretrained("demo", replace(EAGER, rtc=TRAINED))
    detail = native.ledger.entries["denoise"].detail
    assert "no streamed kernels: they have one flow time" in detail
    assert ("no persistent kernel: Triton's kernels only" in detail) == (kernels == "triton")
    observations = [demo_observation(native, seed) for seed in range(3)]
    noise = noise_for(native, 3)
    chunks = [None, *np.random.default_rng(1).uniform(-0.5, 0.5, (2, 6, 7))]
    delays = [None, 2, 4]
    got, want = (
        np.stack([
            answer["actions"]
            for answer in policy.infer_batch(observations, noise=noise, prev_chunks=chunks, inference_delays=delays)
        ])
        for policy in (native, eager)
    )  # fmt: skip
    assert (cosines(got, want) > BF16_COSINE).all()
    for row, (chunk, delay) in enumerate(zip(chunks, delays, strict=True)):
        if chunk is not None:
            np.testing.assert_allclose(got[row][:delay], chunk[:delay], rtol=0, atol=1e-5)
