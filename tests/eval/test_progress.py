"""What a watcher sees of a run on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from eval.harness.progress import EpisodeProgress
from eval.harness.protocol import EpisodeKey
from eval.harness.rollout import EpisodeResult


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_count_keeps_its_place_whatever_is_told_beside_it(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width)
    one = EpisodeResult(EpisodeKey(3, 0, 0), True, 63, None, 34.6, 13)
    with EpisodeProgress(console, "libero_spatial", plan=9, done=0) as progress:
        progress.show(one, [one], {})
    said = screen.getvalue()
    assert "1/9" in said and "0:00:0" in said and "success" in said and "1/1" in said
