"""
How a demonstration is told: numbered steps, and checks that have to hold.

The demonstration's DIDComm chapters: Alice writes to Bob, who has a mailbox at the mediator.

The demonstration's Decentrl chapters: Alice and Bob have different mediators, which never talk to each other.

`mediatord demo`: throw-away wallets write to each other through a mediator, one step at a time.
"""

from __future__ import annotations

import textwrap
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import click
from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectError
from twisted.web.client import ResponseNeverReceived

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import DIDDocument
from mediatord.wallet import decentrl_messages
from mediatord.wallet.decentrl_client import CommandRefused, DecentrlWallet, HistoryEntry, discover_decentrl_mediator
from mediatord.wallet.decentrl_messages import PendingEvent, read_pushed_events
from mediatord.wallet.decentrl_socket import connect_decentrl_socket
from mediatord.wallet.didcomm_client import (
    DIDCommMediator,
    DIDCommWallet,
    TreqClient,
    discover_mediator,
    fetch_invitation,
    open_http,
)
from mediatord.wallet.didcomm_mediation import DeliveredMessage, MediatorProblem
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    UnreadableMessage,
    authcrypt,
    build_forward,
    compose_message,
)
from mediatord.wallet.didcomm_socket import SocketClosedError, connect_didcomm_socket
from mediatord.wallet.temporary_daemon import DaemonStartError, TemporaryDaemon, is_healthy, run_temporary_daemon

# How long a push may take.
PUSH_SECONDS = 10.0

_WIDTH = 96


class DemoStepFailed(Exception):
    """A step did not end as it must."""


class DemoPrinter:
    """Numbers the steps and prints them."""

    def __init__(self) -> None:
        self._steps = 0

    def chapter(self, title: str) -> None:
        """What the next steps are about."""
        click.echo()
        click.secho(title, bold=True)

    def step(self, text: str, *details: str) -> None:
        """What was done, and what could be seen of it."""
        self._steps += 1
        click.echo(f"  {click.style(f'{self._steps:2}', fg='cyan')}  {text}")
        for detail in details:
            lines = textwrap.wrap(detail, _WIDTH, break_on_hyphens=False) or [""]
            for line in lines:
                click.secho(f"      {line}", dim=True)

    def check(self, text: str, passed: bool) -> None:
        """
        A step that can go wrong.

        :raise Failed: it did.
        """
        mark = click.style("ok", fg="green") if passed else click.style("no", fg="red")
        click.echo(f"      {mark}  {text}")
        if not passed:
            raise DemoStepFailed(text)


def truncate_text(text: str, length: int) -> str:
    """The beginning of something long."""
    return text if len(text) <= length else text[:length] + "..."


async def demonstrate_didcomm(reactor: Any, url: str, printer: DemoPrinter) -> None:
    """
    All chapters.

    :param url: of the mediator.
    :raise Failed: a step did.
    """
    http = open_http(reactor)
    mediator = await _meet_mediator(http, url, printer)
    bob = await _enrol_bob(reactor, http, mediator, printer)
    alice = DIDCommWallet.generate(mediator, http, reactor)
    await _send_while_offline(alice, bob, printer)
    await _send_while_live(reactor, alice, bob, printer)


async def _meet_mediator(http: TreqClient, url: str, printer: DemoPrinter) -> DIDCommMediator:
    printer.chapter("DIDComm: meeting the mediator")
    found = await fetch_invitation(http, url)
    printer.step(f"Fetched the invitation from {url}/invitation.", f"goal: {found['body'].get('goal', '')}")
    mediator = await discover_mediator(http, url)
    printer.step("Resolved the mediator's DID from the invitation.", mediator.did)
    printer.step(
        "Its document names where to reach it.", f"{mediator.http_uri}   {mediator.ws_uri or 'no WebSocket'}"
    )
    return mediator


async def _enrol_bob(
    reactor: Any, http: TreqClient, mediator: DIDCommMediator, printer: DemoPrinter
) -> DIDCommWallet:
    printer.chapter("DIDComm: Bob gets a mailbox")
    bob = DIDCommWallet.generate(mediator, http, reactor)
    printer.step("Bob made himself a DID whose only address is the mediator's DID.", bob.did)
    await bob.ping()
    printer.step("Bob pinged the mediator; the answer is encrypted to him and proves who sent it.")
    await bob.enrol()
    printer.step("Bob asked for mediation, and it was granted.")
    printer.check("his DID is registered", await bob.register() == ["success"])
    return bob


