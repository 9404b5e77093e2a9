"""The evaluation: harness, LIBERO, the training of the demo, statistics and reports."""
