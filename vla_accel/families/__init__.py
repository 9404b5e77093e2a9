"""The model families, a module each; `vla_accel.families.family.FAMILIES` lists them and says what a family is."""
