"""
The seam that each library fills in, and the conversation of one of its wallets with a mediator.

The requests are plain dicts; packing, unpacking, resolution and forward wrapping are the library's.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from steps import ENCRYPTED, Answer, get, post

PING = "https://didcomm.org/trust-ping/2.0/ping"
DISCOVER = "https://didcomm.org/discover-features/2.0/"
FORWARD = "https://didcomm.org/routing/2.0/forward"
CM2 = "https://didcomm.org/coordinate-mediation/2.0/"
CM3 = "https://didcomm.org/coordinate-mediation/3.0/"
PICKUP = "https://didcomm.org/messagepickup/3.0/"
REPORT = "https://didcomm.org/report-problem/2.0/problem-report"
CHAT = "https://didcomm.org/basicmessage/2.0/message"


@dataclass(frozen=True)
class Opened:
    """A message as the library gave it, and the key ids of the sender and the signer it vouches for."""

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
        """Pack for `to` and let the library's routing wrap it for the mediator that the document of `to` names."""
        ...

    async def open(self, packed: str | bytes) -> Opened: ...


class Library(Protocol):
    """What a library can do."""

    media_type: str
    encs: Sequence[str]

    async def wallet(self, mediator: str) -> Wallet:
        """A wallet with fresh keys and a DID that names the DID `mediator` as its endpoint."""
        ...

    async def endpoints(self, did: str) -> list[str]:
        """The service addresses of `did`, in order, by the library's resolver."""
        ...


@dataclass(frozen=True)
class Mediator:
    """The mediator as a wallet finds it."""

    url: str
    did: str

    @classmethod
    def at(cls, url: str) -> Mediator:
        return cls(url, get(f"{url}/did").body.decode().strip())

    @property
    def http(self) -> str:
        return f"{self.url}/didcomm"


def a_message(
    type_: str, wallet: Wallet, to: str, body: dict[str, Any] | None = None, **headers: Any
) -> dict[str, Any]:
    """A plaintext with every header that some library insists on."""
    plain = {"id": str(uuid.uuid4()), "typ": "application/didcomm-plain+json", "type": type_}
    return {**plain, "from": wallet.did, "to": [to], "body": body or {}, "return_route": "all", **headers}


def a_chat(wallet: Wallet, to: str, content: str) -> dict[str, Any]:
    """A message to another wallet, not for the mediator's eyes."""
    message = a_message(CHAT, wallet, to, {"content": content})
    del message["return_route"]
    return message


class Session:
    """Requests of one wallet to one mediator over HTTP, and what is true of every answer."""

    def __init__(self, library: Library, wallet: Wallet, mediator: Mediator) -> None:
        self.library, self.wallet, self.mediator = library, wallet, mediator

    async def ask(self, type_: str, body: dict[str, Any] | None = None, **headers: Any) -> dict[str, Any]:
        """Send an authcrypted request, expect a packed reply on the same connection, return its plaintext."""
        request = a_message(type_, self.wallet, self.mediator.did, body, **headers)
        answer = await self.send(request)
        assert answer.status == 200, (answer.status, answer.body[:300])
        assert answer.media_type == ENCRYPTED, answer.media_type
        reply = await self.read(answer.body)
        threads = (reply.get("thid"), reply.get("pthid"))
        assert request["id"] in threads, (request["id"], threads)
        return reply

    async def send(self, request: dict[str, Any]) -> Answer:
        return self.post(await self.wallet.authcrypt(request, self.mediator.did))

    def post(self, packed: str | bytes) -> Answer:
        return post(self.mediator.http, packed, self.library.media_type)

    async def read(self, packed: str | bytes) -> dict[str, Any]:
        """Open a message that must come from the mediator and be for this wallet."""
        opened = await self.wallet.open(packed)
        assert opened.sender_kid, "the library saw no authenticated sender"
        assert opened.sender_kid.partition("#")[0] == self.mediator.did, opened.sender_kid
        assert opened.message["from"] == self.mediator.did, opened.message["from"]
        assert opened.message["to"] == [self.wallet.did], opened.message["to"]
        return opened.message

    async def enrol(self) -> None:
        """Ask for mediation and make the wallet's own DID routable."""
        grant = await self.ask(CM3 + "mediate-request")
        assert grant["type"] == CM3 + "mediate-grant", grant
        update = {"updates": [{"recipient_did": self.wallet.did, "action": "add"}]}
        reply = await self.ask(CM3 + "recipient-update", update)
        assert reply["body"]["updated"][0]["result"] == "success", reply

    async def count(self) -> int:
        status = await self.ask(PICKUP + "status-request", {"recipient_did": self.wallet.did})
        assert status["type"] == PICKUP + "status", status
        assert status["body"]["recipient_did"] == self.wallet.did, status
        return int(status["body"]["message_count"])

    async def acknowledge(self, ids: list[str]) -> int:
        """Take messages off the queue; how many are left."""
        status = await self.ask(PICKUP + "messages-received", {"message_id_list": ids})
        assert status["type"] == PICKUP + "status", status
        return int(status["body"]["message_count"])

    async def attached(self, delivery: dict[str, Any]) -> list[Opened]:
        """What the attachments of a delivery hold, opened by the library."""
        opened = []
        for attachment in delivery["attachments"]:
            (form,) = attachment["data"]  # one member, never two
            assert form == "json", form  # the form in which the library's forward came
            opened.append(await self.wallet.open(json.dumps(attachment["data"]["json"])))
        return opened


async def a_session(library: Library, mediator: Mediator) -> Session:
    """A session of a wallet that nobody has seen before."""
    return Session(library, await library.wallet(mediator.did), mediator)


async def send_chat(sender: Session, recipient: str, content: str, enc: str, *, anonymous: bool = False) -> Answer:
    """One message from wallet to wallet through the mediator."""
    message = a_chat(sender.wallet, recipient, content)
    return sender.post(await sender.wallet.route(message, recipient, enc, anonymous=anonymous))


async def signed_report(answer: Answer, session: Session) -> dict[str, Any]:
    """The body of a problem report that is signed by the mediator and travels with status 400."""
    assert answer.status == 400, (answer.status, answer.body[:300])
    assert answer.media_type == "application/didcomm-signed+json", answer.media_type
    wallet, mediator = session.wallet, session.mediator.did
    message = answer.json
    if wallet.opens_signed:
        opened = await wallet.open(answer.body.decode())
        assert opened.signer_kid and opened.signer_kid.partition("#")[0] == mediator, opened.signer_kid
        message = opened.message
    else:
        (signature,) = message["signatures"]
        assert signature["header"]["kid"].partition("#")[0] == mediator, message
        text: str = message["payload"]
        message = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    assert (message["type"], message["from"]) == (REPORT, mediator), message
    return dict(message["body"])


def plain_report(answer: Answer) -> dict[str, Any]:
    """The body of a problem report that travels in the clear with status 400."""
    assert answer.status == 400, (answer.status, answer.body[:300])
    assert answer.media_type == "application/didcomm-plain+json", answer.media_type
    assert answer.json["type"] == REPORT, answer.json
    return dict(answer.json["body"])
