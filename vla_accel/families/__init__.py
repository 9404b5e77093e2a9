"""The model families, a folder each. `family.py` has their interface (`Family`) and their list (`FAMILIES`)."""