async def _send_while_offline(alice: DIDCommWallet, bob: DIDCommWallet, printer: DemoPrinter) -> None:
    printer.chapter("DIDComm: Bob is offline, Alice writes")
    _show_visible_parts(alice, bob, printer)
    text = "Hello Bob, read this when you are back."
    await alice.send(bob.did, text)
    printer.step("Alice sent it. The mediator said 202: it is on disk.")
    printer.check("one message waits for Bob", (await bob.status()).message_count == 1)
    printer.step("Bob is back and picks it up.")
    (delivered,) = await bob.fetch()
    _read_message(alice, bob, delivered, text, printer)
    printer.check("nothing waits once Bob has acknowledged", (await bob.acknowledge([delivered])).message_count == 0)


def _show_visible_parts(alice: DIDCommWallet, bob: DIDCommWallet, printer: DemoPrinter) -> None:
    inner = authcrypt(_sample_message(alice, bob.identity.document), alice.identity, bob.identity.document)
    seen = build_forward(bob.did, [inner], to=[alice.mediator.did])
    data = encoding.loads_object(inner)
    printer.step("Alice encrypts for Bob, puts that into a forward, and encrypts the forward for the mediator.")
    printer.step(
        "What the mediator sees when it has opened the forward: where to, and something it has no key for.",
        f'next: "{truncate_text(str(seen["body"]["next"]), 70)}"',
        f'attachment: {{"ciphertext": "{truncate_text(str(data["ciphertext"]), 60)}", ...}}',
        "no sender, no text",
    )


def _sample_message(alice: DIDCommWallet, recipient: DIDDocument) -> dict[str, Any]:
    return compose_message(BASIC_MESSAGE, {"content": "..."}, to=[recipient.did], **{"from": alice.did})


def _read_message(
    alice: DIDCommWallet, bob: DIDCommWallet, delivered: DeliveredMessage, text: str, printer: DemoPrinter
) -> None:
    opened = bob.open(delivered)
    printer.step("Bob decrypts what came.", f'"{opened.text}"')
    printer.check(
        "it is what Alice wrote, and proved to be from her", (opened.text, opened.sender) == (text, alice.did)
    )


async def _send_while_live(reactor: Any, alice: DIDCommWallet, bob: DIDCommWallet, printer: DemoPrinter) -> None:
    printer.chapter("DIDComm: Bob is online, Alice writes again")
    socket = await connect_didcomm_socket(reactor, bob)
    try:
        printer.step("Bob opened a WebSocket.")
        printer.check("live delivery is on", (await socket.live()).live_delivery is True)
        text = "Hello Bob, this comes while you watch."
        await alice.send(bob.did, text)
        printer.step("Alice sent it.")
        pushed: Deferred[DeliveredMessage] = socket.pushed.get()
        delivered = await pushed.addTimeout(PUSH_SECONDS, reactor)
        printer.step("The mediator pushed it without being asked.")
        _read_message(alice, bob, delivered, text, printer)
        printer.check(
            "nothing waits once Bob has acknowledged", (await socket.acknowledge([delivered])).message_count == 0
        )
    finally:
        await socket.close()
    printer.step("Bob closed the socket.")


_CHAT = "chat.abc"
_OFFLINE = "Hello Bob, read this when you are back."
_ONLINE = "Hello Bob, this comes while you watch."
_TO_ALL = "Hello everybody."
_SHOWN = 70


async def demonstrate_decentrl(reactor: Any, url: str, other_url: str, printer: DemoPrinter) -> None:
    """
    All chapters.

    :param url: of Alice's mediator.
    :param other_url: of Bob's.
    :raise Failed: a step did.
    """
    http = open_http(reactor)
    printer.chapter("Decentrl: Alice and Bob register, each with a mediator of their own")
    alice = await _register_wallet(reactor, http, "Alice", url, printer)
    bob = await _register_wallet(reactor, http, "Bob", other_url, printer)
    await _make_contract_step(alice, bob, printer)
    await _send_event_while_offline(alice, bob, printer)
    await _send_event_while_online(reactor, alice, bob, printer)
    await _show_history(alice, bob, printer)
    await _publish_to_channel(alice, bob, printer)


