"""Tests of the tables and figures of stored runs, and of the jobs that create them."""
