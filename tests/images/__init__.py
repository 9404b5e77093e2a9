"""Tests of image models: autoencoders, Stable Diffusion and Qwen-Image. They need diffusers."""
