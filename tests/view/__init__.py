"""Live views in rerun: what they show, what they leave out, and who shows what."""
