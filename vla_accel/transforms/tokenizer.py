"""Prompts to token ids, with the tokenizers of real checkpoints and a small one for the demo.

Prompt forms: openpi's two (plain, and with a discretised state), lerobot's line, and π0-FAST's.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vla_accel.errors import CheckpointError, DependencyError, ObservationError
from vla_accel.files import user_path

STATE_BINS = 256
_EDGES = np.linspace(-1, 1, STATE_BINS + 1)[:-1]
_PIECES = re.compile(r"-?\d+|[a-z]+|\n|[^\sa-z0-9]")


class Tokenizer(Protocol):
    """The tokenizer interface of a policy."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without those added later."""
        ...

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Convert text to token ids."""
        ...

    def finish(self, ids: list[int]) -> list[int]:
        """Complete a whole prompt's ids (the small tokenizer pads to a fixed length; others change nothing)."""
        ...


def discretise_state(state: np.ndarray) -> np.ndarray:
    """Convert a normalised state (n,) to 256 bins over [-1, 1], -1 below (openpi's `np.digitize`, not clipped)."""
    return np.searchsorted(_EDGES, state, side="right") - 1


def checked_prompt(prompt: object, name: str, clean: Callable[[str], str] = str) -> str:
    """Return what `clean` makes of a prompt. Raises ObservationError that begins with `name` for no text, and for one
    that `clean` leaves empty, or with blanks and underscores alone."""
    if not isinstance(prompt, str):
        raise ObservationError(f"{name}: expected a str, got {type(prompt).__name__}")
    text = clean(prompt)
    if not text.replace("_", " ").strip():
        raise ObservationError(f"{name}: expected an instruction, got {prompt!r:.60}")
    return text


def clean_prompt(prompt: object, name: str = "prompt") -> str:
    """Clean a prompt as openpi does. Raises ObservationError as `checked_prompt`."""
    return checked_prompt(prompt, name).strip().replace("_", " ").replace("\n", " ")


def tokenize_prompt(
    tokenizer: Tokenizer, prompt: object, state: np.ndarray | None, max_token_len: int, name: str = "prompt"
) -> np.ndarray:
    """Return the ids of openpi's prompt, int64 (L,), unpadded.

    Args:
        tokenizer: Encodes text.
        prompt: The instruction.
        state: Normalised state (n,), added to the prompt as 256 bins; None for the plain form, which ends in a newline
            token (success drops without it).
        max_token_len: The model's limit. openpi truncates a longer prompt, which drops the state first; this raises.
        name: Names the prompt in errors.
    """
    cleaned = clean_prompt(prompt, name)
    if state is None:
        ids = tokenizer.encode(cleaned, add_bos=True) + tokenizer.encode("\n", add_bos=False)
    else:
        values = " ".join(map(str, discretise_state(state).tolist()))
        ids = tokenizer.encode(f"Task: {cleaned}, State: {values};\nAction: ", add_bos=True)
    return checked_length(tokenizer.finish(ids), prompt, max_token_len, name)


def tokenize_line(tokenizer: Tokenizer, prompt: object, state: None, max_token_len: int, name: str) -> np.ndarray:
    """Return the ids of an unchanged instruction that ends in a newline, int64 (L,), unpadded (lerobot's SmolVLA).

    lerobot truncates a longer prompt, which drops the newline first; this raises.
    """
    line = checked_prompt(prompt, name)
    ids = tokenizer.encode(line if line.endswith("\n") else f"{line}\n", add_bos=True)
    return checked_length(tokenizer.finish(ids), prompt, max_token_len, name)


def tokenize_fast(tokenizer: Tokenizer, prompt: object, state: np.ndarray, max_token_len: int, name: str) -> np.ndarray:
    """Return the ids of π0-FAST's prefix, int64 (L,), unpadded: instruction, state as 256 bins, and a second <bos>,
    after which the model decodes. As lerobot's `pi0_fast`, which truncates a longer prompt."""
    values = " ".join(map(str, discretise_state(state).tolist()))
    ids = tokenizer.encode(f"Task: {clean_prompt(prompt, name)}, State: {values};\n", add_bos=True)
    return checked_length([*tokenizer.finish(ids), *tokenizer.encode("", add_bos=True)], prompt, max_token_len, name)


