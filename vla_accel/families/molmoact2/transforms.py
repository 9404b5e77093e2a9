"""Observations to MolmoAct2's inputs and its outputs to robot actions.

Source: lerobot 0.6.1's processors of MolmoAct2 (Apache-2.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.transforms.observations import Observed
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.tokenizer import Tokenizer, checked_length, checked_prompt

MOST_VIEWS = 9
"""Views whose numbers, "Image 1" and so on, have one digit."""
_PUNCTUATION, _CLOSERS, _DELIMITERS = ".,!?;:,\u2026", "\"'\u201d\u2019)]}", "\"'`\u201c\u201d\u2018\u2019[](){}"
_OPENINGS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"^(?:task|instruction|language[_ ]instruction|goal)\s*[:\-]\s*",
        r"^(?:the\s+task\s+is\s+to|your\s+task\s+is\s+to)\s+",
    )
)


def cleaned(text: str) -> str:
    """Clean an instruction: one line, in small letters, without quotes around it, without "Task:" before it and without
    punctuation at its end; sentences become clauses."""
    text, before = " ".join(text.split()), None
    while text and text != before:
        before = text
        text = text.strip().strip(_DELIMITERS).strip()
        for opening in _OPENINGS:
            text = opening.sub("", text, count=1).strip()
        for signs in (_PUNCTUATION, _CLOSERS, _PUNCTUATION):
            text = text.rstrip(signs).rstrip()
    parts = [part.strip() for part in re.split(r"[.!?]+", text) if part.strip()]
    return ("; ".join(parts) if len(parts) > 1 else text).lower()


@dataclass(frozen=True)
class MolmoPrompt:
    """The words around an instruction and a state.

    Attributes:
        bos: The token before every prompt.
        view: The text of an image's first and last token, next to each other.
        setup: The robot, in the words of the training.
        control: What its actions are.
        clean: Whether instructions are cleaned (`cleaned`).
        bins: Tokens of a number of the state.
        specials: Texts of special tokens, which an instruction must not contain.
    """

    bos: int
    view: str
    setup: str
    control: str
    clean: bool = True
    bins: int = 256
    specials: tuple[str, ...] = ()

    def text(self, instruction: str, state: np.ndarray, views: int) -> str:
        """Return the prompt for a normalized state (n,) in [-1, 1]."""
        numbers = np.rint((state.astype(np.float32) + np.float32(1)) / np.float32(2) * np.float32(self.bins - 1))
        words = "".join(f"<state_{int(number)}>" for number in numbers)
        images = self.view if views == 1 else "".join(f"Image {view + 1}{self.view}" for view in range(views))
        return (
            f"{images}<|im_start|>user\nThe task is to {instruction}. The setup is {self.setup}. The current state of "
            f"the robot is <state_start>{words}<state_end>. The expected control mode is {self.control}. Given these, "
            "what action should the robot take to complete the task?<|im_end|>\n<|im_start|>assistant\n<action_output>"
        )

    def tokens(self, tokenizer: Tokenizer, text: str, views: int) -> list[int]:
        """Return the tokens of a prompt's text, without those of its images."""
        view = tokenizer.encode(self.view, add_bos=False)
        ids, found, at = [self.bos, *tokenizer.encode(text, add_bos=False)], [], 0
        while at < len(ids):
            is_view = ids[at : at + len(view)] == view
            at += len(view) if is_view else 1
            found += [] if is_view else [ids[at - 1]]
        if len(view) != 2 or len(ids) - len(found) != views * len(view):
            raise CheckpointError(
                f"tokenizer: expected MolmoAct2's, with a token each for {self.view}, got another model's: {view}"
            )
        return found

    def layout(self, tokenizer: Tokenizer) -> tuple[int, int]:
        """Return the text tokens before the first of several images, and between two images."""
        first, other = (len(tokenizer.encode(f"Image {number}", add_bos=False)) for number in (1, 2))
        return 1 + first, other


@dataclass(frozen=True)
class Joints:
    """The first numbers of state and actions, whose sign and zero differ between robot and model:
    model = signs * robot + offsets."""

    signs: np.ndarray
    offsets: np.ndarray

    def to_model(self, x: np.ndarray) -> np.ndarray:
        """Robot numbers (..., n) in the model's frame."""
        return self._changed(x, lambda part: self.signs * part + self.offsets)

    def to_robot(self, x: np.ndarray) -> np.ndarray:
        """The inverse, for signs of 1 and -1."""
        return self._changed(x, lambda part: self.signs * (part - self.offsets))

    def _changed(self, x: np.ndarray, change: Any) -> np.ndarray:
        made, count = x.copy(), len(self.signs)
        made[..., :count] = change(made[..., :count])
        return made


