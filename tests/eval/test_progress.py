"""What a watcher sees of a run on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from eval.harness.progress import EpisodeProgress, stderr_console
from eval.harness.protocol import EpisodeKey
from eval.harness.rollout import EpisodeResult


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_count_keeps_its_place_whatever_the_message_next_to_it(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width)
    one = EpisodeResult(EpisodeKey(3, 0, 0), True, 63, None, 34.6, 13)
    with EpisodeProgress(console, "libero_spatial", plan=9, done=0) as progress:
        progress.show(one, [one], {})
    said = screen.getvalue()
    assert "1/9" in said and "0:00:0" in said and "success" in said and "1/1" in said


def test_an_error_in_brackets_ends_no_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words in brackets were read as colours, and `[/]` as the end of one that never began."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    failed = EpisodeResult(EpisodeKey(3, 0, 0), False, 0, "KeyError: 'images[/wrist]'", 0.1, 13)
    with EpisodeProgress(stderr_console(), "suite[/a]", plan=9, done=0) as progress:
        progress.show(failed, [failed], {"node[/b]": (2, 1)})
    said = capsys.readouterr().err
    assert all(words in said for words in ("images[/wrist]", "suite[/a]", "node[/b]"))
