"""Convolutions over short sequences as GEMMs of im2col rows, and the ops between them."""
