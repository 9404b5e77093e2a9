"""From CUDA C++ to the C++ that the emulator runs: functions that wrap an instruction give way to the emulator's own,
and declarations of shared memory to places in a block's. All else stays as it is, line by line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent

_FUNCTION = re.compile(r"(?:template <[^>]*>\n)?__device__ [^;{}()]*?(\w+)\([^{};]*\) \{")
_MACRO = re.compile(r"#define (\w+)\((?:.*\\\n)*.*")
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_COMMENT = re.compile(r"//.*")
# An empty piece of assembly only tells the compiler what it must not assume.
_INSTRUCTION = re.compile(r'\basm(?: volatile)?\(\s*(?!"")')
_EXTERN = re.compile(r"extern __shared__ [^;]*?(\w+)\[\];")
_SHARED = re.compile(r"__shared__ ([^;]+);")


class Untranslatable(Exception):
    """A source that the emulator does not understand."""


def instructions() -> set[str]:
    """The names of instructions.h."""
    text = _COMMENT.sub("", (HERE / "instructions.h").read_text())
    return set(re.findall(r"^(?:inline )?(?!typedef)\w[\w ]*?\b(\w+)\([^;{}]*\)(?=;| \{)", text, re.M))


def translate(source: str, kernels: Iterable[str]) -> str:
    """C++ with a function `emulated_<kernel>(arguments)` for each of `kernels`. Raises Untranslatable where the source
    uses an instruction that the emulator does not know."""
    known, unknown = instructions(), set[str]()
    words = [r"asm\b", *(rf"{m[1]}\(" for m in _MACRO.finditer(source) if _INSTRUCTION.search(m[0]))]
    wraps = re.compile("|".join(rf"\b{word}" for word in words))
    parts, at = [], 0
    for name, begin, end in _functions(source):
        body = source[begin:end]
        if not wraps.search(body) or (name not in known and not _INSTRUCTION.search(body)):
            continue
        if name not in known:
            unknown.add(name)
        parts += [source[at:begin], "\n" * body.count("\n")]
        at = end
    code = _MACRO.sub(
        lambda m: "\n" * m[0].count("\n") if _INSTRUCTION.search(m[0]) else m[0], "".join(parts) + source[at:]
    )
    bare = _COMMENT.sub("", code)
    for name in sorted(unknown):
        if re.search(rf"\b{name}\b", bare):
            raise Untranslatable(
                f"{name}: it wraps an instruction of PTX that the emulator does not know; add it to instructions.h"
            )
    if (found := _INSTRUCTION.search(bare)) is not None:
        line = bare.count("\n", 0, found.start()) + 1
        raise Untranslatable(f"line {line}: expected assembly in `__device__` functions alone, which have a name")
    code = _EXTERN.sub(r"#define \1 (emulator::dynamic_shared())", code)
    numbers = iter(range(len(code)))
    code = _SHARED.sub(lambda m: _static(m[1], next(numbers)), code)
    calls = "".join(
        f'extern "C" void emulated_{name}(void** arguments) {{ emulator::call({name}, arguments); }}\n'
        for name in kernels
    )
    return f'#include "{HERE / "instructions.h"}"\n#line 1 "kernels.cu"\n{code}\n{calls}'


def _functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, begin and end of each function of a device."""
    hidden = _COMMENT.sub(lambda m: " " * len(m[0]), source)
    hidden = _STRING.sub(lambda m: '"' + " " * (len(m[0]) - 2) + '"', hidden)
    at = 0
    while (found := _FUNCTION.search(hidden, at)) is not None:
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(hidden[end], 0)
            end += 1
        yield found[1], found.start(), end
        at = end


def _static(declaration: str, number: int) -> str:
    """A declaration of shared arrays and numbers: a structure of them, and a reference to each."""
    bare = re.sub(r"\([^()]*\)|\[[^\]]*\]", "", declaration)
    names = [part.split()[-1] for part in bare.split(",")]
    references = " ".join(f"auto& {name} = shared_{number}.{name};" for name in names)
    return (
        f"struct Shared{number} {{ {declaration}; }}; auto& shared_{number} = *(Shared{number}*)"
        f"emulator::static_shared({number}, sizeof(Shared{number}), alignof(Shared{number})); {references}"
    )