@dataclass(frozen=True, kw_only=True)
class MolmoProcessor(Processor):
    """lerobot's transforms. A missing view is left out.

    Attributes:
        prompt: The words of a prompt.
        plain_state: Numbers of the state that are not scaled, such as grippers; they must lie in [-1, 1].
        still: Numbers of the state that never varied in training, and are 0 for the model.
        joints: What differs between the frames of robot and model, None for nothing.
        by_name: Positions of the views in the order of their names, which the remaining ones have if one is missing.
    """

    prompt: MolmoPrompt
    plain_state: tuple[int, ...] = ()
    still: tuple[int, ...] = ()
    joints: Joints | None = None
    by_name: tuple[int, ...] = ()
    _lengths: dict[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("delta_actions", "flipped", "gripper_dims"):
            if own := getattr(self.preset, name):
                raise ConfigError(f"preset.{name}: expected none for this model, got {[*own]}")
        if len(self.preset.images) > MOST_VIEWS:
            raise ConfigError(f"preset.images: expected at most {MOST_VIEWS}, got {len(self.preset.images)}")

    def observe(self, observation: Mapping[str, Any]) -> Observed:
        seen = super().observe(observation)
        if len(seen.views) == len(self.preset.images) or not self.by_name:
            return seen
        # As lerobot, which then takes the cameras that are there by their names.
        keys = [key for key in (self.preset.images[index] for index in self.by_name) if key in seen.views]
        order = [list(seen.views).index(key) for key in keys]
        cameras = seen.cameras and replace(seen.cameras, sizes=tuple(seen.cameras.sizes[at] for at in order))
        images = tuple(seen.images[at] for at in order)
        return replace(seen, views={key: seen.views[key] for key in keys}, images=images, cameras=cameras)

    def unnormalize_actions(self, actions: np.ndarray, inputs: Any) -> np.ndarray:
        """Convert the model's actions (H, action_dim) to the robot's, float64, within the range of the statistics."""
        robot = super().unnormalize_actions(actions.clip(-1.0, 1.0), inputs)
        return robot if self.joints is None else self.joints.to_robot(robot)

    def state_at(self, normalised: np.ndarray) -> np.ndarray:
        state = super().state_at(normalised)
        return state if self.joints is None else self.joints.to_robot(state)

    def _model_state(self, raw: np.ndarray) -> np.ndarray:
        return raw if self.joints is None else self.joints.to_model(raw)

    def _model_actions(self, actions: Any, inputs: Any, name: str) -> np.ndarray:
        robot = super()._model_actions(actions, inputs, name)
        return robot if self.joints is None else self.joints.to_model(robot)

    def token_counts(self, prompt: str) -> tuple[int, int]:
        """The number of tokens of a prompt, twice: every state has as many."""
        known = self._lengths.get(prompt)
        if known is None:
            views, state = len(self.preset.images), np.zeros(self.preset.state_dim)
            known = self._lengths[prompt] = len(
                self.prompt.tokens(self.tokenizer, self._text(prompt, state, views), views)
            )
        return known, known

    def encode(self, seen: Observed) -> Any:
        raw = self._model_state(seen.state)
        key = " and ".join(self.preset.state)
        if wrong := [at for at in self.plain_state if abs(raw[at]) > 1]:
            raise ObservationError(
                f"{key}: expected number {wrong[0]} in [-1, 1], as the checkpoint scales it, got {raw[wrong[0]]:g}"
            )
        return super().encode(replace(seen, prompt=(seen.prompt, len(seen.images))))

    def _tokenized(self, prompt: Any, state: np.ndarray | None, most: int = 2**31) -> np.ndarray:
        assert state is not None
        instruction, views = prompt
        ids = self.prompt.tokens(self.tokenizer, self._text(instruction, state, views), views)
        return checked_length(ids, instruction, most, self.preset.prompt)

    def _text(self, instruction: object, state: np.ndarray, views: int) -> str:
        words = checked_prompt(instruction, self.preset.prompt, cleaned if self.prompt.clean else str)
        if "<" in words and (found := [special for special in self.prompt.specials if special in words]):
            raise ObservationError(
                f"{self.preset.prompt}: expected no special tokens, got {found[0]} in {instruction!r:.60}"
            )
        state = state.clip(-1.0, 1.0)
        state[list(self.still)] = 0.0
        return self.prompt.text(words, state, views)
