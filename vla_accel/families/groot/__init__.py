"""Isaac GR00T N1.7."""
