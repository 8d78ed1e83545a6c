"""
Opens pages in a real Chromium, at phone and desktop size, in light and dark mode.

::

    with chromium() as browser, browser.visit(url, PHONE_DARK) as visit:
        inspection = visit.inspect("invitation")
        assert not inspection.errors and not inspection.cross_origin and not inspection.low_contrast
        visit.page.get_by_role("link", name="Open").click()

Screenshots are left in `var/screenshots`. While a browser is open an asyncio loop runs in the thread, so close it by
the end of the module.
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
# A screenshot must not exceed the size of a GPU texture.
_SCREENSHOT_HEIGHT = 4000
# Milliseconds; generous, for busy machines.
_TIMEOUT = 120_000
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
    """Window size in CSS pixels, and color scheme."""

    device: str
    width: int
    height: int
    scheme: Literal["light", "dark"]

    @property
    def name(self) -> str:
        """Name for files and test ids, such as `phone-dark`."""
        return f"{self.device}-{self.scheme}"


PHONE_LIGHT, PHONE_DARK = Viewport("phone", 360, 800, "light"), Viewport("phone", 360, 800, "dark")
DESKTOP_LIGHT, DESKTOP_DARK = Viewport("desktop", 1280, 900, "light"), Viewport("desktop", 1280, 900, "dark")
VIEWS = (PHONE_LIGHT, PHONE_DARK, DESKTOP_LIGHT, DESKTOP_DARK)
# For `pytest.mark.parametrize`: `make test` checks a page in one view, `make test-all` in all.
VIEW_PARAMETERS = [
    pytest.param(view, id=view.name, marks=() if view is PHONE_LIGHT else pytest.mark.exhaustive) for view in VIEWS
]


@dataclass(frozen=True, slots=True)
class PageInspection:
    """
    Result of inspecting a page.

    :ivar errors: console messages, script errors and dialogs.
    :ivar requests: URLs that were requested besides the page.
    :ivar cross_origin: those of them with another origin.
    :ivar scripts: number of script elements in the page.
    :ivar overflowing: elements that extend beyond the right edge, except those of class `scroll` and those that
        scroll.
    :ivar overflow: CSS pixels by which the page is wider than the window.
    :ivar texts: number of visible text nodes.
    :ivar low_contrast: texts with less contrast than WCAG 2.2 requires (1.4.3, AA), with their contrast.
    :ivar smallest_text: height in CSS pixels of the smallest text.
    :ivar background: background color of the page, as `rgb(255, 255, 255)`.
    :ivar screenshots: files, from the top of the page to its end.
    """

    errors: list[str]
    requests: list[str]
    cross_origin: list[str]
    scripts: int
    overflowing: list[str]
    overflow: float
    texts: int
    low_contrast: list[tuple[str, float]]
    smallest_text: float
    background: str
    screenshots: list[Path]


@dataclass(slots=True)
class PageVisit:
    """
    An open page.

    :ivar page: Playwright's page, to click and read.
    :ivar response: response to the request for the page; None for a file.
    """

    page: Page
    view: Viewport
    response: Response | None = None
    _errors: list[str] = field(default_factory=list)
    _requests: list[str] = field(default_factory=list)

    def inspect(self, name: str) -> PageInspection:
        """
        Inspect the page as it is now.

        :param name: file name prefix of the screenshots; the name of the view is appended.
        """
        values: dict[str, Any] = self.page.evaluate(_INSPECTION.read_text("utf-8"))
        page_url = urlsplit(self.page.url)
        requests = [url for url in self._requests if url != self.page.url and not url.startswith("data:")]
        return PageInspection(
            errors=list(self._errors),
            requests=requests,
            cross_origin=[url for url in requests if urlsplit(url)[:2] != page_url[:2]],
            low_contrast=[(each["text"], each["contrast"]) for each in values.pop("lowContrast")],
            screenshots=list(self._take_screenshots(f"{name}-{self.view.name}")),
            **values,
        )

    def _take_screenshots(self, name: str) -> Iterator[Path]:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        height = self.page.evaluate("document.documentElement.scrollHeight")
        for part, top in enumerate(range(0, height, _SCREENSHOT_HEIGHT)):
            path = SCREENSHOTS / f"{name}-{part}.png"
            self.page.screenshot(
                path=path,
                full_page=True,
                clip={"x": 0, "y": top, "width": self.view.width, "height": min(_SCREENSHOT_HEIGHT, height - top)},
            )
            yield path

    def record_events(self) -> None:
        """Record errors and requests of the page from now on."""

        def dismiss(dialog: Dialog) -> None:
            self._errors.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        self.page.on("console", lambda message: self._errors.append(message.text))
        self.page.on("pageerror", lambda error: self._errors.append(str(error)))
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
        Open a page in a new browser context.

        :param javascript: whether scripts of the page run.
        :param credentials: user name and password for HTTP authentication.
        :param offline: without network; for files.
        :param headers: sent with every request.
        """
        http_credentials: HttpCredentials | None = None
        if credentials is not None:
            http_credentials = {"username": credentials[0], "password": credentials[1]}
        context = self._browser.new_context(
            viewport={"width": view.width, "height": view.height},
            color_scheme=view.scheme,
            java_script_enabled=javascript,
            http_credentials=http_credentials,
            offline=offline,
            extra_http_headers=headers,
        )
        context.set_default_timeout(_TIMEOUT)
        try:
            visit = PageVisit(context.new_page(), view)
            visit.record_events()
            visit.response = visit.page.goto(url, wait_until="load")
            yield visit
        finally:
            context.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium, from the machine or from `.debs`; skips the test if there is none."""
    executable = find_program("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_ARGUMENTS), timeout=_TIMEOUT)
        try:
            yield Browser(browser)
        finally:
            browser.close()
