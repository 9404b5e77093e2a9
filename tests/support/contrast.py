"""Contrast of a page's text in a browser, as WCAG 2.2 defines it."""

from __future__ import annotations

from typing import Any

LEAST = 4.5
"""WCAG's level AA for ordinary text."""
_SCRIPT = """
() => {
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = channels(colour).slice(0, 3).map(c => c / 255).map(
      c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor, parts = channels(colour);
      if (parts.length < 4 || parts[3] > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const own = node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
  const found = [...document.body.querySelectorAll("*")].filter(
    node => own(node) && !["SCRIPT", "STYLE"].includes(node.tagName)).map(node => {
      const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), node.tagName + ": " + node.textContent.slice(0, 40)];
    });
  return [found.sort((x, y) => x[0] - y[0])[0], getComputedStyle(document.body).backgroundColor];
}
"""


def least_contrast(page: Any) -> tuple[float, str, str]:
    """The smallest contrast of a text with what lies behind it, that text, and the page's background. `page`:
    Playwright's."""
    (ratio, text), background = page.evaluate(_SCRIPT)
    return ratio, text, background
