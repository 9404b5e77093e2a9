"""Tests of live views in rerun: their content, and the programs that have one."""