async def _register_wallet(
    reactor: Any, http: TreqClient, name: str, url: str, printer: DemoPrinter
) -> DecentrlWallet:
    mediator = await discover_decentrl_mediator(http, url)
    wallet = DecentrlWallet.generate(name.lower(), mediator, http, reactor)
    printer.step(f"{name} made a DID that holds two public keys and the DID of a mediator.", wallet.did, mediator.did)
    registration = await wallet.register()
    printer.check(f"the mediator has signed its contract with {name}", registration.peer_did == mediator.did)
    return wallet


async def _make_contract_step(alice: DecentrlWallet, bob: DecentrlWallet, printer: DemoPrinter) -> None:
    printer.chapter("Decentrl: a contract, without which nobody may write to Bob")
    printer.check("Alice is refused as long as there is none", await _is_write_refused(alice, bob))
    await alice.request_contract(bob.did)
    printer.step("Alice signs one and asks Bob for it, at the mediator that his DID names.")
    (request,) = (await bob.pending_requests()).items
    printer.step(
        "Bob fetches the request. What his mediator sees:",
        f'encrypted_contract_request: "{truncate_text(request.encrypted_contract_request, _SHOWN)}"',
    )
    accepted = bob.accept(request)
    printer.step("He decrypts it with the private half of a key in his DID, and signs it as well.")
    await bob.save_contract(accepted)
    printer.step("He has his own mediator keep it: now Alice may write to him.")
    await bob.respond(accepted)
    printer.step("He gives it to hers: now he may write to Alice.")
    await bob.acknowledge_requests([request])
    printer.check("no request waits once Bob has acknowledged it", (await bob.pending_requests()).total == 0)
    (concluded,) = await alice.conclude()
    printer.step("Alice finds it at her mediator.", f"contract {concluded.id}")
    printer.check("both have one secret, which no mediator has", concluded.root_secret == accepted.root_secret)


async def _is_write_refused(alice: DecentrlWallet, bob: DecentrlWallet) -> bool:
    try:
        await alice.ask("junk", bob.did, decentrl_messages.PRIVATE_CHANNEL, at=bob.mediator)
    except CommandRefused as refusal:
        return refusal.code == "COMMUNICATION_CONTRACT_NOT_FOUND"
    return False


async def _send_event_while_offline(alice: DecentrlWallet, bob: DecentrlWallet, printer: DemoPrinter) -> None:
    printer.chapter("Decentrl: Bob is offline, Alice writes")
    await _write_event(alice, bob, _OFFLINE, printer)
    (event,) = (await bob.pending()).items
    printer.step(
        "Bob is back and fetches it. What his mediator sees:", f'payload: "{truncate_text(event.payload, _SHOWN)}"'
    )
    await _read_event(bob, event, _OFFLINE, printer)


async def _write_event(alice: DecentrlWallet, bob: DecentrlWallet, text: str, printer: DemoPrinter) -> None:
    event = _chat_event(text)
    await alice.send(bob.did, event)
    printer.step("Alice signs it, encrypts it under the contract, and sends it to Bob's mediator.")
    await alice.save_events(HistoryEntry(alice.did, bob.did, event, ("chat", _CHAT)))
    printer.step(
        "She keeps a copy at her own, encrypted for herself, with tags that mean nothing to others.",
        f'encrypted_tags: "{truncate_text(alice.identity.tag(_CHAT), _SHOWN)}"',
    )


async def _read_event(bob: DecentrlWallet, pending: PendingEvent, text: str, printer: DemoPrinter) -> None:
    event = bob.open(pending)
    printer.check("it is what Alice wrote, and proved to be from her", event.text == _chat_event(text))
    await bob.save_events(HistoryEntry(event.sender_did, bob.did, event.text, ("chat", _CHAT), event.timestamp))
    printer.step("Bob encrypts it for himself and keeps it at his mediator, with tags of his own.")
    await bob.acknowledge([pending])
    printer.check("nothing waits once Bob has acknowledged", (await bob.pending()).total == 0)


