"""The invitation page of a running mediator in a real Chromium: on phone and desktop, light and dark, no scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import numpy as np
import pytest
import zxingcpp
from PIL import Image

from mediatord.protocol import encoding
from tests.browser import DESKTOP_LIGHT, PHONE_DARK, PHONE_LIGHT, VIEW_PARAMETERS, Browser, Viewport, chromium
from tests.integration.daemon import Daemon


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Daemon() as daemon:
        yield daemon.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def text(url: str) -> str:
    with urlopen(url) as response:
        return str(response.read().decode())


def short_url(url: str) -> str:
    return f"{url}/oob?_oobid={json.loads(text(f'{url}/invitation'))['id']}"


def qr_codes(picture: Path) -> list[str]:
    """What a camera would read."""
    with Image.open(picture) as image:
        return [found.text for found in zxingcpp.read_barcodes(image)]


@pytest.mark.parametrize("view", VIEW_PARAMETERS)
@pytest.mark.parametrize("javascript", [True, False], ids=["scripts", "no-scripts"])
def test_it_looks_right(browser: Browser, url: str, view: Viewport, javascript: bool) -> None:
    """It fits, can be read, loads nothing, and the QR code of the screenshot is the short URL."""
    with browser.visit(f"{url}/invitation", view, javascript=javascript) as visit:
        look = visit.look("invitation" if javascript else "invitation-no-scripts")

        assert look.complaints == []
        assert look.requests == []
        assert look.scripts == 0
        assert look.wide == [] and look.overflow == 0
        assert look.texts > 10 and look.faint == []
        assert look.smallest_text >= 13
        assert qr_codes(look.pictures[0]) == [short_url(url)]


def test_dark_is_dark(browser: Browser, url: str) -> None:
    """And the code is dark on light in both, with a light margin of four modules."""
    backgrounds = []
    for view in (PHONE_LIGHT, PHONE_DARK):
        with browser.visit(f"{url}/invitation", view) as visit:
            backgrounds.append(visit.look("invitation-scheme").background)
            picture = visit.page.locator(".qr svg").screenshot()
            side = int(str(visit.page.locator(".qr svg").get_attribute("viewBox")).split()[2])
        assert_quiet_zone(picture, side)
    assert backgrounds == ["rgb(244, 246, 247)", "rgb(16, 20, 24)"]


def assert_quiet_zone(picture: bytes, modules: int) -> None:
    """:param modules: of the side of the code with its margin."""
    with Image.open(BytesIO(picture)) as opened:
        image = opened.convert("L")
    module = image.width / modules
    # Its corners may be those of the box, which are round.
    margin = image.crop((int(2 * module), int(module), image.width - int(2 * module), int(3.5 * module)))
    assert np.asarray(margin).min() > 250


def test_the_button_opens_a_wallet(browser: Browser, url: str) -> None:
    """It is the first link, big enough for a thumb, and contains the invitation by the scheme of wallets."""
    with browser.visit(f"{url}/invitation", PHONE_LIGHT) as visit:
        button = visit.page.get_by_role("link", name="Open in your wallet")
        target = urlsplit(str(button.get_attribute("href")))
        box = button.bounding_box()
        assert box is not None and box["height"] >= 48 and box["width"] >= 200
        # Without scrolling.
        assert box["y"] + box["height"] <= PHONE_LIGHT.height
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.className") == "button"
        assert visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"

    assert (target.scheme, target.netloc, target.path) == ("didcomm", "", "")
    assert parse_qs(target.query) == parse_qs(urlsplit(text(f"{url}/invitationOOB")).query)
    (oob,) = parse_qs(target.query)["_oob"]
    assert encoding.loads_object(encoding.decode_base64url(oob))["from"] == text(f"{url}/did")


def test_it_says_what_is_where(browser: Browser, url: str) -> None:
    """For who cannot see it: a language, one heading above the others, landmarks, a name for the code."""
    with browser.visit(f"{url}/invitation", DESKTOP_LIGHT, javascript=False) as visit:
        page = visit.page
        assert page.locator("html").get_attribute("lang") == "en"
        assert page.get_by_role("heading", level=1).count() == 1
        assert page.get_by_role("heading", level=2).count() == 4
        assert page.get_by_role("main").count() == 1
        assert page.get_by_role("img", name="QR code with the invitation of this mediator").count() == 1
        page.get_by_text("Invitation link", exact=True).click()
        shown = page.get_by_role("region", name="Invitation link", exact=True)
        assert shown.inner_text() == short_url(url)
        page.get_by_text("Long invitation link", exact=True).click()
        assert page.get_by_role("region", name="Long invitation link").inner_text() == text(f"{url}/invitationOOB")
        page.get_by_text("DID of the mediator", exact=True).click()
        assert page.get_by_role("region", name="DID of the mediator").inner_text() == text(f"{url}/did")
        assert visit.look("invitation-open").faint == []


def test_the_link_is_the_page(browser: Browser, url: str) -> None:
    """Who opens what the QR code says in a browser sees the page, under a policy that allows its style alone."""
    with browser.visit(short_url(url), PHONE_LIGHT) as visit:
        assert visit.response is not None
        policy = visit.response.headers["content-security-policy"]
        assert visit.page.get_by_role("link", name="Open in your wallet").is_visible()
        visit.page.get_by_role("link", name="web link").click()
        assert visit.page.url == short_url(url)
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("text/html,application/xhtml+xml,*/*;q=0.8", "text/html"),
        ("application/json", "application/json"),
        ("*/*", "application/json"),
    ],
)
def test_programs_get_json(url: str, accept: str, kind: str) -> None:
    for path in (f"{url}/invitation", short_url(url)):
        with urlopen(Request(path, headers={"Accept": accept})) as response:
            assert response.headers.get_content_type() == kind
            assert response.headers["Vary"] == "Accept"
