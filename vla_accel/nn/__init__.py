"""The networks, in torch and in fused ops, independent of robots, checkpoint formats and engines."""
