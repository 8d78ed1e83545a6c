"""
The history of somebody who chats a lot, as one identity has its mediator keep it, and pages of it.

Every event has a peer, one of few kinds, and a topic that few events share. Half of them came from others: those are
stored unprocessed with one tag, and get all their tags when the application is done with them, as wallets do it.
Everything follows from the number of an event and repeats after a thousand, so that it is known how many there are of
what.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from mediatord.bench.circle import Member
from mediatord.bench.line import Answer, Line
from mediatord.protocol.decentrl.signing import encode_base64
from mediatord.wallet.decentrl.identity import Identity

BATCH = 1000
PAGE_SIZE = 20
FIRST_SECOND = 1_700_000_000
SECONDS_APART = 30

KINDS = 5
TOPIC = 50
_PEERS = 20
# So many rounds of all peers: the even ones are sent, the odd ones received, of which the last stays unread.
_ROUNDS = 50
_PAYLOAD_BYTES = 225
# Those that are asked for. None of this kind stays unread, and any other topic has three with this peer.
_KIND, _PEER = 2, 3


@dataclass(frozen=True, slots=True)
class Page:
    """
    Something to ask for.

    :param change: changes the list that it is a page of, without making it longer or shorter.
    :param total: how many events match.
    """

    ask: Callable[[], Answer]
    change: Callable[[], None]
    total: int

    def read(self) -> float:
        """
        Ask for it; the seconds that it took.

        :raise RuntimeError: it is not what it has to be.
        """
        answer = self.ask()
        value = answer.read()
        page = value.get("payload", value)
        if (page["pagination"]["total"], len(page["events"])) != (self.total, min(PAGE_SIZE, self.total)):
            raise RuntimeError(f"a page of {len(page['events'])} out of {page['pagination']['total']} events")
        return answer.seconds


@dataclass(frozen=True, slots=True)
class Range:
    """Pages from `first` on, `count` of them, one of which is asked for."""

    first: int = 0
    count: int = 1

    def choose(self, random: Random) -> int:
        """One of them."""
        return self.first + random.randrange(self.count)


FIRST = Range()
# No filter.
ALL: Mapping[str, Any] = {}


def ranges(events: int) -> dict[str, Range]:
    """Where to look in a list of so many events, by name; all pages are full."""
    pages = events // PAGE_SIZE
    return {
        "first page": FIRST,
        "page in the middle": Range(pages // 2),
        "last page": Range(pages - 1),
        "any page": Range(0, pages),
    }


class History:
    """The stored events of one identity; `line` leads to its mediator."""

    def __init__(self, member: Member, line: Line) -> None:
        self._member = member
        self._line = line
        self._random = Random(1)
        self._changing: tuple[str, list[str]] | None = None
        self._peers = [Identity.fresh(f"peer {number}", member.mediator.did).did for number in range(_PEERS)]
        # They are signatures, so that making one takes longer than all else of an event.
        self._tag = lru_cache(1000)(member.identity.tag)

    def fill(self, count: int) -> Iterator[int]:
        """
        Store events from the first one on, a batch at a time; how many they were.

        :param count: a multiple of the batch.
        """
        for first in range(0, count, BATCH):
            numbers = range(first, first + BATCH)
            self._say({"type": "SAVE_EVENTS", "events": [self._event(number) for number in numbers]})
            self._process(numbers)
            yield BATCH

    def pages(self, count: int) -> dict[str, Page]:
        """
        What there is to read of so many events, by name.

        :param count: a multiple of the batch.
        """
        middle = count // 2
        peer: dict[str, Any] = {"participant_did": self._peers[_PEER]}
        kind: dict[str, Any] = {"encrypted_tags": [self._tag(f"kind.{_KIND}")]}
        topic = {"encrypted_tags": [self._tag(f"topic.{middle // TOPIC}")]}
        return {
            **{name: self._page(count, pages=pages) for name, pages in ranges(count).items()},
            "one tag": self._page(count // KINDS, kind),
            "one participant": self._page(count // _PEERS, peer),
            "unprocessed": self._page(count // _ROUNDS, {"unprocessed_only": True}),
            "narrow time range": self._page(PAGE_SIZE, _between(middle, PAGE_SIZE)),
            "rare tag and participant": self._page(3, topic | peer),
            "common tag and participant": self._page(count // KINDS // _PEERS, kind | peer),
        }

    def change(self) -> None:
        """Turn the tags of one event round."""
        assert self._changing is not None
        event_id, tags = self._changing
        self._changing = event_id, tags[::-1]
        self._say({"type": "UPDATE_EVENT_TAGS", "events": [{"event_id": event_id, "encrypted_tags": tags[::-1]}]})

    def _say(self, payload: dict[str, Any]) -> dict[str, Any]:
        return self._line.post(self._member.command(payload)).read()

    def _query(self, page: int, size: int, wanted: Mapping[str, Any]) -> bytes:
        pagination = {"page": page, "page_size": size}
        return self._member.command({"type": "QUERY_EVENTS", "filter": {**wanted}, "pagination": pagination})

    def _page(self, total: int, wanted: Mapping[str, Any] = ALL, *, pages: Range = FIRST) -> Page:
        def ask() -> Answer:
            return self._line.post(self._query(pages.choose(self._random), PAGE_SIZE, wanted))

        return Page(ask, self.change, total)

    def _event(self, number: int) -> dict[str, Any]:
        peer, own = self._peers[number % _PEERS], self._member.did
        received = number // _PEERS % 2 == 1
        return {
            "sender_did": peer if received else own,
            "recipient_did": own if received else peer,
            "timestamp": second(number),
            "payload": encode_base64(secrets.token_bytes(_PAYLOAD_BYTES)),
            "encrypted_tags": self._tags(number)[: 1 if received else None],
        }

    def _process(self, numbers: Sequence[int]) -> None:
        """What an application does with events that came from others, all but the last round of them."""
        wanted = {"unprocessed_only": True, **_between(numbers[0], len(numbers))}
        found = self._line.post(self._query(0, BATCH, wanted)).read()["payload"]["events"]
        updates = []
        for event in found:
            number = (int(event["timestamp"]) - FIRST_SECOND) // SECONDS_APART
            if number // _PEERS % _ROUNDS != _ROUNDS - 1:
                updates.append({"event_id": event["id"], "encrypted_tags": self._tags(number)})
        self._say({"type": "UPDATE_EVENT_TAGS", "events": updates})
        self._changing = updates[0]["event_id"], updates[0]["encrypted_tags"]

    def _tags(self, number: int) -> list[str]:
        peer, kind, topic = self._peers[number % _PEERS], number // _PEERS % KINDS, number // TOPIC
        return [self._tag(f"participant.{peer}"), self._tag(f"kind.{kind}"), self._tag(f"topic.{topic}")]


def second(number: int) -> int:
    """When an event happened, in Unix seconds."""
    return FIRST_SECOND + number * SECONDS_APART


def _between(first: int, count: int) -> dict[str, int]:
    return {"after_timestamp": second(first), "before_timestamp": second(first + count - 1)}
