"""A wallet that speaks to its mediator over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.web.http_headers import Headers

from mediatord.protocol import jsontext
from mediatord.protocol.canonical_did import canonical_did
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE, Message
from mediatord.wallet.identity import Identity, Method
from mediatord.wallet.mediation import PROBLEM_REPORT, Delivered, Mediation, Problem, Version
from mediatord.wallet.mediator import Mediator, Posting
from mediatord.wallet.packing import (
    BASIC_MESSAGE,
    AddressBook,
    Opened,
    Unreadable,
    authcrypt,
    compose,
    open_report,
    route_to,
    unpack,
    wrap,
)

TIMEOUT_SECONDS = 30.0


class Response(NamedTuple):
    """
    A raw HTTP response.

    :param headers: by lower-case name; of several with one name the last.
    """

    status: int
    headers: dict[str, str]
    body: bytes


class Wallet(Mediation):
    """
    One identity and its account at a mediator; several wallets may share an HTTP client and an address book.

    :param mediator: may also be given to :meth:`enrol`.
    :param clock: for `created_time` and time-outs.
    """

    def __init__(
        self,
        identity: Identity,
        http: Posting,
        clock: IReactorTime,
        mediator: Mediator | None = None,
        book: AddressBook | None = None,
    ) -> None:
        super().__init__(self.request, identity.did)
        self.identity = identity
        self.clock = clock
        self.book = book or AddressBook()
        self._http = http
        self._mediator = mediator
        if mediator is not None:
            self.book.learn(mediator.document)

    @classmethod
    def fresh(
        cls, mediator: Mediator, http: Posting, clock: IReactorTime, *, method: Method = "did:peer:2"
    ) -> Wallet:
        """A wallet with a new identity whose messages go to `mediator`; it is not enrolled yet."""
        endpoint = None if method == "did:key" else mediator.did
        return cls(Identity.fresh(method, endpoint=endpoint), http, clock, mediator)

    @property
    def did(self) -> str:
        """The wallet's own."""
        return self.identity.did

    @property
    def mediator(self) -> Mediator:
        """
        The mediator everything is asked of.

        :raise RuntimeError: none has been named.
        """
        if self._mediator is None:
            raise RuntimeError("the wallet has no mediator yet")
        return self._mediator

    async def enrol(self, mediator: Mediator | None = None, *, version: Version | None = None) -> tuple[str, ...]:
        """
        Ask for mediation; the routing DIDs that are granted. Nothing is routable before :meth:`register`.

        :param mediator: instead of the one given before.
        :param version: of Coordinate Mediation, from now on.
        :raise Unreadable: the grant names somebody else's DID.
        """
        if mediator is not None:
            self._mediator = mediator
            self.book.learn(mediator.document)
        self.version = version or self.version
        granted = await self.grant()
        if canonical_did(self.mediator.did) not in map(canonical_did, granted):
            raise Unreadable("a grant of another mediator")
        return granted

    def pack(
        self, type_: str, body: Mapping[str, Any] | None = None, /, **headers: Any
    ) -> tuple[dict[str, Any], bytes]:
        """
        A message to the mediator, and the same authcrypted.

        :param headers: added to or replacing `from`, `to`, `created_time` and `return_route: all`; None removes one.
        """
        defaults = {
            "from": self.did,
            "to": [self.mediator.did],
            "created_time": int(self.clock.seconds()),
            "return_route": "all",
        }
        message = compose(type_, body, **{**defaults, **headers})
        return message, authcrypt(message, self.identity, self.mediator.document)

    async def request(self, type_: str, body: Mapping[str, Any] | None = None, /, **headers: Any) -> Message:
        """
        Ask the mediator anything; its answer, after all checks.

        :raise Problem: it answered with a problem report, however it is packed, or with another HTTP status.
        :raise Unreadable: the answer is not from the mediator, not for us, or belongs to another thread.
        """
        message, envelope = self.pack(type_, body, **headers)
        response = await self.post(envelope)
        if response.status != 200 and response.headers.get("content-type") != ENCRYPTED_TYPE:
            raise self._refusal(response)
        if response.headers.get("content-type") != ENCRYPTED_TYPE:
            raise Unreadable("an answer of another media type")
        opened = self.from_mediator(response.body)
        if opened.message.type.uri == PROBLEM_REPORT:
            raise Problem(response.status, jsontext.loads_object(opened.plaintext))
        if opened.message.thid != message.get("thid", message["id"]):
            raise Unreadable("an answer in another thread")
        return opened.message

    async def post(
        self, body: bytes, *, url: str | None = None, content_type: str | None = ENCRYPTED_TYPE
    ) -> Response:
        """POST bytes as they are, to the mediator if no URL is given."""
        headers = Headers({} if content_type is None else {"Content-Type": [content_type]})
        sent = self._http.post(url or self.mediator.http_uri, data=body, headers=headers, allow_redirects=False)
        return await read_response(sent, self.clock)

    async def send(self, recipient_did: str, text: str) -> str:
        """
        Send a basic message along the route the recipient's document names; the message's id.

        :raise Problem: the mediator did not take it.
        """
        now = int(self.clock.seconds())
        message = compose(
            BASIC_MESSAGE, {"content": text}, to=[recipient_did], created_time=now, **{"from": self.did}
        )
        recipient = self.book.resolve(recipient_did)
        route = route_to(recipient, self.book.resolve)
        envelope = authcrypt(message, self.identity, recipient)
        response = await self.post(wrap(envelope, recipient_did, route.hops, self.book.resolve), url=route.uri)
        if response.status != 202 or response.body:
            raise self._refusal(response)
        return str(message["id"])

    def open(self, payload: bytes | Delivered) -> Opened:
        """
        Decrypt a message that was delivered to us.

        :raise Unreadable: a check failed.
        """
        raw = payload.payload if isinstance(payload, Delivered) else payload
        return unpack(raw, self.identity, self.book.resolve)

    def from_mediator(self, raw: bytes) -> Opened:
        """
        Decrypt what must come from the mediator itself and name us in `to`.

        :raise Unreadable: a check failed.
        """
        opened = self.open(raw)
        if opened.sender is None or canonical_did(opened.sender) != canonical_did(self.mediator.did):
            raise Unreadable("not authenticated as the mediator")
        if not opened.message.to:
            raise Unreadable("addressed to nobody")
        return opened

    def _refusal(self, response: Response) -> Problem:
        try:
            report = open_report(response.body, self.book.resolve)
        except Unreadable:
            report = {}
        return Problem(response.status, report if report.get("type") == PROBLEM_REPORT else {})


async def read_response(sent: Awaitable[Any], clock: IReactorTime) -> Response:
    """
    What comes back for a request.

    :raise twisted.internet.defer.TimeoutError: nothing did for half a minute.
    """
    answer: Deferred[Response] = Deferred.fromCoroutine(_whole(sent))
    return await answer.addTimeout(TIMEOUT_SECONDS, clock)


async def _whole(sent: Awaitable[Any]) -> Response:
    response = await sent
    headers = {name.decode("latin-1").lower(): values[-1].decode("latin-1") for name, values in _headers(response)}
    return Response(response.code, headers, await response.content())


def _headers(response: Any) -> list[tuple[bytes, list[bytes]]]:
    return list(response.headers.getAllRawHeaders())
