"""
Interface that each library implements, and the session of one of its wallets with a mediator.

Requests are plain dicts; packing, unpacking, resolution and forward wrapping are the library's.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from steps import ENCRYPTED, Response, get, post

PING = "https://didcomm.org/trust-ping/2.0/ping"
DISCOVER = "https://didcomm.org/discover-features/2.0/"
FORWARD = "https://didcomm.org/routing/2.0/forward"
CM2 = "https://didcomm.org/coordinate-mediation/2.0/"
CM3 = "https://didcomm.org/coordinate-mediation/3.0/"
PICKUP = "https://didcomm.org/messagepickup/3.0/"
REPORT = "https://didcomm.org/report-problem/2.0/problem-report"
CHAT = "https://didcomm.org/basicmessage/2.0/message"


@dataclass(frozen=True)
class OpenedMessage:
    """An unpacked message, with the key ids of sender and signer that the library reports."""

    message: dict[str, Any]
    sender_kid: str | None
    signer_kid: str | None = None


class Wallet(Protocol):
    """One DID with its keys."""

    did: str
    opens_signed: ClassVar[bool]

    async def authcrypt(self, message: dict[str, Any], to: str) -> str | bytes: ...

    async def anoncrypt(self, message: dict[str, Any], to: str) -> str | bytes: ...

    async def route(self, message: dict[str, Any], to: str, enc: str, *, anonymous: bool = False) -> str | bytes:
        """Pack for `to`, wrapped by the library's routing for the mediator in the document of `to`."""
        ...

    async def open(self, packed: str | bytes) -> OpenedMessage: ...


class Library(Protocol):
    """Interface of a library."""

    media_type: str
    encs: Sequence[str]

    async def wallet(self, mediator: str) -> Wallet:
        """A wallet with new keys and a DID whose endpoint is the DID `mediator`."""
        ...

    async def endpoints(self, did: str) -> list[str]:
        """Service URIs of `did`, in order, from the library's resolver."""
        ...


@dataclass(frozen=True)
class Mediator:
    """The mediator as discovered by a wallet."""

    url: str
    did: str

    @classmethod
    def at(cls, url: str) -> Mediator:
        return cls(url, get(f"{url}/did").body.decode().strip())

    @property
    def http(self) -> str:
        return f"{self.url}/didcomm"


def compose_message(
    type_: str, wallet: Wallet, to: str, body: dict[str, Any] | None = None, **headers: Any
) -> dict[str, Any]:
    """A plaintext message with every header that some library requires."""
    plain = {"id": str(uuid.uuid4()), "typ": "application/didcomm-plain+json", "type": type_}
    return {**plain, "from": wallet.did, "to": [to], "body": body or {}, "return_route": "all", **headers}


def compose_chat(wallet: Wallet, to: str, content: str) -> dict[str, Any]:
    """A message to another wallet."""
    message = compose_message(CHAT, wallet, to, {"content": content})
    del message["return_route"]
    return message


class Session:
    """HTTP requests of one wallet to one mediator, with checks that hold for every response."""

    def __init__(self, library: Library, wallet: Wallet, mediator: Mediator) -> None:
        self.library, self.wallet, self.mediator = library, wallet, mediator

    async def request(self, type_: str, body: dict[str, Any] | None = None, **headers: Any) -> dict[str, Any]:
        """Send an authcrypted request; return the plaintext of the reply, packed on the same connection."""
        request = compose_message(type_, self.wallet, self.mediator.did, body, **headers)
        response = await self.send(request)
        assert response.status == 200, (response.status, response.body[:300])
        assert response.media_type == ENCRYPTED, response.media_type
        reply = await self.read(response.body)
        threads = (reply.get("thid"), reply.get("pthid"))
        assert request["id"] in threads, (request["id"], threads)
        return reply

    async def send(self, request: dict[str, Any]) -> Response:
        return self.post(await self.wallet.authcrypt(request, self.mediator.did))

    def post(self, packed: str | bytes) -> Response:
        return post(self.mediator.http, packed, self.library.media_type)

    async def read(self, packed: str | bytes) -> dict[str, Any]:
        """Unpack a message, which must be from the mediator to this wallet."""
        opened = await self.wallet.open(packed)
        assert opened.sender_kid, "the library reports no authenticated sender"
        assert opened.sender_kid.partition("#")[0] == self.mediator.did, opened.sender_kid
        assert opened.message["from"] == self.mediator.did, opened.message["from"]
        assert opened.message["to"] == [self.wallet.did], opened.message["to"]
        return opened.message

    async def enrol(self) -> None:
        """Request mediation and register the wallet's DID."""
        grant = await self.request(CM3 + "mediate-request")
        assert grant["type"] == CM3 + "mediate-grant", grant
        update = {"updates": [{"recipient_did": self.wallet.did, "action": "add"}]}
        reply = await self.request(CM3 + "recipient-update", update)
        assert reply["body"]["updated"][0]["result"] == "success", reply

    async def count(self) -> int:
        status = await self.request(PICKUP + "status-request", {"recipient_did": self.wallet.did})
        assert status["type"] == PICKUP + "status", status
        assert status["body"]["recipient_did"] == self.wallet.did, status
        return int(status["body"]["message_count"])

    async def acknowledge(self, ids: list[str]) -> int:
        """Acknowledge messages; return the number left."""
        status = await self.request(PICKUP + "messages-received", {"message_id_list": ids})
        assert status["type"] == PICKUP + "status", status
        return int(status["body"]["message_count"])

    async def attached(self, delivery: dict[str, Any]) -> list[OpenedMessage]:
        """Unpacked attachments of a delivery."""
        opened = []
        for attachment in delivery["attachments"]:
            (form,) = attachment["data"]  # exactly one member
            assert form == "json", form  # the form in which the library's forward was sent
            opened.append(await self.wallet.open(json.dumps(attachment["data"]["json"])))
        return opened


async def open_session(library: Library, mediator: Mediator) -> Session:
    """A session of a new wallet."""
    return Session(library, await library.wallet(mediator.did), mediator)


async def send_chat(sender: Session, recipient: str, content: str, enc: str, *, anonymous: bool = False) -> Response:
    """Send a message to another wallet through the mediator."""
    message = compose_chat(sender.wallet, recipient, content)
    return sender.post(await sender.wallet.route(message, recipient, enc, anonymous=anonymous))


async def signed_report(response: Response, session: Session) -> dict[str, Any]:
    """Body of a problem report that the mediator has signed, with status 400."""
    assert response.status == 400, (response.status, response.body[:300])
    assert response.media_type == "application/didcomm-signed+json", response.media_type
    wallet, mediator = session.wallet, session.mediator.did
    message = response.json
    if wallet.opens_signed:
        opened = await wallet.open(response.body.decode())
        assert opened.signer_kid and opened.signer_kid.partition("#")[0] == mediator, opened.signer_kid
        message = opened.message
    else:
        (signature,) = message["signatures"]
        assert signature["header"]["kid"].partition("#")[0] == mediator, message
        text: str = message["payload"]
        message = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    assert (message["type"], message["from"]) == (REPORT, mediator), message
    return dict(message["body"])


def plain_report(response: Response) -> dict[str, Any]:
    """Body of a plaintext problem report with status 400."""
    assert response.status == 400, (response.status, response.body[:300])
    assert response.media_type == "application/didcomm-plain+json", response.media_type
    assert response.json["type"] == REPORT, response.json
    return dict(response.json["body"])
