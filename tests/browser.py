"""
Pages in a real Chromium: how they look on a phone and on a desktop, in light and in dark.

::

    with chromium() as browser, browser.visit(url, PHONE_DARK) as visit:
        look = visit.look("invitation")
        assert not look.complaints and not look.elsewhere and not look.faint
        visit.page.get_by_role("link", name="Open").click()

Screenshots are left in `var/screenshots` to be looked at. While a browser is open an asyncio loop runs in the thread,
so close it at the end of the module at the latest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser as PlaywrightBrowser
from playwright.sync_api import Dialog, HttpCredentials, Page, Response, sync_playwright

from tests.external_programs import find_program

SCREENSHOTS = Path(__file__).parents[1] / "var" / "screenshots"
_INSPECTION = Path(__file__).with_name("browser_inspection.js")
# A picture may not be higher than a texture.
_PIECE = 4000
# Milliseconds: a busy machine takes its time.
_PATIENCE = 120_000
_ARGUMENTS = (
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-pings",
)


@dataclass(frozen=True, slots=True)
class Viewport:
    """What somebody looks with; sizes in CSS pixels."""

    device: str
    width: int
    height: int
    scheme: Literal["light", "dark"]

    @property
    def name(self) -> str:
        """For files and tests, as `phone-dark`."""
        return f"{self.device}-{self.scheme}"


PHONE_LIGHT, PHONE_DARK = Viewport("phone", 360, 800, "light"), Viewport("phone", 360, 800, "dark")
DESKTOP_LIGHT, DESKTOP_DARK = Viewport("desktop", 1280, 900, "light"), Viewport("desktop", 1280, 900, "dark")
VIEWS = (PHONE_LIGHT, PHONE_DARK, DESKTOP_LIGHT, DESKTOP_DARK)
# For `pytest.mark.parametrize`: `make test` looks at a page once, `make test-all` in every way.
VIEW_PARAMETERS = [
    pytest.param(view, id=view.name, marks=() if view is PHONE_LIGHT else pytest.mark.exhaustive) for view in VIEWS
]


@dataclass(frozen=True, slots=True)
class PageInspection:
    """
    What there is to say about a page.

    :ivar complaints: of the console, of scripts that failed, and dialogs.
    :ivar requests: URLs of all that was asked for besides the page; `elsewhere`: those to other origins.
    :ivar scripts: elements in the page.
    :ivar wide: elements that stick out of the page on the right, unless in one of the class `scroll` or that scrolls.
    :ivar overflow: by how many CSS pixels the page is wider than the window.
    :ivar texts: pieces of visible text.
    :ivar faint: of these, whose contrast is less than WCAG 2.2 (1.4.3, AA) asks for, with the contrast.
    :ivar smallest_text: height in CSS pixels of the smallest.
    :ivar background: of the page, as `rgb(255, 255, 255)`.
    :ivar pictures: files, from the top of the page to its end.
    """

    complaints: list[str]
    requests: list[str]
    elsewhere: list[str]
    scripts: int
    wide: list[str]
    overflow: float
    texts: int
    faint: list[tuple[str, float]]
    smallest_text: float
    background: str
    pictures: list[Path]


@dataclass(slots=True)
class PageVisit:
    """
    A page that is open.

    :ivar page: Playwright's, to click and to read.
    :ivar response: the answer to the page itself; None for a file.
    """

    page: Page
    view: Viewport
    response: Response | None = None
    _complaints: list[str] = field(default_factory=list)
    _requests: list[str] = field(default_factory=list)

    def look(self, name: str) -> PageInspection:
        """
        What there is to say about it now.

        :param name: of its pictures, besides that of the view.
        """
        found: dict[str, Any] = self.page.evaluate(_INSPECTION.read_text("utf-8"))
        own = urlsplit(self.page.url)
        others = [url for url in self._requests if url != self.page.url and not url.startswith("data:")]
        return PageInspection(
            complaints=list(self._complaints),
            requests=others,
            elsewhere=[url for url in others if urlsplit(url)[:2] != own[:2]],
            faint=[(each["text"], each["contrast"]) for each in found.pop("faint")],
            pictures=list(self._pictures(f"{name}-{self.view.name}")),
            **found,
        )

    def _pictures(self, name: str) -> Iterator[Path]:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        height = self.page.evaluate("document.documentElement.scrollHeight")
        for part, top in enumerate(range(0, height, _PIECE)):
            path = SCREENSHOTS / f"{name}-{part}.png"
            self.page.screenshot(
                path=path,
                full_page=True,
                clip={"x": 0, "y": top, "width": self.view.width, "height": min(_PIECE, height - top)},
            )
            yield path

    def listen(self) -> None:
        """Note from now on what the page complains about and asks for."""

        def dismiss(dialog: Dialog) -> None:
            self._complaints.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        self.page.on("console", lambda message: self._complaints.append(message.text))
        self.page.on("pageerror", lambda error: self._complaints.append(str(error)))
        self.page.on("dialog", dismiss)
        self.page.on("request", lambda request: self._requests.append(request.url))


class Browser:
    """A running Chromium."""

    def __init__(self, browser: PlaywrightBrowser) -> None:
        self._browser = browser

    @contextmanager
    def visit(
        self,
        url: str,
        view: Viewport = DESKTOP_LIGHT,
        *,
        javascript: bool = True,
        credentials: tuple[str, str] | None = None,
        offline: bool = False,
        headers: dict[str, str] | None = None,
    ) -> Iterator[PageVisit]:
        """
        Open a page as somebody who was never there before.

        :param javascript: whether scripts of the page run.
        :param credentials: name and password, for when the server asks.
        :param offline: without any network; for files.
        :param headers: sent with every request.
        """
        asked: HttpCredentials | None = None
        if credentials is not None:
            asked = {"username": credentials[0], "password": credentials[1]}
        context = self._browser.new_context(
            viewport={"width": view.width, "height": view.height},
            color_scheme=view.scheme,
            java_script_enabled=javascript,
            http_credentials=asked,
            offline=offline,
            extra_http_headers=headers,
        )
        context.set_default_timeout(_PATIENCE)
        try:
            visit = PageVisit(context.new_page(), view)
            visit.listen()
            visit.response = visit.page.goto(url, wait_until="load")
            yield visit
        finally:
            context.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window; the machine's Chromium or the one that was fetched. Skips the test without one."""
    executable = find_program("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_ARGUMENTS), timeout=_PATIENCE)
        try:
            yield Browser(browser)
        finally:
            browser.close()
