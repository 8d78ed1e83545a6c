"""The report in a real browser without network: phone and desktop, light and dark."""

from __future__ import annotations

import email
import email.policy
from collections.abc import Iterator
from pathlib import Path

import pytest

from analytics.report.outputs import render_report
from tests.analytics.busy_day import BUSY_ROWS, make_report_data
from tests.browser import DESKTOP_LIGHT, PHONE_LIGHT, VIEWS, Browser, PageInspection, chromium

VIEW_NAMES = [view.name for view in VIEWS]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def inspect_views(browser: Browser, files: dict[str, bytes], folder: Path, name: str) -> dict[str, PageInspection]:
    """Inspections of the page by name of the view."""
    for file, content in files.items():
        (folder / file).write_bytes(content)
    inspections: dict[str, PageInspection] = {}
    for view in VIEWS:
        with browser.visit((folder / "index.html").as_uri(), view, offline=True) as visit:
            inspections[view.name] = visit.inspect(name)
    return inspections


@pytest.fixture(scope="module")
def inspections(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PageInspection]:
    return inspect_views(
        browser, render_report(make_report_data(BUSY_ROWS)), tmp_path_factory.mktemp("report"), "report"
    )


@pytest.mark.parametrize("name", VIEW_NAMES)
def test_page_renders_correctly(inspections: dict[str, PageInspection], name: str) -> None:
    inspection = inspections[name]

    assert inspection.errors == []
    assert inspection.requests == []
    assert inspection.scripts == 0
    assert inspection.overflowing == []
    assert inspection.overflow == 0
    assert inspection.texts > 1000
    assert inspection.low_contrast == []
    # Charts scale with the width of the phone.
    assert inspection.smallest_text >= (9 if name.startswith("phone") else 10)
    assert inspection.screenshots and all(
        picture.read_bytes().startswith(b"\x89PNG") for picture in inspection.screenshots
    )


def test_colour_scheme_changes_background(inspections: dict[str, PageInspection]) -> None:
    backgrounds = {name: inspections[name].background for name in VIEW_NAMES}

    assert backgrounds["phone-light"] == backgrounds["desktop-light"] == "rgb(246, 246, 243)"
    assert backgrounds["phone-dark"] == backgrounds["desktop-dark"] == "rgb(19, 22, 25)"


def test_inspection_detects_defects(browser: Browser, tmp_path: Path) -> None:
    """Faint text, overflow, a script, and an image from another origin."""
    page = b"""<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
    <body style="background: #fff; color: #eee">faint<div style="width: 2000px">wide</div>
    <img src="http://127.0.0.1:9/x.png"><script>console.log("here")</script>"""

    for inspection in inspect_views(browser, {"index.html": page}, tmp_path, "wrong").values():
        assert [text for text, _ in inspection.low_contrast] == ["faint", "wide"]
        assert inspection.overflowing and inspection.overflow > 0
        assert inspection.requests == inspection.cross_origin == ["http://127.0.0.1:9/x.png"]
        assert "here" in inspection.errors and inspection.scripts == 1


def test_first_screen_of_a_phone_says_what_to_do(browser: Browser, tmp_path: Path) -> None:
    """The verdict and the first action, on the worst day; the overview follows below all actions."""
    (tmp_path / "index.html").write_bytes(render_report(make_report_data(BUSY_ROWS))["index.html"])

    with browser.visit((tmp_path / "index.html").as_uri(), PHONE_LIGHT, offline=True) as visit:
        ends = []
        for selector in ("#verdict", ".actions li >> nth=0"):
            box = visit.page.locator(selector).bounding_box()
            assert box is not None
            ends.append(box["y"] + box["height"])

    assert ends == sorted(ends) and ends[-1] < PHONE_LIGHT.height


def test_mail_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    """Without its images; wide tables scroll."""
    message = email.message_from_bytes(
        render_report(make_report_data(BUSY_ROWS))["report.eml"], policy=email.policy.default
    )
    body = message.get_body(("html",))
    assert body is not None
    (tmp_path / "index.html").write_text(body.get_content().replace('src="cid:', 'title="'), "utf-8")

    for view in (PHONE_LIGHT, DESKTOP_LIGHT):
        with browser.visit((tmp_path / "index.html").as_uri(), view, offline=True) as visit:
            inspection = visit.inspect("mail")
        assert not (inspection.errors or inspection.requests or inspection.low_contrast or inspection.overflow)
        assert inspection.smallest_text >= 12
