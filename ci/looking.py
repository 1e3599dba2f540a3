"""Looks at pages in a browser, at a desk's and a phone's width: `python3 ci/docs.py --look` runs it.

Serves a folder on the loopback address, opens each of its pages at both widths, and prints what is wrong: a page wider
than its window, an error on the console, a request that fails or goes elsewhere, a link that leads nowhere, a picture
that is missing or too small to read, a line of an example that is cut off.

    python looking.py BROWSER FOLDER            every page
    python looking.py BROWSER FOLDER --site     also the site's search, copy buttons and dark mode; keeps screenshots
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

from playwright.sync_api import Browser, Page, sync_playwright

SIZES = ((1280, 800), (390, 844))
SHOTS = "screenshots"
# What a person would look at first, and a page with a wide table and wide pictures.
SHOWN = ("index", "guide/five-minutes", "guide/too-big", "api/index", "api/DataParallel")
# Text of the pictures has 11 to 13 pixels at their own size.
SMALLEST = 0.6
SEEN = """(smallest) => {
  const root = document.documentElement;
  const images = [...document.images];
  const area = (image) => image.getBoundingClientRect();
  const cut = (block) => block.scrollWidth > block.clientWidth + 1 && block.closest(".highlight-python, .doctest");
  const name = (image) => image.getAttribute("src");
  return {
    wide: root.scrollWidth - root.clientWidth,
    links: [...document.querySelectorAll("a[href]")].map((link) => link.href),
    anchors: [...document.querySelectorAll("[id], a[name]")].map((place) => place.id || place.name),
    missing: images.filter((image) => image.complete && image.naturalWidth === 0).map(name),
    small: images.filter((image) => area(image).width < smallest * image.naturalWidth).map(name),
    cut: [...document.querySelectorAll("pre")].filter(cut).map((block) => block.innerText.split("\\n")[0]),
  };
}"""


@dataclass
class Found:
    """What is wrong with the pages, and what their links need to be judged by once each is known."""

    problems: list[str] = field(default_factory=list)
    links: dict[str, set[str]] = field(default_factory=dict)
    anchors: dict[str, set[str]] = field(default_factory=dict)

    def add(self, where: str, problem: str) -> None:
        if (text := f"{where}: {problem}") not in self.problems:
            self.problems.append(text)


class _Silent(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        # Some browsers ask for it by themselves.
        if self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder; it ends with this process at the latest."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()


def main(arguments: list[str]) -> int:
    browser, folder, *others = arguments
    found = Found()
    with served(Path(folder)) as root, sync_playwright() as playwright:
        # In a container root has no sandbox; the pages are our own.
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        pages = sorted(str(page.relative_to(folder)) for page in Path(folder).rglob("*.html"))
        for width, height in SIZES:
            look(opened, root, pages, (width, height), found)
        judge_links(Path(folder), root, found)
        if "--site" in others:
            try_site(opened, root, found)
            for width, height in SIZES:
                keep_shots(opened, root, Path(folder) / SHOTS, (width, height))
        opened.close()
    for problem in found.problems:
        print(problem)
    print(f"looked at {len(pages)} pages: {len(found.problems)} problems")
    return int(bool(found.problems) or not pages)


def look(browser: Browser, root: str, pages: list[str], size: tuple[int, int], found: Found) -> None:
    """Opens each page in a window of this size."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    where = ""

    def add(problem: str) -> None:
        found.add(where, problem)

    listen(page, root, add)
    for name in pages:
        where = name
        page.goto(root + name)
        seen = page.evaluate(SEEN, SMALLEST)
        if seen["wide"] > 0:
            add(f"is {seen['wide']} pixels wider than a window of {size[0]}")
        for image in seen["missing"]:
            add(f"the picture {image} is not there")
        for image in seen["small"]:
            add(f"the picture {image} is too small to read in a window of {size[0]}")
        # On a phone each box of code is scrolled by itself.
        for line in seen["cut"] if size == SIZES[0] else ():
            add(f"an example has a line that is cut off: {line!r} ...")
        found.links.setdefault(name, set()).update(seen["links"])
        found.anchors[name] = set(seen["anchors"])
    page.close()


def listen(page: Page, root: str, add: Callable[[str], None]) -> None:
    """Tells of errors on the console, and of requests that fail or leave the site."""
    page.on("console", lambda said: add(f"console: {said.text}") if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: add(f"exception: {error.message}"))
    page.on("requestfailed", lambda request: add(f"not loaded: {request.url.removeprefix(root)}"))
    page.on("request", lambda asked: None if asked.url.startswith((root, "data:")) else add(f"asks for {asked.url}"))
    page.on("response", lambda got: add(f"{got.status}: {got.url.removeprefix(root)}") if got.status >= 400 else None)


def judge_links(folder: Path, root: str, found: Found) -> None:
    """Adds the links inside the site whose file or heading does not exist."""
    for name, links in found.links.items():
        for link in sorted(links):
            address, anchor = urldefrag(link)
            if not address.startswith(root):
                continue
            target = unquote(address.removeprefix(root).partition("?")[0]) or "index.html"
            if not (folder / target).is_file():
                found.add(name, f"a link leads to {target}, which is not there")
            elif anchor and target in found.anchors and unquote(anchor) not in found.anchors[target]:
                found.add(name, f"a link leads to #{anchor} of {target}, which is not there")


def try_site(browser: Browser, root: str, found: Found) -> None:
    """Searches for a name, copies an example, and turns the lights off."""
    context = browser.new_context(viewport={"width": SIZES[0][0], "height": SIZES[0][1]})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.goto(f"{root}index.html")
    page.fill("input[name=q]", "DataParallel")
    page.press("input[name=q]", "Enter")
    page.wait_for_selector("#search-results li a[href*='api/DataParallel.html']")

    page.goto(f"{root}api/DataParallel.html")
    page.hover("article .highlight")
    page.click("article .highlight button.copybtn")
    page.wait_for_selector("button.copybtn.success")
    copied = page.evaluate("navigator.clipboard.readText()")
    if not copied.startswith("import ") or ">>>" in copied:
        found.add("api/DataParallel.html", f"the copy button copies {copied!r}")

    page.goto(f"{root}index.html")
    grounds = set()
    for _ in range(3):
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click(".content-icon-container button.theme-toggle")
    if len(grounds) != 2:
        found.add("index.html", f"the switch of dark mode makes the grounds {sorted(grounds)}")
    context.close()


def keep_shots(browser: Browser, root: str, folder: Path, size: tuple[int, int]) -> None:
    """Writes pictures of whole pages, light and dark."""
    folder.mkdir(exist_ok=True)
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    for name in SHOWN:
        page.goto(f"{root}{name}.html")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=folder / f"{name.replace('/', '-')}-{size[0]}-{scheme}.png", full_page=True)
    page.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
