"""Convolutions over short sequences as products of gathered rows, and what lies between them."""
