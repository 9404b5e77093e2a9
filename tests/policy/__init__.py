"""Tests of whole policies: the default engine, pipelines, memory, real-time chunking, one file for each family."""
