"""The report in a real Chromium, without a network: on a phone and on a desktop, in light and in dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from analytics.report.outputs import render_report
from tests.analytics.busy_day import BUSY, known
from tests.browser import VIEWS, Browser, PageInspection, chromium

LOOKS = [view.name for view in VIEWS]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def looks(browser: Browser, files: dict[str, bytes], folder: Path, name: str) -> dict[str, PageInspection]:
    """What there is to say about the page, by the name of the view."""
    for file, content in files.items():
        (folder / file).write_bytes(content)
    found: dict[str, PageInspection] = {}
    for view in VIEWS:
        with browser.visit((folder / "index.html").as_uri(), view, offline=True) as visit:
            found[view.name] = visit.inspect(name)
    return found


@pytest.fixture(scope="module")
def found(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PageInspection]:
    return looks(browser, render_report(known(BUSY)), tmp_path_factory.mktemp("report"), "report")


@pytest.mark.parametrize("name", LOOKS)
def test_it_looks_right(found: dict[str, PageInspection], name: str) -> None:
    look = found[name]

    assert look.errors == []
    assert look.requests == []
    assert look.scripts == 0
    assert look.overflowing == []
    assert look.overflow == 0
    assert look.texts > 1000
    assert look.low_contrast == []
    # Charts become as small as the narrowest phone is.
    assert look.smallest_text >= (9 if name.startswith("phone") else 10)
    assert look.screenshots and all(picture.read_bytes().startswith(b"\x89PNG") for picture in look.screenshots)


def test_light_and_dark_differ(found: dict[str, PageInspection]) -> None:
    backgrounds = {name: found[name].background for name in LOOKS}

    assert backgrounds["phone-light"] == backgrounds["desktop-light"] == "rgb(246, 246, 243)"
    assert backgrounds["phone-dark"] == backgrounds["desktop-dark"] == "rgb(19, 22, 25)"


def test_the_browser_sees_what_is_wrong(browser: Browser, tmp_path: Path) -> None:
    """Faint text, a table wider than the page, a script and a picture from elsewhere: none goes unnoticed."""
    page = b"""<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
    <body style="background: #fff; color: #eee">faint<div style="width: 2000px">wide</div>
    <img src="http://127.0.0.1:9/x.png"><script>console.log("here")</script>"""

    for look in looks(browser, {"index.html": page}, tmp_path, "wrong").values():
        assert [text for text, _ in look.low_contrast] == ["faint", "wide"]
        assert look.overflowing and look.overflow > 0
        assert look.requests == look.cross_origin == ["http://127.0.0.1:9/x.png"]
        assert "here" in look.errors and look.scripts == 1
