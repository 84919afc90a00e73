"""Opens every page of a built site in a headless Chromium.

The views are a desktop in two colour schemes and a phone.

`python tools/browse.py docs/_build/html [--pictures FOLDER]` prints the faults of each page and
exits with the number of pages that have some: images that do not load, tables and pages that are
too wide, text that its background hides, errors of scripts. It exits with 0 where there is no
browser and none can be fetched, and prints why.
"""

from __future__ import annotations

import base64
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from chromium import Chromium, NoBrowserError, find

# made by Sphinx: with scripts, or empty
LISTS = ("genindex.html", "py-modindex.html", "search.html")
# There are 300 pages of one class or function, made from one template: open only some of them.
SAMPLE = ("D", "a")
VIEWS = {
    "desktop": (1280, 1600, "light"),
    "dark": (1280, 1600, "dark"),
    "phone": (390, 800, "light"),
}
# of text and background; WCAG asks for it of large text
CONTRAST = 3.0
PROBE = """(() => {
  const found = [], content = document.querySelector("article") || document.body;
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth) found.push("image missing: " + image.src);
    else if (content.contains(image) && !image.src.endsWith(".svg")
             && getComputedStyle(image).backgroundColor == "rgba(0, 0, 0, 0)")
        found.push("image without a background, so ink may be dark on dark: "
                   + image.src.split("/").pop());
  // a phone has room for about 45 characters
  for (const code of innerWidth < 1000 ? [] : content.querySelectorAll("pre"))
    if (code.scrollWidth > code.clientWidth + 1) {
      const lines = code.innerText.split("\\n").sort((a, b) => b.length - a.length);
      found.push("code scrolls sideways: " + lines[0]);
    }
  for (const table of content.querySelectorAll("table")) {
    let box = table;
    while (box && !["auto", "scroll"].includes(getComputedStyle(box).overflowX))
      box = box.parentElement;
    if (!box && table.getBoundingClientRect().right > innerWidth + 1)
      found.push("table wider than the page: " + table.innerText.slice(0, 60));
  }
  if (content.innerText.trim().length < 40) found.push("no contents");
  if (!document.title.trim()) found.push("no title");
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page scrolls sideways");

  const numbers = color => (color.match(/[\\d.]+/g) || []).map(Number);
  const luminance = color => {
    const linear = one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.map(one => linear(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = element => {
    for (; element; element = element.parentElement) {
      const color = numbers(getComputedStyle(element).backgroundColor);
      if (color.length == 3 || color[3] > 0.5) return color.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const seen = new Set(), texts = document.createTreeWalker(content, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, text = texts.currentNode.data.trim();
    const options = {opacityProperty: true, visibilityProperty: true};
    if (!text || !element.checkVisibility(options)) continue;
    const color = numbers(getComputedStyle(element).color).slice(0, 3);
    const behind = background(element);
    const [low, high] = [luminance(color), luminance(behind)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05), key = color + "/" + behind;
    if (ratio < CONTRAST && !seen.has(key)) {
      seen.add(key);
      found.push(`contrast ${ratio.toFixed(1)} (rgb ${color} on ${behind}): ${text.slice(0, 30)}`);
    }
  }
  return found;
})()""".replace("CONTRAST", str(CONTRAST))


def faults_of(page: Path, browser: Chromium, picture: Path | None) -> list[str]:
    """One line for each view in which the browser finds something wrong with a page.

    With `picture`, each view is kept as a PNG.
    """
    browser.open(page.as_uri())
    lines = [f"script: {text}" for text in map(script_error, browser.events) if text]
    for view, (width, height, scheme) in VIEWS.items():
        browser.view(width, height, scheme)
        answer = browser.call("Runtime.evaluate", expression=PROBE, returnByValue=True)
        found = answer["result"].get("value", ["the probe failed"])
        if found:
            lines.append(f"{view}: {'; '.join(found)}")
        if picture is not None:
            shot = browser.call("Page.captureScreenshot", captureBeyondViewport=False)
            picture.with_name(f"{picture.name}-{view}.png").write_bytes(
                base64.b64decode(shot["data"])
            )
    return lines


def script_error(event: dict[str, Any]) -> str:
    """The text of an event that is an error of a script, or of something that the page loads.

    It is empty for others.
    """
    if event["method"] == "Runtime.exceptionThrown":
        return str(event["params"]["exceptionDetails"]["text"])
    entry = event["params"].get("entry", {}) if event["method"] == "Log.entryAdded" else {}
    return f"{entry['text']} {entry.get('url', '')}" if entry.get("level") == "error" else ""


def main() -> int:
    """Print the faults of the site that the command line names."""
    parser = ArgumentParser()
    parser.add_argument("site", type=lambda text: Path(text).resolve())
    parser.add_argument(
        "--pictures", type=Path, help="a folder for a screenshot of each page's first screen"
    )
    arguments = parser.parse_args()
    site, pictures = arguments.site, arguments.pictures
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    pages = [
        page
        for page in sorted(site.rglob("*.html"))
        if "_modules" not in page.parts and page.name not in LISTS
    ]
    alike = [page for page in pages if page.parent.name.startswith("shoal_")]
    left_out = {page for page in alike if not page.stem.startswith(SAMPLE)}
    pages = [page for page in pages if page not in left_out]
    count = 0
    try:
        program, variables = find()
        with Chromium(program, variables) as browser:
            for page in pages:
                name = str(page.relative_to(site).with_suffix("")).replace("/", "-")
                lines = faults_of(page, browser, pictures and pictures / name)
                count += bool(lines)
                sys.stdout.writelines(f"{page.relative_to(site)}, {line}\n" for line in lines)
    except NoBrowserError as error:
        sys.stdout.write(f"pages were not opened in a browser: {error}\n")
        return 0
    sys.stdout.write(
        f"{len(pages)} pages opened in {program.name} in {len(VIEWS)} views, {count} with faults\n"
    )
    return min(count, 100)


if __name__ == "__main__":
    sys.exit(main())
