"""The documentation in a real Chromium, without a network: on a phone and on a desktop, in light and in dark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import DESKTOP_DARK, PHONE_LIGHT, VIEWS, Browser, Viewport, chromium

PROJECT = Path(__file__).parents[2]
PICTURE = "img[src$='architecture.svg']"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "sphinx", "-q", "-b", "html", "docs", str(directory))
    subprocess.run(command, cwd=PROJECT, timeout=600, check=True)
    return directory


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
@pytest.mark.parametrize("page", ["index", "reference/configuration", "explanation/architecture", "how-to/embed"])
def test_it_looks_right(browser: Browser, site: Path, page: str, view: Viewport) -> None:
    """No page is wider than its window, too faint to read, or asks for anything that is not beside it."""
    with browser.visit((site / f"{page}.html").as_uri(), view, offline=True) as visit:
        look = visit.inspect(f"docs-{page}")

    assert look.errors == []
    assert [request for request in look.requests if not request.startswith(site.as_uri())] == []
    assert look.overflow == 0
    assert look.low_contrast == []
    assert look.texts > 20


@pytest.mark.parametrize("view", [PHONE_LIGHT, DESKTOP_DARK], ids=lambda view: view.name)
def test_the_picture_goes_by_the_theme(browser: Browser, site: Path, view: Viewport) -> None:
    """Which may be another one than that of the system; the picture changes with it."""
    with browser.visit((site / "explanation/architecture.html").as_uri(), view, offline=True) as visit:
        visit.page.add_style_tag(content=f"{PICTURE} {{ background: gray }}")
        drawn = []
        for theme in ("light", "dark"):
            visit.page.evaluate("theme => { document.body.dataset.theme = theme }", theme)
            drawn.append(visit.page.locator(PICTURE).screenshot())

    assert drawn[0] != drawn[1]
