"""Tests of engines: fallbacks, the cache, ONNX, and TensorRT with dummies for what needs a GPU."""
