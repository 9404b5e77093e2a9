"""Configuration: what a policy may be told, and how a file or a mapping becomes it."""

from vla_accel.config.policy import (
    AUTO,
    Attention,
    CheckpointSpec,
    EngineName,
    EnginePrecision,
    EngineSpec,
    NativeOptions,
    PolicyConfig,
    Precision,
    RtcConfig,
    Schedule,
    TensorrtOptions,
    find_config,
    load_config,
    shipped_configs,
)

__all__ = [
    "AUTO",
    "Attention",
    "CheckpointSpec",
    "EngineName",
    "EnginePrecision",
    "EngineSpec",
    "NativeOptions",
    "PolicyConfig",
    "Precision",
    "RtcConfig",
    "Schedule",
    "TensorrtOptions",
    "find_config",
    "load_config",
    "shipped_configs",
]
