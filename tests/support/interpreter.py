"""Triton's interpreter for the scripts that run kernels on a CPU, each in a process of its own, because the interpreter
is chosen when triton is first imported."""

from __future__ import annotations

from types import SimpleNamespace

from triton import language
from triton.runtime import interpreter


def patch_once() -> None:
    """The interpreter patches Triton's language at every call of a function within a kernel, which takes it a third of
    its time and changes nothing after the first: here it is patched for good."""
    patch = interpreter._patch_lang
    patch(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
