"""Programs that run other projects' code to record references."""
