"""The documentation as a site: it builds without a warning, leads nowhere in vain, loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from mediatord.cli.reference_pages import PAGES, update_page

PROJECT = Path(__file__).parents[2]
# What a browser fetches by itself, by element.
LOADED = {
    "link": "href",
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "object": "data",
    "embed": "src",
}
# Of the links of a page's head those that are fetched.
FETCHED = {"stylesheet", "icon", "shortcut icon", "preload", "prefetch", "modulepreload", "manifest", "dns-prefetch"}


class Page(HTMLParser):
    """What stands in a page: anchors, links, and what is loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if LOADED.get(tag) in found and (tag != "link" or found.get("rel", "") in FETCHED):
            self.loaded.append(found[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, as `make docs` builds them; a warning fails."""
    directory = tmp_path_factory.mktemp("site")
    options = ("-q", "-n", "-W", "--keep-going", "-b", "html", "-d", str(directory / "work"))
    command = (sys.executable, "-m", "sphinx", *options, "docs", str(directory / "html"))
    built = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    return directory / "html"


def read(site: Path) -> Iterator[tuple[Path, Page]]:
    """The pages with their paths."""
    for path in sorted(site.rglob("*.html")):
        yield path, Page(path)


@pytest.mark.exhaustive
def test_every_document_is_a_page(site: Path) -> None:
    """None is left out, and each can be reached from the first page."""
    directory = PROJECT / "docs"
    found = (path for path in directory.rglob("*") if path.suffix in {".md", ".rst"})
    documents = {path.relative_to(directory).with_suffix("").as_posix() for path in found}
    linked = {urlsplit(link).path.removesuffix(".html") for link in Page(site / "index.html").links}
    assert documents <= {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    assert documents - {"index"} <= linked


def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    """To a file, and to an anchor in it."""
    found = dict(read(site))
    missing = []
    for path, page in found.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = target.exists()
            if known and parts.fragment and target.suffix == ".html":
                known = unquote(parts.fragment) in found[target].anchors
            if not known:
                missing.append((path.name, link))
    assert missing == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """No fonts, scripts, styles or pictures of others: reading the documentation is nobody else's business."""
    elsewhere = [(path.name, one) for path, page in read(site) for one in page.loaded if urlsplit(one).netloc]
    styles = [
        (path.name, one)
        for path in site.rglob("*.css")
        for one in re.findall(r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"')\s]+)""", path.read_text("utf-8"))
    ]
    assert elsewhere + styles == []


@pytest.mark.parametrize("name", sorted(PAGES))
def test_reference_is_up_to_date(name: str) -> None:
    """Its generated parts are those of the code; `make docs-reference` writes them."""
    page = (PROJECT / "docs" / name).read_text("utf-8")
    assert update_page(name, page) == page


def test_reference_without_a_place_for_a_part() -> None:
    """It is an error, not silently left out."""
    with pytest.raises(ValueError, match="expected <!-- settings: generated -->"):
        update_page("reference/configuration.md", "# Configuration\n")
