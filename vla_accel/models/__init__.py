"""The models: SigLIP, Gemma, π0 and π0.5, and how their checkpoints are read."""
