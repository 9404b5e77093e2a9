"""FAST: a language model's tokens to a chunk of actions.

A token of the language model stands for one of FAST's; FAST's tokens are text by byte-pair encoding; every character is
a rounded coefficient of a discrete cosine transform over time (Pertsch et al. 2025, "FAST: Efficient Action
Tokenization"). The format is that of `physical-intelligence/fast` on the hub: `tokenizer.json`, and
`processor_config.json` with what the text means. Decodes as lerobot's `pi0_fast` does (Hugging Face, Apache-2.0), but
refuses, unless it is `relaxed`, chunks that lerobot would fill with zeros.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.errors import ActionError, CheckpointError
from vla_accel.files import user_path
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.tokenizer import Tokenizer, files_from_hub, read_tokenizers

FILES = ("tokenizer.json", "processor_config.json")
_OPENING, _STOP = "Action: ", "|"
_HINT = ", or put its files into the folder fast of the checkpoint, or name a folder as checkpoint.action_tokenizer"
_REMEDY = "; checkpoint.relaxed_actions: true in the configuration makes a chunk of them all the same, as lerobot does"


@dataclass(frozen=True)
class FastTokenizer:
    """What turns FAST's tokens into coefficients.

    `text`: token ids below `vocab_size` to a string, of which a character c is the coefficient (c + `min_token`) /
    `scale`; `time_horizon`, `action_dim`: of the only chunks that it was made for, None for any.
    """

    text: Callable[[Sequence[int]], str]
    vocab_size: int
    scale: float
    min_token: int
    time_horizon: int | None = None
    action_dim: int | None = None

    @classmethod
    def load(cls, folder: Path) -> FastTokenizer:
        """From the hub's files. Raises CheckpointError for what is missing or no such file, DependencyError."""
        absent = [name for name in FILES if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(f"FAST {folder}: expected {' and '.join(FILES)}, found no {' and no '.join(absent)}")
        path = folder / FILES[1]
        try:
            content = json.loads(path.read_text())
            numbers = {name: _number(content, name, least) for name, least in (("scale", 0.0), ("min_token", None))}
            sizes = {name: _size(content, name) for name in ("time_horizon", "action_dim")}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"FAST {path}: expected scale, min_token and sizes, got: {error}") from error
        tokenizer = read_tokenizers(folder / FILES[0])
        decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        return cls(decode, tokenizer.get_vocab_size(), numbers["scale"], int(numbers["min_token"]), **sizes)


def _number(content: dict[str, Any], name: str, least: float | None) -> float:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (least is not None and not value > least):
        raise ValueError(f"{name}: {value!r}")
    return value


def _size(content: dict[str, Any], name: str) -> int | None:
    value = content.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}: {value!r}")
    return value


def load_fast(own: Sequence[Path | None], source: str | None, hub: str) -> FastTokenizer:
    """The FAST of a checkpoint: of `source`, a folder or a hub name, or of the first of its `own` folders that exists,
    or of the hub's `hub`. Raises CheckpointError if there is none."""
    places = own if source is None else [user_path(source)]
    found = next((place for place in places if place is not None and place.is_dir()), None)
    return FastTokenizer.load(found or files_from_hub(source or hub, FILES, _HINT))