async def _send_event_while_online(
    reactor: Any, alice: DecentrlWallet, bob: DecentrlWallet, printer: DemoPrinter
) -> None:
    printer.chapter("Decentrl: Bob is online, Alice writes again")
    socket = await connect_decentrl_socket(reactor, bob)
    try:
        printer.step("Bob opened a WebSocket and proved who he is.", bob.mediator.ws_url)
        await _write_event(alice, bob, _ONLINE, printer)
        pushed: Deferred[dict[str, Any]] = socket.pushed.get()
        (event,) = read_pushed_events(await pushed.addTimeout(PUSH_SECONDS, reactor))
        printer.step("Bob's mediator pushed it.")
        await _read_event(bob, event, _ONLINE, printer)
    finally:
        await socket.close()
    printer.step("Bob closed the socket.")


async def _show_history(alice: DecentrlWallet, bob: DecentrlWallet, printer: DemoPrinter) -> None:
    printer.chapter("Decentrl: both have all of it")
    for name, wallet in (("Alice", alice), ("Bob", bob)):
        kept = (await wallet.events(tags=[_CHAT])).items
        texts = [_chat_text(wallet.identity.unseal(one.payload)) for one in kept]
        printer.step(
            f"{name} asks for the tag of this chat, and decrypts what is found.", *(f'"{one}"' for one in texts)
        )
        printer.check("it is both messages, oldest first", texts == [_OFFLINE, _ONLINE])


async def _publish_to_channel(alice: DecentrlWallet, bob: DecentrlWallet, printer: DemoPrinter) -> None:
    printer.chapter("Decentrl: a public channel")
    event_id = await bob.publish(_chat_event(_TO_ALL), ["greeting"])
    printer.step("Bob published a signed event.", bob.mediator.public_url(truncate_text(bob.did, _SHOWN)))
    read = (await alice.public(bob.did, tags=["greeting"])).items
    printer.check("anybody can read it and check his signature", [_chat_text(one.event) for one in read] == [_TO_ALL])
    await bob.unpublish(event_id)
    printer.check("it is gone once Bob has deleted it", (await alice.public(bob.did)).total == 0)


def _chat_event(content: str) -> str:
    return encoding.dumps({"type": "chat.message", "data": {"chatId": "abc", "content": content}}).decode()


def _chat_text(event: str) -> str:
    return str(encoding.loads_object(event)["data"]["content"])


DEFAULT_URL = "http://127.0.0.1:8080"


def run_demo(url: str | None) -> int:
    """
    Run the demonstration. Its last wallet has a mediator of its own, which is a throw-away one.

    :param url: of a running mediator. None: the one at http://127.0.0.1:8080, or a throw-away one.
    :return: 0, or 1 when a step failed.
    """
    with ExitStack() as stack:
        try:
            if url is None:
                url = _find_running_mediator() or stack.enter_context(_start_temporary_mediator()).url
            click.echo("Starting one more, a throw-away one, for a wallet that is elsewhere.")
            other = stack.enter_context(run_temporary_daemon())
            task.react(_run_steps, (url, other.url))
        except DaemonStartError as error:
            click.secho(f"The throw-away mediator did not start: {error}", fg="red", err=True)
            return 1
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1


def _find_running_mediator() -> str | None:
    if not is_healthy(DEFAULT_URL):
        return None
    click.echo(f"There is a mediator at {DEFAULT_URL}.")
    return DEFAULT_URL


def _start_temporary_mediator() -> AbstractContextManager[TemporaryDaemon]:
    click.echo(f"No mediator at {DEFAULT_URL}: starting a throw-away one.")
    return run_temporary_daemon()


async def _run_steps(reactor: Any, url: str, other_url: str) -> None:
    printer = DemoPrinter()
    try:
        await demonstrate_didcomm(reactor, url, printer)
        await demonstrate_decentrl(reactor, url, other_url, printer)
    except Exception as error:
        click.echo()
        click.secho(f"The demonstration failed: {_describe_error(error)}", fg="red", err=True)
        raise SystemExit(1) from None
    click.echo()
    click.secho("Every step went as it must.", fg="green")


def _describe_error(error: Exception) -> str:
    if isinstance(error, (MediatorProblem, CommandRefused)):
        return f"the mediator refused ({error})"
    if isinstance(error, ConnectError):
        return "nobody answers at the mediator's address"
    if isinstance(error, ResponseNeverReceived) and "certificate verify failed" in str(error):
        return "nobody here trusts the mediator's certificate; --ca names a file with those to trust"
    if isinstance(error, (DemoStepFailed, UnreadableMessage, SocketClosedError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
