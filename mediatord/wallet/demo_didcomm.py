"""The demonstration's DIDComm chapters: Alice writes to Bob, who has a mailbox at the mediator."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.did import DIDDocument
from mediatord.wallet.client import Wallet
from mediatord.wallet.demo_narration import PUSH_SECONDS, Narrator, short
from mediatord.wallet.mediation import Delivered
from mediatord.wallet.mediator import HTTP, Mediator, discover, invitation, open_http
from mediatord.wallet.packing import BASIC_MESSAGE, authcrypt, compose, forward
from mediatord.wallet.socket import connect


async def tell(reactor: Any, url: str, say: Narrator) -> None:
    """
    All chapters.

    :param url: of the mediator.
    :raise Failed: a step did.
    """
    http = open_http(reactor)
    mediator = await _meet(http, url, say)
    bob = await _enrolled_bob(reactor, http, mediator, say)
    alice = Wallet.fresh(mediator, http, reactor)
    await _offline(alice, bob, say)
    await _live(reactor, alice, bob, say)


async def _meet(http: HTTP, url: str, say: Narrator) -> Mediator:
    say.chapter("DIDComm: meeting the mediator")
    found = await invitation(http, url)
    say.step(f"Fetched the invitation from {url}/invitation.", f"goal: {found['body'].get('goal', '')}")
    mediator = await discover(http, url)
    say.step("Resolved the mediator's DID from the invitation.", mediator.did)
    say.step("Its document names where to reach it.", f"{mediator.http_uri}   {mediator.ws_uri or 'no WebSocket'}")
    return mediator


async def _enrolled_bob(reactor: Any, http: HTTP, mediator: Mediator, say: Narrator) -> Wallet:
    say.chapter("DIDComm: Bob gets a mailbox")
    bob = Wallet.fresh(mediator, http, reactor)
    say.step("Bob made himself a DID whose only address is the mediator's DID.", bob.did)
    await bob.ping()
    say.step("Bob pinged the mediator; the answer is encrypted to him and proves who sent it.")
    await bob.enrol()
    say.step("Bob asked for mediation, and it was granted.")
    say.check("his DID is registered", await bob.register() == ["success"])
    return bob


async def _offline(alice: Wallet, bob: Wallet, say: Narrator) -> None:
    say.chapter("DIDComm: Bob is offline, Alice writes")
    _show_what_is_seen(alice, bob, say)
    text = "Hello Bob, read this when you are back."
    await alice.send(bob.did, text)
    say.step("Alice sent it. The mediator said 202: it is on disk.")
    say.check("one message waits for Bob", (await bob.status()).message_count == 1)
    say.step("Bob is back and picks it up.")
    (delivered,) = await bob.fetch()
    _read(alice, bob, delivered, text, say)
    say.check("nothing waits once Bob has acknowledged", (await bob.acknowledge([delivered])).message_count == 0)


def _show_what_is_seen(alice: Wallet, bob: Wallet, say: Narrator) -> None:
    inner = authcrypt(_note(alice, bob.identity.document), alice.identity, bob.identity.document)
    seen = forward(bob.did, [inner], to=[alice.mediator.did])
    data = jsontext.loads_object(inner)
    say.step("Alice encrypts for Bob, puts that into a forward, and encrypts the forward for the mediator.")
    say.step(
        "What the mediator sees when it has opened the forward: where to, and something it has no key for.",
        f'next: "{short(str(seen["body"]["next"]), 70)}"',
        f'attachment: {{"ciphertext": "{short(str(data["ciphertext"]), 60)}", ...}}',
        "no sender, no text",
    )


def _note(alice: Wallet, recipient: DIDDocument) -> dict[str, Any]:
    return compose(BASIC_MESSAGE, {"content": "..."}, to=[recipient.did], **{"from": alice.did})


def _read(alice: Wallet, bob: Wallet, delivered: Delivered, text: str, say: Narrator) -> None:
    opened = bob.open(delivered)
    say.step("Bob decrypts what came.", f'"{opened.text}"')
    say.check("it is what Alice wrote, and proved to be from her", (opened.text, opened.sender) == (text, alice.did))


async def _live(reactor: Any, alice: Wallet, bob: Wallet, say: Narrator) -> None:
    say.chapter("DIDComm: Bob is online, Alice writes again")
    socket = await connect(reactor, bob)
    try:
        say.step("Bob opened a WebSocket.")
        say.check("live delivery is on", (await socket.live()).live_delivery is True)
        text = "Hello Bob, this comes while you watch."
        await alice.send(bob.did, text)
        say.step("Alice sent it.")
        pushed: Deferred[Delivered] = socket.pushed.get()
        delivered = await pushed.addTimeout(PUSH_SECONDS, reactor)
        say.step("The mediator pushed it without being asked.")
        _read(alice, bob, delivered, text, say)
        say.check(
            "nothing waits once Bob has acknowledged", (await socket.acknowledge([delivered])).message_count == 0
        )
    finally:
        await socket.close()
    say.step("Bob closed the socket.")
