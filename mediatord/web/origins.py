"""Which pages may open WebSockets, by the origin that their browser names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from twisted.web.http_headers import Headers

# The second is what the first was called in drafts of the protocol, which clients may still speak.
_HEADERS = (b"Origin", b"Sec-WebSocket-Origin")


class AllowedOrigins:
    """
    The origins that are allowed. What names none is no page, and may open a WebSocket as well.

    :param patterns: as `https://app.example`, with `*` for any part of the host or for any port; `*` alone is every
        origin, also `null`, which browsers send for a page that has none.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.allow(patterns)

    def allow(self, patterns: Iterable[str]) -> None:
        """Allow these from now on, and no others; WebSockets that are open stay open."""
        patterns = tuple(patterns)
        self._pattern = None if "*" in patterns else re.compile("|".join(map(_expression, patterns)), re.IGNORECASE)

    def take_from(self, headers: Headers) -> bool:
        """
        Whether the origins in the headers of a handshake are allowed; they are removed.

        Autobahn would refuse some that it cannot take apart, and every `null`.
        """
        named = [value for name in _HEADERS for value in headers.getRawHeaders(name, ())]
        for name in _HEADERS:
            headers.removeHeader(name)
        return self._pattern is None or all(self._pattern.fullmatch(one.decode("latin-1").strip()) for one in named)


def _expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"[^/:]*")
