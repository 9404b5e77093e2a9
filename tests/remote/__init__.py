"""Tests of server, client and wire format, also under load, with invalid bytes and with processes that die."""
