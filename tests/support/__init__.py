"""What several tests share: tiny models and checkpoints, toys, GPUs that are not there, kernels' cases."""
