"""`TemporalEnsemble` against its definition, alone; `test_realtime.py` tests it in the runner."""

from __future__ import annotations

import numpy as np
import pytest

from vla_accel.remote.ensemble import TemporalEnsemble


def expected(chunks: list[tuple[int, np.ndarray]], tick: int, coefficient: float) -> np.ndarray:
    """The weighted mean of all predictions of a tick, the oldest first."""
    rows = [chunk[tick - first] for first, chunk in chunks if 0 <= tick - first < len(chunk)]
    weights = np.exp(-coefficient * np.arange(len(rows)))
    return (weights[:, None] * rows).sum(0) / weights.sum()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("coefficient", [0.01, 0.0, -0.5])
def test_an_action_is_the_weighted_mean_of_the_predictions_of_its_moment(coefficient: float, every: int) -> None:
    rng, ensemble, chunks = np.random.default_rng(0), TemporalEnsemble(coefficient), []
    for tick in range(0, 20, every):
        chunks.append((tick, rng.normal(size=(7, 2))))
        merged = ensemble.add(*chunks[-1])
        wanted = [expected(chunks, tick + row, coefficient) for row in range(7)]
        np.testing.assert_allclose(merged, wanted, rtol=1e-12)
    ensemble.clear()
    np.testing.assert_array_equal(ensemble.add(0, chunks[0][1]), chunks[0][1])
