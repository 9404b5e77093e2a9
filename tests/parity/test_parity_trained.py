"""Folders that lerobot 0.6.1's own trainer saved (`eval.lerobot.train`), against its code in `eval.libero`.

Needs ``--groot-python`` with the packages of training (CONTRIBUTING); without it the tests are skipped with a message.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.conftest import Make
from vla_accel import OptimizedPolicy

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_the_actions_are_those_of_the_code_that_trained_it(kind: str, made: Make) -> None:
    run = made("groot", "make_trained_folders") / kind
    (folder,) = (run / "checkpoints").glob("[0-9]*/pretrained_model")
    seen = dict(np.load(run / "answers.npz"))
    expected, noise = seen.pop("actions"), seen.pop("noise")
    policy = OptimizedPolicy.from_pretrained(folder, "eager_fp32", device="cpu")
    rows = [{name: values[row] for name, values in seen.items()} for row in range(len(expected))]
    found = np.stack([answer["actions"] for answer in policy.infer_batch(rows, noise=noise)])
    assert np.ptp(expected, axis=1).min() > 10 * TOLERANCE, "a chunk that does not move shows nothing"
    np.testing.assert_allclose(found[:, : expected.shape[1]], expected, rtol=0, atol=TOLERANCE)
