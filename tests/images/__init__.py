"""Image models: autoencoders, Stable Diffusion and Qwen-Image over the shared engines. Needs diffusers."""
