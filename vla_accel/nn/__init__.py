"""The networks, a module each, and what a model family is. They know no robots, checkpoints' dialects or engines."""
