"""Tests of the pages: every command, example, link and recipe in them."""
