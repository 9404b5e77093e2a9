"""Image generation over the shared engines: autoencoders of any size, Stable Diffusion, Qwen-Image. Needs diffusers."""

from vla_accel.diffusion.config import VaeConfig, load_vae_config
from vla_accel.diffusion.plugged import plug_in
from vla_accel.diffusion.vae import AcceleratedVae

__all__ = ["AcceleratedVae", "VaeConfig", "load_vae_config", "plug_in"]
