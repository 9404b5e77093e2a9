"""The native programs of X-VLA."""

from __future__ import annotations

from typing import Any

from vla_accel.families.xvla.network import Xvla
from vla_accel.nn.store import NativeStore

QUANTISED: dict[str, dict[str, Any]] = {"denoise": {}}


class XvlaStore(NativeStore[Xvla]):
    def vision(self, *_: Any) -> Any: ...
    def kv_cache(self, *_: Any) -> Any: ...
    def denoise(self, *_: Any) -> Any: ...
