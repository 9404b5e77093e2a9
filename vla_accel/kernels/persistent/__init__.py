"""The denoise loop of few rows as one persistent kernel in CUDA C++, for every GPU from Ampere on."""
