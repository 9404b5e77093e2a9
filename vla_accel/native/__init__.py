"""The native programs: components written in fused ops over static buffers, ready for a CUDA graph.

A family's programs and the weights they share are its `NativeStore` (`native.pi0`); image models have theirs. Knows the
models' weights, not how programs are run; the same programs run the ops' torch references where there is no GPU.
"""
