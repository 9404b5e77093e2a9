"""The processors that lerobot puts around the policy. The policy normalises and tokenises itself, as its checkpoint
specifies, so these only rename, batch and move."""

from __future__ import annotations

from typing import Any

from lerobot.processor import (
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    PolicyAction,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
    make_policy_processor_pipelines,
)

from lerobot_policy_vla_accel.configuration_vla_accel import VlaAccelConfig


def make_vla_accel_pre_post_processors(
    config: VlaAccelConfig, dataset_stats: Any = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]:  # fmt: skip
    """lerobot's factory calls this by its name. `dataset_stats`: unused, the checkpoint has its own."""
    del dataset_stats
    return make_policy_processor_pipelines(
        input_steps=[
            RenameObservationsProcessorStep(rename_map={}),
            AddBatchDimensionProcessorStep(),
            DeviceProcessorStep(device=config.device or "cpu"),
        ],
        output_steps=[DeviceProcessorStep(device="cpu")],
    )
