"""Tests of the networks against references that were written here or recorded from the original projects."""
