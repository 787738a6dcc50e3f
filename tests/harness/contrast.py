"""How well the words of a page stand out from their ground."""

from __future__ import annotations

from playwright.sync_api import Page

_SCRIPT = """(selector) => {
  const parse = text => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith('color(') ? [r * 255, g * 255, b * 255, a] : [r, g, b, a];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = rgb => {
    const [r, g, b] = rgb.map(v => v / 255)
      .map(v => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      layers.push(color);
      if (color[3] === 1) break;
    }
    return layers.reduceRight((below, top) => over(top, below), [255, 255, 255]);
  };
  const found = {};
  for (const root of document.querySelectorAll(selector)) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let text; (text = walker.nextNode()); ) {
      const words = text.textContent.trim();
      if (!words || !text.parentElement.checkVisibility()) continue;
      const below = ground(text.parentElement);
      const ink = over(parse(getComputedStyle(text.parentElement).color), below);
      const [dark, bright] = [light(ink), light(below)].sort((a, b) => a - b);
      found[words] = (bright + 0.05) / (dark + 0.05);
    }
  }
  return found;
}"""


def contrasts(page: Page, selector: str) -> dict[str, float]:
    """Return the contrast ratio (1 to 21, by WCAG) of each text below `selector`."""
    return dict(page.evaluate(_SCRIPT, selector))
