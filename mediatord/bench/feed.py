"""A public channel with a long past, and pages of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any
from urllib.parse import urlencode, urlsplit

from mediatord.bench.circle import Member
from mediatord.bench.history import ALL, FIRST, KINDS, PAGE_SIZE, TOPIC, Page, Range, ranges, second
from mediatord.bench.line import Answer, Line
from mediatord.protocol.decentrl.public import sign_event
from mediatord.wallet.decentrl.commands import PUBLIC

_TEXT = "x" * 300
_KIND = 2


class Feed:
    """
    The public events of one identity.

    :param line: leads to its mediator, like `reading`, which is not used for commands.
    """

    def __init__(self, member: Member, line: Line, reading: Line) -> None:
        self._member = member
        self._line = line
        self._reading = reading
        self._random = Random(1)
        self._path = urlsplit(member.mediator.public_url(member.did)).path

    def publications(self, numbers: Sequence[int]) -> list[bytes]:
        """Commands that publish the events of these numbers."""
        return [self._publication(number) for number in numbers]

    def pages(self, count: int) -> dict[str, Page]:
        """
        What there is to read of so many events, by name.

        :param count: a multiple of the batch.
        """
        middle = count // 2
        between = {"after": second(middle), "before": second(middle + PAGE_SIZE - 1)}
        return {
            **{f"public, {name}": self._page(count, pages=pages) for name, pages in ranges(count).items()},
            "public, one tag": self._page(count // KINDS, {"tags": f"kind-{_KIND}"}),
            "public, narrow time range": self._page(PAGE_SIZE, between),
        }

    def change(self) -> None:
        """Publish one, and take it back."""
        event_id = self._line.post(self._publication(0)).read()["public_event_id"]
        deletion = {"type": "DELETE_PUBLIC_EVENT", "public_event_id": event_id}
        self._line.post(self._member.command(deletion, channel=PUBLIC)).read()

    def _page(self, total: int, wanted: Mapping[str, Any] = ALL, *, pages: Range = FIRST) -> Page:
        def ask() -> Answer:
            page = {"page": pages.choose(self._random), "page_size": PAGE_SIZE}
            return self._reading.get(f"{self._path}?{urlencode({**wanted, **page})}")

        return Page(ask, self.change, total)

    def _publication(self, number: int) -> bytes:
        tags = ["blog", f"kind-{number // PAGE_SIZE % KINDS}", f"topic-{number // TOPIC}"]
        publication = {
            "type": "PUBLISH_PUBLIC_EVENT",
            "event": _TEXT,
            "tags": tags,
            "timestamp": second(number),
            "event_signature": sign_event(_TEXT, tags, second(number), self._member.identity.seed),
        }
        return self._member.command(publication, channel=PUBLIC)
