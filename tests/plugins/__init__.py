"""The packages in plugins/, inside the programs they belong to. CONTRIBUTING says how that environment is made."""
