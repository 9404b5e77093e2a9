"""vla_accel: run vision-language-action policies fast, with a report of what each call cost.

from vla_accel import OptimizedPolicy

policy = OptimizedPolicy.from_pretrained("demo")
result = policy.infer(observation)  # {"actions": (10, 7), "policy_timing": {...}, ...}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from vla_accel.attachment import attach
    from vla_accel.config import EngineSpec, PolicyConfig, load_config
    from vla_accel.policy import OptimizedPolicy

_MODULES = {
    "attach": "vla_accel.attachment",
    "OptimizedPolicy": "vla_accel.policy",
    "PolicyConfig": "vla_accel.config",
    "EngineSpec": "vla_accel.config",
    "load_config": "vla_accel.config",
}

__all__ = ["EngineSpec", "OptimizedPolicy", "PolicyConfig", "__version__", "attach", "load_config"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that clients need no torch.
    if name in _MODULES:
        import importlib

        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'vla_accel' has no attribute {name!r}")
