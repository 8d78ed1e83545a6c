"""The demonstration's Decentrl chapters: Alice and Bob have different mediators, which never talk to each other."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from mediatord.protocol import jsontext
from mediatord.wallet.decentrl import commands
from mediatord.wallet.decentrl.client import Refused
from mediatord.wallet.decentrl.mediator import discover
from mediatord.wallet.decentrl.replies import PendingEvent, read_pushed
from mediatord.wallet.decentrl.socket import connect
from mediatord.wallet.decentrl.wallet import Entry, Wallet
from mediatord.wallet.demo_narration import PUSH_SECONDS, Narrator, short
from mediatord.wallet.mediator import HTTP, open_http

_CHAT = "chat.abc"
_OFFLINE = "Hello Bob, read this when you are back."
_ONLINE = "Hello Bob, this comes while you watch."
_TO_ALL = "Hello everybody."
_SHOWN = 70


async def tell(reactor: Any, url: str, other_url: str, say: Narrator) -> None:
    """
    All chapters.

    :param url: of Alice's mediator.
    :param other_url: of Bob's.
    :raise Failed: a step did.
    """
    http = open_http(reactor)
    say.chapter("Decentrl: Alice and Bob register, each with a mediator of their own")
    alice = await _registered(reactor, http, "Alice", url, say)
    bob = await _registered(reactor, http, "Bob", other_url, say)
    await _make_contract(alice, bob, say)
    await _offline(alice, bob, say)
    await _online(reactor, alice, bob, say)
    await _history(alice, bob, say)
    await _public(alice, bob, say)


async def _registered(reactor: Any, http: HTTP, name: str, url: str, say: Narrator) -> Wallet:
    mediator = await discover(http, url)
    wallet = Wallet.fresh(name.lower(), mediator, http, reactor)
    say.step(f"{name} made a DID that holds two public keys and the DID of a mediator.", wallet.did, mediator.did)
    registration = await wallet.register()
    say.check(f"the mediator has signed its contract with {name}", registration.peer_did == mediator.did)
    return wallet


async def _make_contract(alice: Wallet, bob: Wallet, say: Narrator) -> None:
    say.chapter("Decentrl: a contract, without which nobody may write to Bob")
    say.check("Alice is refused as long as there is none", await _is_refused(alice, bob))
    await alice.request_contract(bob.did)
    say.step("Alice signs one and asks Bob for it, at the mediator that his DID names.")
    (request,) = (await bob.pending_requests()).items
    say.step(
        "Bob fetches the request. What his mediator sees:",
        f'encrypted_contract_request: "{short(request.encrypted_contract_request, _SHOWN)}"',
    )
    accepted = bob.accept(request)
    say.step("He decrypts it with the private half of a key in his DID, and signs it as well.")
    await bob.save_contract(accepted)
    say.step("He has his own mediator keep it: now Alice may write to him.")
    await bob.respond(accepted)
    say.step("He gives it to hers: now he may write to Alice.")
    await bob.acknowledge_requests([request])
    say.check("no request waits once Bob has acknowledged it", (await bob.pending_requests()).total == 0)
    (concluded,) = await alice.conclude()
    say.step("Alice finds it at her mediator.", f"contract {concluded.id}")
    say.check("both have one secret, which no mediator has", concluded.root_secret == accepted.root_secret)


async def _is_refused(alice: Wallet, bob: Wallet) -> bool:
    try:
        await alice.ask("junk", bob.did, commands.PRIVATE, at=bob.mediator)
    except Refused as refusal:
        return refusal.code == "COMMUNICATION_CONTRACT_NOT_FOUND"
    return False


async def _offline(alice: Wallet, bob: Wallet, say: Narrator) -> None:
    say.chapter("Decentrl: Bob is offline, Alice writes")
    await _write(alice, bob, _OFFLINE, say)
    (event,) = (await bob.pending()).items
    say.step("Bob is back and fetches it. What his mediator sees:", f'payload: "{short(event.payload, _SHOWN)}"')
    await _read(bob, event, _OFFLINE, say)


async def _write(alice: Wallet, bob: Wallet, text: str, say: Narrator) -> None:
    event = _message(text)
    await alice.send(bob.did, event)
    say.step("Alice signs it, encrypts it under the contract, and sends it to Bob's mediator.")
    await alice.save_events(Entry(alice.did, bob.did, event, ("chat", _CHAT)))
    say.step(
        "She keeps a copy at her own, encrypted for herself, with tags that mean nothing to others.",
        f'encrypted_tags: "{short(alice.identity.tag(_CHAT), _SHOWN)}"',
    )


async def _read(bob: Wallet, pending: PendingEvent, text: str, say: Narrator) -> None:
    event = bob.open(pending)
    say.check("it is what Alice wrote, and proved to be from her", event.text == _message(text))
    await bob.save_events(Entry(event.sender_did, bob.did, event.text, ("chat", _CHAT), event.timestamp))
    say.step("Bob encrypts it for himself and keeps it at his mediator, with tags of his own.")
    await bob.acknowledge([pending])
    say.check("nothing waits once Bob has acknowledged", (await bob.pending()).total == 0)


async def _online(reactor: Any, alice: Wallet, bob: Wallet, say: Narrator) -> None:
    say.chapter("Decentrl: Bob is online, Alice writes again")
    socket = await connect(reactor, bob)
    try:
        say.step("Bob opened a WebSocket and proved who he is.", bob.mediator.ws_url)
        await _write(alice, bob, _ONLINE, say)
        pushed: Deferred[dict[str, Any]] = socket.pushed.get()
        (event,) = read_pushed(await pushed.addTimeout(PUSH_SECONDS, reactor))
        say.step("Bob's mediator pushed it.")
        await _read(bob, event, _ONLINE, say)
    finally:
        await socket.close()
    say.step("Bob closed the socket.")


async def _history(alice: Wallet, bob: Wallet, say: Narrator) -> None:
    say.chapter("Decentrl: both have all of it")
    for name, wallet in (("Alice", alice), ("Bob", bob)):
        kept = (await wallet.events(tags=[_CHAT])).items
        texts = [_content(wallet.identity.unseal(one.payload)) for one in kept]
        say.step(f"{name} asks for the tag of this chat, and decrypts what is found.", *(f'"{one}"' for one in texts))
        say.check("it is both messages, oldest first", texts == [_OFFLINE, _ONLINE])


async def _public(alice: Wallet, bob: Wallet, say: Narrator) -> None:
    say.chapter("Decentrl: a public channel")
    event_id = await bob.publish(_message(_TO_ALL), ["greeting"])
    say.step("Bob published a signed event.", bob.mediator.public_url(short(bob.did, _SHOWN)))
    read = (await alice.public(bob.did, tags=["greeting"])).items
    say.check("anybody can read it and check his signature", [_content(one.event) for one in read] == [_TO_ALL])
    await bob.unpublish(event_id)
    say.check("it is gone once Bob has deleted it", (await alice.public(bob.did)).total == 0)


def _message(content: str) -> str:
    return jsontext.dumps({"type": "chat.message", "data": {"chatId": "abc", "content": content}}).decode()


def _content(event: str) -> str:
    return str(jsontext.loads_object(event)["data"]["content"])
