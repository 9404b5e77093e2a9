"""A tokenizer that keeps the texts."""

from __future__ import annotations


class Spy:
    """Each text is one token, 7, after <bos>, 1; a whole prompt ends in 9."""

    vocab_size = 99

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        self.texts.append(text)
        return [1, 7] if add_bos else [7]

    def finish(self, ids: list[int]) -> list[int]:
        return [*ids, 9]
