"""OpenVLA-OFT."""
