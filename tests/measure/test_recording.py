"""CUDA graphs own the workspaces of their products, whatever else in the process clears cuBLAS's."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import vla_accel
from vla_accel.engines.graph import recording


@pytest.mark.parametrize("fails", [False, True])
def test_no_workspace_is_shared_with_a_recording(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    @contextlib.contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        done.append("begin")
        try:
            yield
        finally:
            done.append("end")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("clear"), raising=False)
    nothing: Any = None
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext(), recording(nothing, nothing):
        done.append("work")
        if fails:
            raise RuntimeError
    assert done == ["clear", "begin", "work", "end", "clear"]


def test_graphs_that_are_kept_are_recorded_so() -> None:
    """Only what measures and forgets its graph at once may record without."""
    root = Path(vla_accel.__file__).parent
    text = {str(f.relative_to(root)): f.read_text() for f in root.rglob("*.py")}
    assert {name for name, code in text.items() if "cuda.graph(" in code} == {"kernels/capture.py"}
    callers = {name for name, code in text.items() if "capture import" in code and "recorded(" in code}
    assert callers == {"engines/graph.py", "kernels/autotune.py"}


@pytest.mark.gpu
def test_a_graph_outlives_the_workspaces() -> None:
    # In a process of its own: after an illegal access nothing works on the GPU any more.
    code = """
import torch
from vla_accel.engines.graph import recording

layer = torch.nn.Linear(16384, 64).half().cuda().requires_grad_(False)
x = torch.randn(16, 16384).half().cuda()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    want = layer(x)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with recording(graph, side):
    out = layer(x)
torch._C._cuda_clearCublasWorkspaces()
torch.cuda.empty_cache()
# Takes what was freed: a graph that wrote there would be seen.
taken = [torch.zeros(2**20, dtype=torch.uint8, device="cuda") for _ in range(256)]
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
torch.testing.assert_close(out, want)
assert not any(bool(t.any()) for t in taken)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
