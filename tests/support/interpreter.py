"""A script: run `main` of another script of this folder in Triton's interpreter on a CPU.

    python -m tests.support.interpreter interpret_… [WORD …]

In a process of its own, because the interpreter is chosen when triton is first imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton import language
from triton.runtime import interpreter


def patch_once() -> None:
    """Patch Triton's language for good. The interpreter patches it at every call of a function within a kernel, which
    takes a third of its time and changes nothing after the first."""
    patch = interpreter._patch_lang
    patch(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    # A loop's bound is an array of one element, which NumPy 2.4 no longer takes for a number.
    language.tensor.__index__ = lambda self: int(self.handle.data.item())  # type: ignore[attr-defined]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    patch_once()
    with torch.inference_mode():
        importlib.import_module(f"tests.support.{sys.argv[1]}").main(*sys.argv[2:])
