"""A wallet's way of asking: commands by POST, and what comes back (DCTRL-0004 sections 4 and 11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from twisted.internet.interfaces import IReactorTime
from twisted.web.http_headers import Headers

from mediatord.protocol import jsontext
from mediatord.protocol.decentrl.commands import Channel
from mediatord.wallet.client import Response, read_response
from mediatord.wallet.decentrl import commands
from mediatord.wallet.decentrl.identity import Identity
from mediatord.wallet.decentrl.mediator import Directory, Mediator
from mediatord.wallet.decentrl.replies import Item, Page, Query, read_page
from mediatord.wallet.mediator import HTTP
from mediatord.wallet.packing import Unreadable

_JSON = "application/json"


class Refused(Exception):
    """
    A mediator said no.

    :param status: of the HTTP response, or the close code of a socket.
    :param code: one of DCTRL-0004 section 11.
    """

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}".strip())
        self.status = status
        self.code = code


class Client:
    """
    One identity, and where it asks what.

    :param mediator: its own.
    :param clock: for timestamps and time-outs.
    :param directory: may be shared by several.
    """

    def __init__(
        self,
        identity: Identity,
        mediator: Mediator,
        http: HTTP,
        clock: IReactorTime,
        directory: Directory | None = None,
    ) -> None:
        self.identity = identity
        self.mediator = mediator
        self.clock = clock
        self.directory = directory or Directory(http)
        self.directory.learn(mediator)
        self._http = http

    @classmethod
    def fresh(
        cls,
        alias: str,
        mediator: Mediator,
        http: HTTP,
        clock: IReactorTime,
        directory: Directory | None = None,
    ) -> Self:
        """One with a new identity that names this mediator; it is not registered yet."""
        return cls(Identity.fresh(alias, mediator.did), mediator, http, clock, directory)

    @property
    def did(self) -> str:
        """The identity's."""
        return self.identity.did

    def now(self) -> int:
        """Unix seconds."""
        return int(self.clock.seconds())

    def command(
        self,
        payload: dict[str, Any] | str,
        recipient_did: str | None = None,
        channel: Channel = commands.DIRECT,
        **headers: Any,
    ) -> dict[str, Any]:
        """
        A command of now, signed; to our mediator if no recipient is given.

        :param headers: as those of :func:`~mediatord.wallet.decentrl.commands.compose`.
        """
        now_ms = int(self.clock.seconds() * 1000)
        headers = {"timestamp_ms": now_ms, **headers}
        return commands.compose(self.identity, channel, recipient_did or self.mediator.did, payload, **headers)

    async def ask(
        self,
        payload: dict[str, Any] | str,
        recipient_did: str | None = None,
        channel: Channel = commands.DIRECT,
        *,
        at: Mediator | None = None,
    ) -> dict[str, Any]:
        """
        Send a command; the reply.

        :param at: another mediator than our own.
        :raise Refused: it was not carried out.
        :raise Unreadable: the reply is none.
        """
        response = await self.post(commands.encode(self.command(payload, recipient_did, channel)), at=at)
        return read_reply(response)

    async def find(
        self, query: Query[Item], page: int, page_size: int, wanted: Mapping[str, Any] | None = None
    ) -> Page[Item]:
        """
        A page of what our mediator keeps for us.

        :param wanted: the filter, as far as its members are not None; None for a query without one.
        """
        payload: dict[str, Any] = {"type": query.command, "pagination": {"page": page, "page_size": page_size}}
        if wanted is not None:
            payload["filter"] = {name: value for name, value in wanted.items() if value is not None}
        reply = await self.ask(payload)
        return read_page(reply.get("payload"), query.name, query.kind)

    async def post(self, body: bytes, *, at: Mediator | None = None) -> Response:
        """POST bytes as they are."""
        url = (at or self.mediator).url
        headers = Headers({"Content-Type": [_JSON]})
        sent = self._http.post(url, data=body, headers=headers, allow_redirects=False)
        return await read_response(sent, self.clock)

    async def get(self, url: str) -> Response:
        """GET what is public."""
        sent = self._http.get(url, headers=Headers({"Accept": [_JSON]}), allow_redirects=False)
        return await read_response(sent, self.clock)


def read_reply(response: Response) -> dict[str, Any]:
    """
    The reply of a success.

    :raise Refused: it is the reply of a refusal, or no 200 at all.
    :raise Unreadable: it is something else.
    """
    value = read_object(response)
    if value.get("type") != "SUCCESS":
        raise Unreadable("a reply that is neither success nor refusal")
    return value


def read_object(response: Response) -> dict[str, Any]:
    """
    The JSON object of a response.

    :raise Refused: as :func:`read_reply`.
    :raise Unreadable: there is none.
    """
    try:
        value = jsontext.loads_object(response.body)
    except ValueError:
        value = None
    if response.status != 200:
        raise Refused(response.status, str((value or {}).get("code", "")))
    if value is None or response.headers.get("content-type", "").partition(";")[0] != _JSON:
        raise Unreadable("a reply that is not JSON")
    return value
