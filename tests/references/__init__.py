"""Programs that run other projects' code to make references."""
