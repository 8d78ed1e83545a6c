"""Feature queries, compared with a simple implementation."""

from __future__ import annotations

import json
from collections.abc import Iterable

from mediatord.didcomm.utility_protocols import parse_queries, select_features
from mediatord.errors import InvalidBody
from mediatord.protocol import encoding
from tests.push.registries import make_registry

_DEVICES = make_registry(None, None)
_ALL = [{"feature-type": kind, "match": "*"} for kind in ("protocol", "header", "goal-code", "constraint")]


class FeaturesTarget:
    """The body of a feature query."""

    words = (b"*", b"**", b"(a+)+$", b"https://didcomm.org/", b"routing", b"/2.0", b"[", b"?", b".*", b"\\", b"*o*")
    longest = 8_192
    most_calls = (5_000, 20)
    most_memory = (500_000, 100)

    def close(self) -> None:
        """No-op."""

    def run(self, data: bytes) -> None:
        """The disclosed features are those that match, each once."""
        try:
            queries = parse_queries(encoding.loads_object(data[1:]))
        except (InvalidBody, ValueError):
            return
        found = [(feature["feature-type"], feature["id"]) for feature in select_features(queries, 1000, _DEVICES)]
        everything = select_features(parse_queries({"queries": _ALL}), 1000, _DEVICES)
        expected = [
            (feature["feature-type"], feature["id"])
            for feature in everything
            if any(kind == feature["feature-type"] and matches(match, feature["id"]) for kind, match in queries)
        ]
        assert found == expected, f"{found} instead of {expected}"

    def seeds(self) -> Iterable[bytes]:
        """Queries of every kind."""
        for matches_ in (
            ["*"],
            ["https://didcomm.org/*"],
            ["*ro*/2.*", "x"],
            ["(a+)+$"],
            ["", "**"],
            ["urn:mediatord:*", "*push*/1.*"],
            ["https*https*", "*.0*.0"],
        ):
            queries = [{"feature-type": "protocol", "match": match} for match in matches_]
            yield b"q" + json.dumps({"queries": [*queries, *_ALL[1:]]}).encode()


def matches(match: str, text: str) -> bool:
    """Whether the pattern matches, where `*` is any text; a simple implementation over all prefixes."""
    reached = [True] + [False] * len(text)
    for character in match:
        if character == "*":
            for place in range(len(text)):
                reached[place + 1] |= reached[place]
        else:
            reached = [False, *(reached[place] and text[place] == character for place in range(len(text)))]
    return reached[-1]


def make() -> FeaturesTarget:
    """Create the target."""
    return FeaturesTarget()
