"""What everything stands on: configuration, files, latency, FP8, and the rules of the house itself."""
