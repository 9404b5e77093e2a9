"""A call's inputs on their way to the device: what is recorded once and replayed, with a graph that only counts. On a
GPU see tests/gpu/test_gpu_calls.py."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from vla_accel.pictures import Picture
from vla_accel.policy import sending
from vla_accel.policy.sending import MOST_GRAPHS, Sending
from vla_accel.transforms.images import resize

SIZE = 8


class Graph:
    """What is enqueued while it is recorded runs at once; a replay is counted."""

    made: int = 0
    replays: int = 0

    def __init__(self) -> None:
        Graph.made += 1

    def capture_begin(self, **_: Any) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        Graph.replays += 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    Graph.made = Graph.replays = 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(sending, "side_stream", lambda _: None)
    return Graph


def make(*, recorded: bool) -> tuple[Sending, torch.Tensor, list[torch.Tensor]]:
    """With places for two images at the end of what is given."""
    staged, given = (torch.zeros(16 + 2 * SIZE * SIZE * 3, dtype=torch.uint8) for _ in range(2))
    places = list(given[16:].view(2, SIZE, SIZE, 3))
    return Sending(staged, given, graphs=recorded), staged, places


def images(*sizes: tuple[int, int]) -> list[Picture]:
    rng = np.random.default_rng(sum(map(sum, sizes)))
    return [Picture(rng.integers(0, 256, (*size, 3), np.uint8), SIZE, "antialias") for size in sizes]


@pytest.mark.parametrize("recorded", [False, True])
def test_images_of_several_sizes_share_a_buffer(recorded: bool, graphs: type[Graph]) -> None:
    sender, staged, places = make(recorded=recorded)
    staged[:16] = 7
    for sizes in (((12, 16), (9, 9)), ((20, 30), (24, 13)), ((5, 3), (12, 16))):
        pictures = images(*sizes)
        sender.send(list(zip(places, pictures, strict=True)))
        for place, picture in zip(places, pictures, strict=True):
            np.testing.assert_array_equal(place.numpy(), resize(picture.image, SIZE, "antialias"))
    assert sender._given[:16].tolist() == [7] * 16 and graphs.made == 0, "each came once"


def test_the_second_call_is_recorded_and_later_ones_are_replayed(graphs: type[Graph]) -> None:
    sender, _, places = make(recorded=True)
    pictures = list(zip(places, images((12, 16), (9, 9)), strict=True))
    for call, (made, replays) in enumerate(((0, 0), (1, 1), (1, 2), (1, 3))):
        sender.send(pictures)
        assert (graphs.made, graphs.replays) == (made, replays), call
    swapped = list(zip(reversed(places), (picture for _, picture in pictures), strict=True))
    sender.send(swapped)
    assert graphs.replays == 3, "other places are another graph"
    sender.send()
    assert graphs.replays == 3, "without images there is one copy"


def test_graphs_end_with_the_buffer_that_they_read_and_are_few(graphs: type[Graph]) -> None:
    sender, _, places = make(recorded=True)
    small, large = ([(places[0], images(size)[0])] for size in ((12, 16), (40, 50)))
    for pictures in (small, small, large, small):
        sender.send(pictures)
    assert (graphs.made, graphs.replays) == (1, 1), "the larger image took a larger buffer"
    sender.send(small)
    assert (graphs.made, graphs.replays) == (2, 2)
    for width in range(10, 10 + MOST_GRAPHS):
        sender.send([(places[0], images((9, width))[0])])
    sender.send(small)
    assert (graphs.made, graphs.replays) == (2, 2), "it was dropped for newer ones"
    assert len(sender._recorded) == MOST_GRAPHS


def test_a_sender_without_graphs_records_nothing(graphs: type[Graph]) -> None:
    sender, _, places = make(recorded=False)
    for _ in range(4):
        sender.send([(places[1], images((12, 16))[0])])
    assert graphs.made == 0
