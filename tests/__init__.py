"""The tests: a folder for each part of the package, the evaluation, the pages, GPUs and other projects."""
