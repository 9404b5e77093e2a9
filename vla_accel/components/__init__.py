"""The policy's components: each file cuts one piece out of the model and says how it is fed."""

from vla_accel.components.denoise import denoise_component
from vla_accel.components.kv_cache import kv_cache_component
from vla_accel.components.vision import vision_component

__all__ = ["denoise_component", "kv_cache_component", "vision_component"]
