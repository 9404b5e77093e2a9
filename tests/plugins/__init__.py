"""Tests of the packages in plugins/ inside their host programs. CONTRIBUTING describes the environment."""
