"""Image generation over the shared engines: autoencoders of any size, Stable Diffusion, Qwen-Image. Needs diffusers."""

from vla_accel.images.config import VaeConfig, load_vae_config
from vla_accel.images.plugged import plug_in
from vla_accel.images.vae import AcceleratedVae

__all__ = ["AcceleratedVae", "VaeConfig", "load_vae_config", "plug_in"]
