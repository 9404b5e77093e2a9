"""Whose turn it is: round robin over clients, first come first served within one. Knows nothing about requests."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A client with many requests waiting delays the others by one request a turn, however many it has."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._waiting.values() for item in items)

    def put(self, client: Hashable, item: T) -> None:
        """Add an item; a client that had none waiting goes to the end of the round."""
        self._waiting.setdefault(client, deque()).append(item)

    def put_first(self, client: Hashable, item: T) -> None:
        """Give an item back whose turn it was: it comes next."""
        self._waiting.setdefault(client, deque()).appendleft(item)
        self._waiting.move_to_end(client, last=False)

    def pop(self) -> T:
        """The next item; its client goes to the end of the round. IndexError when nothing waits."""
        if not self._waiting:
            raise IndexError("pop from an empty queue")
        client, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[client] = items
        return item

    def remove(self, client: Hashable, item: T) -> bool:
        """Take an item out; False if it does not wait any more."""
        items = self._waiting.get(client)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[client]
        return True
