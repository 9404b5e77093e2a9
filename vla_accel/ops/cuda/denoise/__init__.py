"""The denoise loop of few rows in CUDA C++ for Hopper."""

from vla_accel.ops.cuda.denoise.launch import StreamedLoop, why_not
from vla_accel.ops.cuda.denoise.packing import Packed
from vla_accel.ops.cuda.denoise.tables import Sizes, StepTables

__all__ = ["Packed", "Sizes", "StepTables", "StreamedLoop", "why_not"]
