"""
Parties whose messages a recipient has acknowledged, so that their mail need not make room for that of unknown ones.

Wallets acknowledge whatever comes, so one acknowledgement says little. A party is known when two of its messages were
acknowledged at least an hour apart. What is remembered of a recipient is bounded: who is about to become known may
take the place of another one that is, but not of one that is known, unless nothing has come from that for a month.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

# Parties that are remembered of a recipient, and how many of them may be known.
MAX_REMEMBERED = 64
MAX_KNOWN = 48
# Seconds between two acknowledgements after which a party is known, and after which it may be forgotten.
PROBATION = 3_600
DORMANT = 30 * 86_400
# Seconds for which it is not written again that a known party is still heard of.
REFRESHED = 86_400

_Span = tuple[int, int]


class KnownSenders:
    """
    Parties with the times of their first and last acknowledgement, in whole seconds.

    :param text: as :meth:`text` has written it; None for nothing.
    """

    __slots__ = ("_spans",)

    def __init__(self, text: str | None = None) -> None:
        self._spans: dict[int, _Span] = {party: (first, last) for party, first, last in json.loads(text or "[]")}

    def text(self) -> str:
        """As JSON, in the order of their numbers."""
        return json.dumps([[party, *span] for party, span in sorted(self._spans.items())], separators=(",", ":"))

    @property
    def known(self) -> frozenset[int]:
        """Parties that are known."""
        return frozenset([party for party, span in self._spans.items() if _is_known(span)])

    def acknowledged(self, parties: Iterable[int], now: float) -> bool:
        """Messages of these were acknowledged. Whether there is anything to be written."""
        return any([self._acknowledged(party, int(now)) for party in sorted(set(parties))])

    def _acknowledged(self, party: int, now: int) -> bool:
        span = self._spans.get(party)
        if span is None:
            self._forget_one()
            self._spans[party] = now, now
            return True
        first, last = span
        if _is_known(span):
            if now - last < REFRESHED:
                return False
        elif now - first < PROBATION or not self._has_place(now):
            return False
        self._spans[party] = first, now
        return True

    def _forget_one(self) -> None:
        """If there are too many: the one on probation that came first. There are always some."""
        if len(self._spans) >= MAX_REMEMBERED:
            on_probation = [(span[0], party) for party, span in self._spans.items() if not _is_known(span)]
            del self._spans[min(on_probation)[1]]

    def _has_place(self, now: int) -> bool:
        """Whether one more can be known, instead of one that is dormant if need be."""
        known = [(span[1], party) for party, span in self._spans.items() if _is_known(span)]
        if len(known) < MAX_KNOWN:
            return True
        last, party = min(known)
        if now - last < DORMANT:
            return False
        del self._spans[party]
        return True


def _is_known(span: _Span) -> bool:
    return span[1] - span[0] >= PROBATION
