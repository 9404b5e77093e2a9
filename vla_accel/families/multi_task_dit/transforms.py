"""Observations to Multi-task DiT's inputs and back: camera frames and states with their history, and an instruction."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vla_accel.errors import ObservationError
from vla_accel.transforms.frames import FrameInputs, FrameProcessor
from vla_accel.transforms.observations import Observed, Reader
from vla_accel.transforms.processing import ORDINARY, PromptTransforms
from vla_accel.transforms.tokenizer import Tokenizer, checked_length, checked_prompt


@dataclass(frozen=True)
class TaskInputs(FrameInputs):
    """`FrameInputs` with the `tokens` of the instruction, int64 (L,)."""

    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of an instruction, with CLIP's first and last one."""
    return tokenizer.finish(tokenizer.encode(text, add_bos=True))


@dataclass(frozen=True, kw_only=True)
class TaskProcessor(PromptTransforms, FrameProcessor):
    """`FrameProcessor` with an instruction, of which lerobot would drop what is too long. `last_token` ends each."""

    last_token: int

    def _make_reader(self) -> Reader:
        return Reader(self.preset, self.default_prompt, history=self.history)

    def encode(self, seen: Observed) -> TaskInputs:
        prompt = checked_prompt(seen.prompt, self.preset.prompt)
        tokens = self._cached(prompt, lambda: self._tokens(prompt))
        return TaskInputs(**vars(super().encode(seen)), tokens=tokens)

    def ordinary_prompt(self) -> str:
        """Return the first of some ever shorter instructions that fits; the shortest if none does."""
        fits = (text for text in ORDINARY if len(prompt_ids(self.tokenizer, text)) <= self.max_token_len)
        return next(fits, ORDINARY[-1])

    def _tokens(self, prompt: str) -> np.ndarray:
        key, ids = self.preset.prompt, prompt_ids(self.tokenizer, prompt)
        if self.last_token in ids[:-1]:
            raise ObservationError(f"{key}: expected no special tokens, got {prompt!r:.60}")
        return checked_length(ids, prompt, self.max_token_len, key)
