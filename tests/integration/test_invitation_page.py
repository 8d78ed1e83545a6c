"""The invitation page in a real Chromium: phone and desktop, light and dark, with and without scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

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
    """Texts of the QR codes in a screenshot."""
    with Image.open(picture) as image:
        return [codes.text for codes in zxingcpp.read_barcodes(image)]


@pytest.mark.parametrize("view", VIEW_PARAMETERS)
@pytest.mark.parametrize("javascript", [True, False], ids=["scripts", "no-scripts"])
def test_page_fits_and_is_readable(browser: Browser, url: str, view: Viewport, javascript: bool) -> None:
    """It fits, is readable and loads nothing; the QR codes in the screenshot are the short URLs of both versions."""
    with browser.visit(f"{url}/invitation", view, javascript=javascript) as visit:
        inspection = visit.inspect("invitation" if javascript else "invitation-no-scripts")

        assert inspection.errors == []
        assert inspection.requests == []
        assert inspection.scripts == 0
        assert inspection.overflowing == [] and inspection.overflow == 0
        assert inspection.texts > 10 and inspection.low_contrast == []
        assert inspection.smallest_text >= 13
        assert qr_codes(inspection.screenshots[0]) == [short_url(url), f"{url}/invitation/v1"]


def test_dark_mode_keeps_qr_code_light(browser: Browser, url: str) -> None:
    """The page is dark; the code stays dark on light with a margin of four modules."""
    backgrounds = []
    for view in (PHONE_LIGHT, PHONE_DARK):
        with browser.visit(f"{url}/invitation", view) as visit:
            backgrounds.append(visit.inspect("invitation-scheme").background)
            codes = visit.page.locator(".qr svg").all()
            pictures = [(code.screenshot(), str(code.get_attribute("viewBox")).split()[2]) for code in codes]
        assert len(pictures) == 2
        for picture, side in pictures:
            assert_quiet_zone(picture, int(side))
    assert backgrounds == ["rgb(244, 246, 247)", "rgb(16, 20, 24)"]


def assert_quiet_zone(picture: bytes, modules: int) -> None:
    """:param modules: modules on a side of the code, margin included."""
    with Image.open(BytesIO(picture)) as opened:
        image = opened.convert("L")
    module = image.width / modules
    # Skip the corners, which the box rounds off.
    margin = image.crop((int(2 * module), int(module), image.width - int(2 * module), int(3.5 * module)))
    assert np.asarray(margin).min() > 250


def test_button_links_to_wallet_scheme(browser: Browser, url: str) -> None:
    """It is the first link, big enough to tap, and contains the invitation under the wallets' URI scheme."""
    with browser.visit(f"{url}/invitation", PHONE_LIGHT) as visit:
        button = visit.page.get_by_role("link", name="Open in your wallet")
        target = urlsplit(str(button.get_attribute("href")))
        box = button.bounding_box()
        assert box is not None and box["height"] >= 48 and box["width"] >= 200
        # Visible without scrolling.
        assert box["y"] + box["height"] <= PHONE_LIGHT.height
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.className") == "button"
        assert visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"

    assert (target.scheme, target.netloc, target.path) == ("didcomm", "", "")
    assert parse_qs(target.query) == parse_qs(urlsplit(text(f"{url}/invitationOOB")).query)
    (oob,) = parse_qs(target.query)["_oob"]
    assert encoding.loads_object(encoding.decode_base64url(oob))["from"] == text(f"{url}/did")


def test_links_of_v1(browser: Browser, url: str) -> None:
    """Button and link contain the invitations of DIDComm v1; the short one leads a browser to the page."""
    served = json.loads(text(f"{url}/invitation/v1"))
    with browser.visit(f"{url}/invitation/v1", PHONE_LIGHT) as visit:
        page = visit.page
        target = urlsplit(str(page.get_by_role("link", name="Open in your v1 wallet").get_attribute("href")))
        (oob,) = parse_qs(target.query)["oob"]
        assert encoding.loads_object(encoding.decode_base64url(oob)) == served
        page.get_by_text("Invitation link for DIDComm v1", exact=True).click()
        shown = page.get_by_role("region", name="Invitation link for DIDComm v1", exact=True).inner_text()
        assert parse_qs(urlsplit(shown).query) == parse_qs(target.query)
        page.get_by_role("link", name="Connections 1.0 invitation").click()
        (c_i,) = parse_qs(urlsplit(page.url).query)["c_i"]
        assert encoding.loads_object(encoding.decode_base64url(c_i))["@id"] == served["@id"]
        assert page.get_by_role("link", name="Open in your v1 wallet").is_visible()


def test_page_is_accessible(browser: Browser, url: str) -> None:
    """It has a language, one main heading, landmarks and a name for the code."""
    with browser.visit(f"{url}/invitation", DESKTOP_LIGHT, javascript=False) as visit:
        page = visit.page
        assert page.locator("html").get_attribute("lang") == "en"
        assert page.get_by_role("heading", level=1).count() == 1
        assert page.get_by_role("heading", level=2).count() == 7
        assert page.get_by_role("main").count() == 1
        assert page.get_by_role("img", name="QR code with the invitation of this mediator").count() == 1
        page.get_by_text("Invitation link", exact=True).click()
        shown = page.get_by_role("region", name="Invitation link", exact=True)
        assert shown.inner_text() == short_url(url)
        page.get_by_text("Long invitation link", exact=True).click()
        assert page.get_by_role("region", name="Long invitation link").inner_text() == text(f"{url}/invitationOOB")
        page.get_by_text("DID of the mediator", exact=True).click()
        assert page.get_by_role("region", name="DID of the mediator").inner_text() == text(f"{url}/did")
        assert visit.inspect("invitation-open").low_contrast == []


def test_short_url_shows_the_page(browser: Browser, url: str) -> None:
    """The URL of the QR code shows the page in a browser; its policy allows only its own style."""
    with browser.visit(short_url(url), PHONE_LIGHT) as visit:
        assert visit.response is not None
        policy = visit.response.headers["content-security-policy"]
        assert visit.page.get_by_role("link", name="Open in your wallet").is_visible()
        visit.page.get_by_role("link", name="web link").click()
        assert visit.page.url == short_url(url)
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
