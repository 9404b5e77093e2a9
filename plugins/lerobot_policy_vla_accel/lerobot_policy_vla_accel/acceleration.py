"""Run lerobot's own policies on vla_accel's engines in lerobot's own programs.

lerobot imports installed plugins before it makes a policy. If the environment variable `VLA_ACCEL_ATTACH` is set, every
policy that it makes afterwards is attached (`vla_accel.attach`) in the first call that computes actions.
"""

from __future__ import annotations

import functools
import os
import types
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy

from vla_accel import attach

VARIABLE = "VLA_ACCEL_ATTACH"
"""1 for the fastest engines that lose nothing, or the name or file of a configuration; 0 or empty for lerobot's own
code."""
_WAITING = "_vla_accel_waiting"
_METHODS = ("predict_action_chunk", "select_action", "forward")


def requested() -> str | None:
    """Return what the environment variable says, None if policies stay as they are."""
    value = os.environ.get(VARIABLE, "").strip()
    return None if value.lower() in ("", "0", "false", "off", "no") else value


def install() -> None:
    """Attach every policy of this process, as the environment variable says."""
    original = PreTrainedPolicy.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.name != "vla_accel":
            _wait(self)

    PreTrainedPolicy.__init__ = init


def accelerate(policy: Any, preprocessor: Any = None) -> None:
    """Attach a policy now. `preprocessor`: as for `vla_accel.attach`."""
    _stop_waiting(policy)
    value = requested()
    attach(policy, None if value is None or value.lower() in ("1", "true", "on", "yes") else value,
           preprocessor=preprocessor)  # fmt: skip


def _wait(policy: Any) -> None:
    """Attach a policy in its first call. One that is trained first stays as it is: its weights change."""
    methods = {name: _waiting(name, policy) for name in _METHODS}
    vars(policy).update(methods, **{_WAITING: methods})


def _waiting(name: str, policy: Any) -> Any:
    own = getattr(type(policy), name)

    @functools.wraps(own)
    @torch.compiler.disable
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _stop_waiting(self):
            return own(self, *args, **kwargs)
        if name != "forward":
            accelerate(self)
        return getattr(self, name)(*args, **kwargs)

    return types.MethodType(call, policy)


def _stop_waiting(policy: Any) -> bool:
    """Restore the methods of a policy; return whether it was waiting. A method that was wrapped meanwhile, as by
    torch.compile, is left to its wrapper."""
    methods = vars(policy).pop(_WAITING, None)
    for name, method in (methods or {}).items():
        if vars(policy).get(name) is method:
            del vars(policy)[name]
    return methods is not None