def checked_length(ids: list[int], prompt: object, max_token_len: int, name: str) -> np.ndarray:
    """Return ids as int64 (L,). Raises ObservationError that names the prompt if there are too many."""
    if len(ids) > max_token_len:
        raise ObservationError(
            f"{name}: expected at most {max_token_len} tokens (max_token_len), got {len(ids)} from {str(prompt)[:60]!r}"
        )
    return np.asarray(ids, dtype=np.int64)


@dataclass(frozen=True)
class SmallTokenizer:
    """Word-level tokenizer of the demo checkpoint.

    Attributes:
        words: Whole tokens. Other words are spelled by letters; other characters become `<unk>`.
        state_dim: Each of so many numbers of a state has 256 tokens of its own, so that a small model need not count
            positions.
        fill_to: Prompts are filled with `<fill>` to so many tokens, so that all known instructions have one length. The
            model is trained on fillers as real tokens.
    """

    words: tuple[str, ...]
    state_dim: int
    fill_to: int

    SPECIAL = ("<pad>", "<bos>", "<unk>", "<fill>")

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {w: i + len(self.SPECIAL) for i, w in enumerate(self.words)})

    @property
    def _first_number(self) -> int:
        return len(self.SPECIAL) + len(self.words)

    @property
    def vocab_size(self) -> int:
        return self._first_number + self.state_dim * STATE_BINS

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        ids = [1] if add_bos else []
        table: dict[str, int] = self.__dict__["_ids"]
        numbers = 0
        for piece in _PIECES.findall(text.lower()):
            if piece.lstrip("-").isdigit():
                slot = min(numbers, self.state_dim - 1)
                value = min(max(int(piece), 0), STATE_BINS - 1)
                ids.append(self._first_number + slot * STATE_BINS + value)
                numbers += 1
            elif piece in table:
                ids.append(table[piece])
            else:
                ids.extend(table.get(letter, 2) for letter in piece)
        return ids

    def finish(self, ids: list[int]) -> list[int]:
        return ids + [3] * (self.fill_to - len(ids))

    def save(self, path: Path) -> None:
        content = {"type": "small", "words": list(self.words), "state_dim": self.state_dim, "fill_to": self.fill_to}
        path.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> SmallTokenizer:
        """Raises CheckpointError for a file that is not such a tokenizer."""
        try:
            content = json.loads(path.read_text())
            if content["type"] != "small":
                raise KeyError("type")
            return cls(tuple(content["words"]), int(content["state_dim"]), int(content["fill_to"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"tokenizer {path}: expected Hugging Face's JSON or a small tokenizer's, got {error!r}"
            ) from error


PALIGEMMA_HUB = "google/paligemma-3b-pt-224"
_PALIGEMMA_FILES = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")
# Where openpi keeps the file it downloads.
_OPENPI_CACHE = "~/.cache/openpi/big_vision/paligemma_tokenizer.model"


class PaliGemmaTokenizer:
    """PaliGemma's tokenizer, from SentencePiece's `*.model` (openpi) or Hugging Face's `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        if path.suffix == ".json":
            tokenizer = read_tokenizers(path)
            bos: int | None = tokenizer.token_to_id("<bos>")
            self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=False)
            self._encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        else:
            processor = _read_sentencepiece(path)
            bos, self.vocab_size, self._encode = processor.bos_id(), processor.vocab_size(), processor.encode
        if bos is None or bos < 0:
            raise CheckpointError(f"tokenizer {path}: expected a token <bos>, found none")
        self._bos = bos

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        ids = self._encode(text)
        return [self._bos, *ids] if add_bos else ids

    def finish(self, ids: list[int]) -> list[int]:
        return ids


class LineTokenizer:
    """Any Hugging Face `tokenizer.json`, with the special tokens of its file (SmolVLM2's has none), or a folder with
    `PIECES` of Qwen's."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = read_pieces(path) if path.is_dir() else read_tokenizers(path)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=False)

    def add(self, tokens: Sequence[str]) -> None:
        """Add special tokens that the file lacks, with the numbers after its last one."""
        self._tokenizer.add_special_tokens(list(tokens))
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_bos).ids

    def finish(self, ids: list[int]) -> list[int]:
        return ids


def read_tokenizers(path: Path) -> Any:
    """Read Hugging Face's tokenizer of a `tokenizer.json`. Raises CheckpointError, DependencyError."""
    try:
        from tokenizers import Tokenizer as HubTokenizer
    except ImportError as error:
        raise DependencyError(f"{path.name} needs tokenizers: pip install 'vla_accel[checkpoints]'") from error
    try:
        tokenizer = HubTokenizer.from_file(str(path))
    # The library raises nothing narrower.
    except Exception as error:
        raise CheckpointError(f"tokenizer {path}: expected a Hugging Face tokenizer, got: {error}") from error
    # The file may store padding and truncation.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


PIECES = ("vocab.json", "merges.txt", "added_tokens.json")
"""Files of a tokenizer that is saved without `tokenizer.json`."""
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_pieces(folder: Path) -> Any:
    """Read Qwen's tokenizer of a folder with `PIECES`. Raises CheckpointError, DependencyError."""
    try:
        from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
        from tokenizers import Tokenizer as HubTokenizer
    except ImportError as error:
        raise DependencyError(f"{folder} needs tokenizers: pip install 'vla_accel[checkpoints]'") from error
    try:
        vocabulary, added = (json.loads((folder / PIECES[at]).read_text("utf-8")) for at in (0, 2))
        lines = (folder / PIECES[1]).read_text("utf-8").split("\n")
        pairs = (line.split(" ") for line in lines if line and not line.startswith("#version"))
        merges = [(first, second) for first, second in pairs]
        tokenizer = HubTokenizer(models.BPE(vocabulary, merges))
    # The library raises nothing narrower.
    except Exception as error:
        raise CheckpointError(f"tokenizer {folder}: expected {', '.join(PIECES)} of Qwen's, got: {error}") from error
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    names = sorted(added, key=added.__getitem__)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if wrong := [name for name in names if tokenizer.token_to_id(name) != added[name]]:
        got = f"{wrong[0]} as {added[wrong[0]]}"
        raise CheckpointError(f"tokenizer {folder}: expected tokens after the {len(vocabulary)} words, got {got}")
    return tokenizer


def _read_sentencepiece(path: Path) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise DependencyError(f"{path.name} needs sentencepiece: pip install 'vla_accel[checkpoints]'") from error
    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"tokenizer {path}: expected a SentencePiece model, got: {error}") from error


def load_tokenizer(
    folder: Path, source: str | None = None, *, elsewhere: bool = False, hub: str = PALIGEMMA_HUB
) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder: the small one or PaliGemma's.

    Args:
        folder: The checkpoint's.
        source: A file, a folder or a hub name to use instead.
        elsewhere: Also look in openpi's cache and on the hub (openpi's and lerobot's checkpoints have no tokenizer).
        hub: The tokenizer that the checkpoint was trained with, a folder or a hub name.

    Raises:
        CheckpointError: There is none.
    """
    place = folder if source is None else user_path(source)
    if source is not None and not place.is_dir():
        return _load_file(place if place.is_file() else _from_hub(source), PaliGemmaTokenizer)
    path = next((place / name for name in _PALIGEMMA_FILES if (place / name).is_file()), None)
    if path is None and (source is not None or not elsewhere):
        raise CheckpointError(f"tokenizer {place}: expected tokenizer.json or tokenizer.model, found neither")
    kept = user_path(_OPENPI_CACHE)
    # lerobot may name a copy of PaliGemma's on another machine.
    if path is None and (Path(hub).is_dir() or Path(hub).name != Path(PALIGEMMA_HUB).name):
        path = _from_hub(hub)
    return _load_file(path or (kept if kept.is_file() else _from_hub(PALIGEMMA_HUB)), PaliGemmaTokenizer)


def load_line_tokenizer(folder: Path, source: str | None, hub: str, *, apart: bool = False) -> Tokenizer:
    """Return the tokenizer of a checkpoint whose prompts are lines: `tokenizer.json` of `source` (a folder, a file or a
    hub name), else of the checkpoint's folder, else of `hub`. Raises CheckpointError if there is none.

    `apart`: the hub has Qwen's tokenizer as `PIECES`; folders may have it in this form as well.
    """
    place = folder if source is None else user_path(source)
    path = place / "tokenizer.json" if place.is_dir() else place
    if apart and not path.is_file() and all((place / name).is_file() for name in PIECES):
        return LineTokenizer(place)
    if not path.is_file():
        hint = (
            ", or put its tokenizer.json into the checkpoint's folder, or set checkpoint.tokenizer in the configuration"
            " to a file, a folder or a hub name"
        )
        if apart:
            return LineTokenizer(files_from_hub(source or hub, PIECES, hint))
        path = _from_hub(source or hub, hint)
    return _load_file(path, LineTokenizer)


def _load_file(path: Path, kind: type[PaliGemmaTokenizer | LineTokenizer]) -> Tokenizer:
    """Read a small tokenizer, or one of `kind`: Hugging Face's JSON has it under "model"."""
    if path.suffix != ".json":
        return kind(path)
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"tokenizer {path}: expected JSON, got: {error}") from error
    return kind(path) if isinstance(content, dict) and "model" in content else SmallTokenizer.load(path)


