"""The denoise loop of few rows in CUDA C++ for Hopper."""

from vla_accel.kernels.loop.launch import StreamedLoop, why_not
from vla_accel.kernels.loop.packing import Packed
from vla_accel.kernels.loop.tables import ExpertSpec, StepTables

__all__ = ["ExpertSpec", "Packed", "StepTables", "StreamedLoop", "why_not"]
