"""The fastest configuration of a checkpoint on this machine that loses nothing, found by trying, with the evidence."""
