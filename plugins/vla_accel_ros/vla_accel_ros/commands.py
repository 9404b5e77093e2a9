"""A policy's actions as the commands of a robot's topics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_accel.errors import ConfigError
from vla_accel_ros.contract import Contract, Source


@dataclass(frozen=True)
class Command:
    """The numbers for one topic, in its units."""

    source: Source
    values: np.ndarray

    def by_field(self) -> tuple[list[str], dict[str, list[float]]]:
        """The joints, and for each field of the message their numbers in the same order."""
        names = self.source.names
        joints = list(dict.fromkeys(joint for _, joint in names))
        numbers = dict(zip(names, self.values.tolist(), strict=True))
        fields = dict.fromkeys(field for field, _ in names)
        return joints, {field: [numbers[field, joint] for joint in joints] for field in fields}


class Commands:
    """Splits actions among the topics of a contract."""

    def __init__(self, contract: Contract) -> None:
        self._sources, self._dim = contract.actions, contract.action_dim
        self._last: list[Command] = []
        self.names = [name for source in self._sources for name in source.select]

    def split(self, action: np.ndarray) -> list[Command]:
        """The commands of an action (action_dim,).

        Raises:
            ConfigError: the policy's actions have another size than the contract's.
        """
        if self._dim is not None and len(action) != self._dim:
            raise ConfigError(f"actions: expected {self._dim} numbers, as in the contract, got {len(action)}")
        ends = np.cumsum([len(source.select) for source in self._sources])
        parts = zip(self._sources, np.split(action, ends[:-1]), strict=True)
        return [Command(source, _inverse(source, part)) for source, part in parts]

    def next(self, action: np.ndarray) -> list[Command]:
        """As `split`, for an action that the robot executes now."""
        self._last = self.split(action)
        return self._last

    def units(self, actions: np.ndarray) -> np.ndarray:
        """Actions (n, action_dim) in the units of the topics."""
        return np.array([np.concatenate([command.values for command in self.split(row)]) for row in actions])

    def stop(self) -> list[Command]:
        """The commands that stop the robot, after the last action: its topics' `safety`."""
        found = []
        for command in self._last:
            if command.source.channel.safety == "hold":
                found.append(command)
            elif command.source.channel.safety == "zeros":
                found.append(Command(command.source, _inverse(command.source, np.zeros_like(command.values))))
        return found


def _inverse(source: Source, values: np.ndarray) -> np.ndarray:
    for operator in reversed(source.operators):
        values = operator.inverse(values)
    return values
