"""
Step reports and transports of the drivers.

A driver runs in the virtual environment of a third-party library and must not import mediatord; it reports JSON
lines on standard output, one object per step: ``{"theme", "name", "ok", "detail"}``.
"""

from __future__ import annotations

import json
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

ENCRYPTED = "application/didcomm-encrypted+json"

# Name of the last step of a theme.
END = "end"

# Time-out of a request or an expected frame.
TIMEOUT_SECONDS = 120


class Steps:
    """Steps of one theme, printed as they happen."""

    def __init__(self, theme: str) -> None:
        self.theme = theme

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """Report `name` as done or failed; the block may put details into the dict."""
        detail: dict[str, Any] = {}
        try:
            yield detail
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            detail["error"] = f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
            self._report(name, False, detail)
            raise
        self._report(name, True, detail)

    def _report(self, name: str, ok: bool, detail: dict[str, Any]) -> None:
        print(json.dumps({"theme": self.theme, "name": name, "ok": ok, "detail": detail}, default=str), flush=True)


Theme = Callable[[Steps], Awaitable[None]]


async def run_themes(themes: dict[str, Theme], names: Sequence[str]) -> None:
    """Run themes to their last step or first failure; the others continue."""
    for name in names:
        steps, theme = Steps(name), themes[name]
        try:
            await theme(steps)
        except Exception:
            traceback.print_exc(file=sys.stderr)
        else:
            with steps.step(END):
                pass


@dataclass(frozen=True)
class Response:
    """An HTTP response: status, media type as sent, body."""

    status: int
    media_type: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def get(url: str, accept: str = "application/json") -> Response:
    """Fetch `url`."""
    return _send(urllib.request.Request(url, headers={"Accept": accept}))


def post(url: str, packed: str | bytes, media_type: str = ENCRYPTED) -> Response:
    """Send one envelope; error statuses are returned as well."""
    body = packed if isinstance(packed, bytes) else packed.encode()
    return _send(urllib.request.Request(url, data=body, headers={"Content-Type": media_type}, method="POST"))


def _send(request: urllib.request.Request) -> Response:
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            return Response(response.status, response.headers.get("Content-Type", ""), response.read())
    except urllib.error.HTTPError as error:
        return Response(error.code, error.headers.get("Content-Type", ""), error.read())


def socket(url: str) -> connect:
    """A WebSocket to `url`, with the extensions that the `websockets` package offers by default."""
    return connect(url, open_timeout=TIMEOUT_SECONDS)


__all__ = ["Response", "ClientConnection", "Steps", "Theme", "get", "post", "run_themes", "socket"]
