"""Opens every page of a built site in a headless browser: it renders, images load, no table is too wide.

`python docs/browse.py docs/_build/html` exits with the number of faults; 0 where there is no Chromium, which it says.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LISTS = ("genindex.html", "py-modindex.html", "search.html")  # made by Sphinx: with scripts, or empty
WIDTH, HEIGHT = 1280, 1600
PROBE = """<script>
addEventListener("load", () => {
  const found = [];
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth) found.push("image missing: " + image.src);
  const content = document.querySelector("article") || document.body;
  for (const table of content.querySelectorAll("table"))
    if (table.getBoundingClientRect().right > innerWidth)
      found.push("table wider than the page: " + table.innerText.slice(0, 60));
  if (content.innerText.trim().length < 40) found.push("no contents");
  if (!document.title.trim()) found.push("no title");
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page scrolls sideways");
  document.documentElement.setAttribute("data-faults", found.join(" | ") || "none");
});
</script>"""


def faults_of(page: Path, browser: str, profile: str) -> str:
    """What the browser finds wrong with a page; empty if nothing is."""
    probe = page.with_name(f"_probe_{page.name}")
    probe.write_text(page.read_text().replace("</head>", PROBE + "</head>", 1))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        f"--window-size={WIDTH},{HEIGHT}",
    ]
    flags += ["--virtual-time-budget=4000", "--allow-file-access-from-files", "--dump-dom"]
    try:
        run = subprocess.run(
            [browser, *flags, probe.as_uri()], capture_output=True, text=True, timeout=120, check=False
        )
    finally:
        probe.unlink()
    found = re.search(r'data-faults="([^"]*)"', run.stdout)
    if found is None:
        return f"the browser did not open it: {run.stderr[-200:]}"
    return "" if found[1] == "none" else found[1]


def main() -> int:
    """Print the faults of the site that the command line names."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.stdout.write(f"no browser here ({', '.join(BROWSERS)}): pages were not opened in one\n")
        return 0
    site = Path(sys.argv[1]).resolve()
    pages = [page for page in sorted(site.rglob("*.html")) if "_modules" not in page.parts and page.name not in LISTS]
    count = 0
    with TemporaryDirectory() as profile:
        for page in pages:
            found = faults_of(page, browser, profile)
            count += bool(found)
            if found:
                sys.stdout.write(f"{page.relative_to(site)}: {found}\n")
    sys.stdout.write(f"{len(pages)} pages opened in {Path(browser).name}, {count} with faults\n")
    return min(count, 100)


if __name__ == "__main__":
    sys.exit(main())
