"""Endpoint strings of Twisted, taken apart as Twisted does it, to look at them without listening on them."""

from __future__ import annotations

import re

# Before an endpoint string: the first line of each connection is that of a proxy, about its client.
PROXIED = "haproxy:"


def take_apart(endpoint: str) -> tuple[str, list[str], dict[str, str]]:
    """
    Its kind, such as `tcp`, the arguments without names, and those with.

    Its kind is `haproxy` where that is before another. A backslash has what follows it meant as it is.
    """
    kind, *arguments = re.split(r"(?<!\\):", endpoint)
    given: list[str] = []
    named: dict[str, str] = {}
    for argument in arguments:
        name, *value = re.split(r"(?<!\\)=", argument, maxsplit=1)
        if value:
            named[name] = _plain(value[0])
        else:
            given.append(_plain(argument))
    return kind, given, named


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