_HUB_ANSWERS_WITHIN_S = 10.0
_PALIGEMMA_HINT = (
    " (PaliGemma's licence must be accepted on its page once), or put its tokenizer.model into the checkpoint's "
    "folder, or name it as checkpoint.tokenizer in the configuration"
)


def _from_hub(name: str, hint: str = _PALIGEMMA_HINT) -> Path:
    return files_from_hub(name, ("tokenizer.json",), hint) / "tokenizer.json"


def files_from_hub(name: str, files: Sequence[str], hint: str) -> Path:
    """Return the folder of these files: `name` itself if it is a folder, else from the hub or its cache.

    Raises CheckpointError that says what else can be done.
    """
    place = Path(name)
    if place.suffix == ".json" and not place.exists():
        raise CheckpointError(f"tokenizer: expected a file at {place.absolute()}, found none")
    if place.is_absolute() or place.is_dir() or name.startswith(".") or name.count("/") > 1:
        for file in files:
            if not (place / file).is_file():
                raise CheckpointError(f"tokenizer: expected {file} in {name}, found none; {hint.partition(', or ')[2]}")
        return place
    try:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise DependencyError(f"a tokenizer from the hub needs pip install 'vla_accel[checkpoints]'{hint}") from error
    try:
        if not all(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            # Without a network hf_hub_download retries for 25 s, so try once here. It reports a refusal itself.
            with contextlib.suppress(HfHubHTTPError):
                get_hf_file_metadata(hf_hub_url(name, files[0]), timeout=_HUB_ANSWERS_WITHIN_S)
        first, *_ = (Path(hf_hub_download(name, file)).parent for file in files)
    # The hub's errors have no common base: ValueError for a bad name, OSError for the network, its own for the rest.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise CheckpointError(
            f"tokenizer: expected {name!r} in the hub's cache {constants.HF_HUB_CACHE} or at {constants.ENDPOINT}, "
            f"got: {reason}; where there is a network, type hf download {name} {' '.join(files)}{hint}"
        ) from error
    return first
