"""Tests of reports: pages, figures and colors, also in a browser."""
