"""Code that several tests share: tiny models and checkpoints, toys, descriptions of GPUs, cases of kernels."""
