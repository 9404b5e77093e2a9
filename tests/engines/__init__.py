"""Engines: what may fall back, the cache, ONNX, and TensorRT with stand-ins for what needs a GPU."""
