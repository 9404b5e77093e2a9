"""How the bundled checkpoints are made: start states, collectors, training, publishing."""
