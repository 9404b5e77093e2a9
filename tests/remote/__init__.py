"""Server, client and wire form, also under load, with hostile bytes and with processes that die."""
