"""The commands: what they are told, what they say, and how they end."""
