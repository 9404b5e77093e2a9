"""A small family unlike π0: encoder → latents → head, with a mask that both components share, and no prompt."""
