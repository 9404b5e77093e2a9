"""Tests of the commands: options, output, errors and exit status."""