@dataclass(frozen=True)
class Detokeniser:
    """Tokens of a language model to chunks of `horizon` actions of `action_dim` numbers.

    `opening`: the tokens before the actions, left out wherever they are; `stop`: the token behind them; `highest`: the
    language model's token for FAST's token 0, the others lie below it. `opened`: tokens that do not begin with
    "Action:" are an error. `relaxed`: as lerobot does, coefficients that are missing are 0, those too many are left
    out, and tokens that are none of FAST's make a chunk of zeros, or, above its vocabulary, nothing; otherwise tokens
    that are not exactly a chunk are an error.
    """

    fast: FastTokenizer
    opening: tuple[int, ...]
    stop: int
    highest: int
    horizon: int
    action_dim: int
    opened: bool = True
    relaxed: bool = False

    @classmethod
    def of(
        cls, fast: FastTokenizer, tokenizer: Tokenizer, skipped: int, horizon: int, action_dim: int, *,
        opened: bool = True, relaxed: bool = False,
    ) -> Detokeniser:  # fmt: skip
        """`tokenizer`: the language model's, whose last `skipped` tokens FAST leaves alone. Raises CheckpointError for
        sizes that do not fit."""
        opening, stop = tokenizer.encode(_OPENING, add_bos=False), tokenizer.encode(_STOP, add_bos=False)
        if len(stop) != 1 or len(opening) < 2:
            raise CheckpointError(
                f"tokenizer: expected one token of {_STOP!r} and two or more of {_OPENING!r}, got {stop} and {opening}"
            )
        for what, needed, made in (
            ("actions a chunk", horizon, fast.time_horizon), ("numbers an action", action_dim, fast.action_dim),
        ):  # fmt: skip
            if made not in (None, needed):
                raise CheckpointError(f"FAST: expected one for {needed} {what}, got one for {made}")
        highest = tokenizer.vocab_size - 1 - skipped
        if fast.vocab_size > highest + 1:
            raise CheckpointError(
                f"FAST: expected at most {highest + 1} tokens with a vocabulary of {tokenizer.vocab_size} whose last "
                f"{skipped} are reserved, got {fast.vocab_size}"
            )
        return cls(fast, tuple(opening), stop[0], highest, horizon, action_dim, opened, relaxed)

    def chunk(self, tokens: np.ndarray) -> np.ndarray:
        """Normalised actions float32 (horizon, action_dim) of the tokens (n,) of one answer. Raises ActionError for
        tokens that are no chunk."""
        ids = tokens.tolist()
        if self.opened and tuple(ids[:2]) != self.opening[:2]:
            raise ActionError(f"actions: expected tokens that begin with 'Action:', {self.opening[:2]}, got {ids[:2]}")
        if self.stop in ids:
            ids = ids[: ids.index(self.stop)]
        found = self._coefficients([self.highest - i for i in self._without_opening(ids)])
        coefficients = found.reshape(self.horizon, self.action_dim) / self.fast.scale
        return (_cosines(self.horizon) @ coefficients).astype(np.float32)

    def _without_opening(self, ids: list[int]) -> list[int]:
        kept, place, count = [], 0, len(self.opening)
        while place < len(ids):
            if tuple(ids[place : place + count]) == self.opening:
                place += count
            else:
                kept.append(ids[place])
                place += 1
        return kept

    def _coefficients(self, ids: list[int]) -> np.ndarray:
        """Of FAST's tokens, float64 (horizon * action_dim,), not scaled."""
        count, size = self.horizon * self.action_dim, self.fast.vocab_size
        wrong = [i for i in ids if not 0 <= i < size]
        if self.relaxed:
            if any(i < 0 for i in wrong):
                return np.zeros(count)
            ids = [i for i in ids if i < size]
        elif wrong:
            raise ActionError(f"actions: expected FAST tokens 0 to {size - 1}, got {wrong[0]}{_REMEDY}")
        text = self.fast.text(ids)
        if "\ufffd" in text and not self.relaxed:
            raise ActionError(
                f"actions: expected FAST tokens that are whole characters together, got parts of some{_REMEDY}"
            )
        found = np.array([ord(c) for c in text], np.float64) + self.fast.min_token
        if len(found) != count and not self.relaxed:
            raise ActionError(
                f"actions: expected {count} coefficients, {self.horizon} actions of {self.action_dim}, got "
                f"{len(found)} of {len(ids)} tokens{_REMEDY}"
            )
        return np.pad(found[:count], (0, max(0, count - len(found))))


@functools.cache
def _cosines(count: int) -> np.ndarray:
    """The orthonormal inverse cosine transform as a matrix (count, count), float64: DCT-III."""
    place, frequency = np.arange(count)[:, None], np.arange(count)
    size = np.where(frequency == 0, 1.0, 2.0) / count
    return np.sqrt(size) * np.cos(np.pi * (2 * place + 1) * frequency / (2 * count))


@dataclass(frozen=True)
class FastProcessor(Processor):
    """One robot's transforms around a model that writes its actions as tokens."""

    detokeniser: Detokeniser = field(kw_only=True)
