"""
Reading the head of a request that could not be plainer: one exact request line, no header but those of a short list,
each once, a length in digits. Nothing is interpreted here that two parsers could understand in two ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from mediatord.journal import Half
from mediatord.synthetic import HEADER
from mediatord.web.posting import half_by_label

MAX_HEAD = 8192

_MESSAGE, _EITHER = b"POST /didcomm HTTP/1.1", b"POST / HTTP/1.1"
# What is looked at.
_TOKEN = HEADER.encode("ascii")
_READ = (b"host", b"content-type", b"content-length", b"connection", b"x-forwarded-for", _TOKEN)
# What changes nothing about how a body is taken: what HTTP libraries send by themselves, what browsers add to the
# requests of a page, and what proxies tell.
_IGNORED = (
    *(b"user-agent", b"accept", b"accept-encoding", b"accept-language", b"cache-control", b"pragma", b"priority"),
    *(b"origin", b"referer", b"dnt", b"sec-gpc", b"sec-ch-ua", b"sec-ch-ua-mobile", b"sec-ch-ua-platform"),
    *(b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site", b"sec-fetch-storage-access"),
    *(b"x-real-ip", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port"),
)
_HEADERS = frozenset((*_READ, *_IGNORED))
_KEEP = (b"", b"keep-alive")
_LONGEST_LENGTH = 9


# Longer heads are read anew each time, so that idle connections hold little.
_LONGEST_KEPT = 512
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*(?=\r\n|$)", re.IGNORECASE)


class Head(NamedTuple):
    """
    What is needed of the head of a plain request.

    :param half: whom the body is for.
    :param token: what the daemon's own requests are known by.
    """

    half: Half
    length: int
    content_type: bytes
    forwarded_for: str | None
    token: bytes | None


class Heads:
    """
    Reads the heads of one connection. Those of a client differ in nothing but the length, as a rule; then only that
    is read.

    :param read: reads one that is like no other.
    """

    __slots__ = ("_after", "_before", "_like", "_read")

    def __init__(self, read: Callable[[bytes], Head | None] | None = None) -> None:
        self._read = read or read_head
        self._like: Head | None = None
        self._before = self._after = b""

    def read(self, head: bytes) -> Head | None:
        """As :func:`read_head`."""
        like = self._like
        if like is not None and head.startswith(self._before) and head.endswith(self._after):
            digits = head[len(self._before) : len(head) - len(self._after)]
            if digits.isdigit() and len(digits) <= _LONGEST_LENGTH:
                return Head(like.half, int(digits), like.content_type, like.forwarded_for, like.token)
        found = self._read(head)
        self._keep(head, found)
        return found

    def _keep(self, head: bytes, found: Head | None) -> None:
        place = _LENGTH.search(head) if found is not None and len(head) <= _LONGEST_KEPT else None
        if place is None:
            self._like = None
        else:
            self._like, self._before, self._after = found, head[: place.start(1)], head[place.end(1) :]


def read_head(head: bytes) -> Head | None:
    """
    A plain head, or None for any other.

    :param head: up to the empty line, without it.
    """
    request_line, *lines = head.split(b"\r\n")
    if request_line not in (_MESSAGE, _EITHER):
        return None
    # A bare CR, LF or NUL is where parsers begin to differ.
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head or not head.isascii():
        return None
    headers = _read_headers(lines)
    if headers is None or b"host" not in headers or headers.get(b"connection", b"").lower() not in _KEEP:
        return None
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or len(length) > _LONGEST_LENGTH:
        return None
    content_type = headers.get(b"content-type", b"")
    half: Half = "didcomm" if request_line == _MESSAGE else half_by_label(content_type)
    forwarded = headers.get(b"x-forwarded-for")
    claimed = None if forwarded is None else forwarded.decode("ascii")
    return Head(half, int(length), content_type, claimed, headers.get(_TOKEN))


def _read_headers(lines: list[bytes]) -> dict[bytes, bytes] | None:
    """Values by lower-case name; None if there is a name that is not known, or one twice."""
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        name = name.lower()
        if not colon or name not in _HEADERS or name in headers:
            return None
        headers[name] = value.strip(b" \t")
    return headers
