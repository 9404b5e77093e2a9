"""What each command may be asked: options alone, so that `--help` and a wrong call need not wait for torch."""
