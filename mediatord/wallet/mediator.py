"""The mediator as a wallet sees it: found by its invitation, addressed by its DID document (reference 7.4, 9)."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from treq.client import HTTPClient
from twisted.internet.interfaces import IReactorCore
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.http_headers import Headers

from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.did import DIDDocument, Endpoint, NeedsNetwork
from mediatord.protocol.didcomm.did_document import parse_document
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.wallet.packing import Unreadable

INVITATION = "https://didcomm.org/out-of-band/2.0/invitation"


class Posting(Protocol):
    """What a wallet that knows its mediator uses of treq."""

    def post(self, url: str, /, *, data: bytes, headers: Headers, allow_redirects: bool) -> Awaitable[Any]: ...


class HTTP(Posting, Protocol):
    """What is used of treq: its client, or its in-memory double in tests."""

    def get(self, url: str, /, *, headers: Headers, allow_redirects: bool) -> Awaitable[Any]: ...


def open_http(reactor: IReactorCore) -> HTTP:
    """An HTTP client that leaves no connection behind."""
    return HTTPClient(Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False)))


@dataclass(frozen=True, slots=True)
class Mediator:
    """
    :param http_uri: where envelopes are POSTed.
    :param ws_uri: where a socket is opened; None when the document names no such place.
    """

    did: str
    document: DIDDocument
    http_uri: str
    ws_uri: str | None

    @classmethod
    def of(cls, document: DIDDocument) -> Mediator:
        """
        :raise Unreadable: the document has no HTTP endpoint.
        """
        http = document.http_endpoints()
        if not http:
            raise Unreadable("no HTTP endpoint")
        endpoints = (endpoint for service in document.services for endpoint in service.endpoints)
        return cls(document.did, document, http[0].uri, next((one.uri for one in endpoints if _is_socket(one)), None))

    @classmethod
    def from_did(cls, did: str) -> Mediator:
        """
        The mediator of a DID that resolves by itself.

        :raise LookupError: it does not.
        """
        return cls.of(resolve_local(did))


def _is_socket(endpoint: Endpoint) -> bool:
    return endpoint.uri.startswith(("ws://", "wss://"))


async def invitation(http: HTTP, url: str) -> dict[str, Any]:
    """
    The out-of-band invitation a mediator publishes.

    :param url: its public URL.
    :raise Unreadable: what was found there is no invitation.
    """
    value = await get_json(http, f"{url.rstrip('/')}/invitation")
    if value.get("type") != INVITATION or not isinstance(value.get("from"), str):
        raise Unreadable("not an invitation")
    return value


async def discover(http: HTTP, url: str) -> Mediator:
    """
    The mediator at a public URL, by its invitation; a did:web is read from that same place.

    :raise Unreadable: there is no invitation, or no usable document.
    """
    did = (await invitation(http, url))["from"]
    try:
        return Mediator.from_did(did)
    except NeedsNetwork:
        document = await get_json(http, f"{url.rstrip('/')}/.well-known/did.json")
        return Mediator.of(parse_document(did, document))


async def get_json(http: HTTP, url: str) -> dict[str, Any]:
    """
    The JSON object at a URL.

    :raise Unreadable: there is none.
    """
    response = await http.get(url, headers=Headers({"Accept": ["application/json"]}), allow_redirects=False)
    body = await response.content()
    if response.code != 200:
        raise Unreadable(f"HTTP {response.code} at {url}")
    try:
        return jsontext.loads_object(body)
    except ValueError:
        raise Unreadable(f"no JSON object at {url}") from None
