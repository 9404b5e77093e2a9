"""Policies that lerobot's own trainer trains on the scripted expert's demonstrations, and saves."""
