"""`mediatord demo`: temporary wallets exchange messages through a mediator, by DIDComm v2 and v1, and by Decentrl."""

from __future__ import annotations

import textwrap
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import click
from treq.client import HTTPClient
from twisted.internet import task
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.error import ConnectError
from twisted.web.client import ResponseNeverReceived

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.push_notifications import PUSH_PROTOCOLS
from mediatord.protocol.didcomm_v1.envelope import pack_anoncrypt
from mediatord.runtime.progress_bar import progress_bar
from mediatord.wallet.decentrl_client import (
    PRIVATE_CHANNEL,
    CommandRefused,
    DecentrlWallet,
    HistoryEntry,
    PendingEvent,
    connect_decentrl_socket,
    discover_decentrl_mediator,
    read_pushed_events,
)
from mediatord.wallet.didcomm_client import (
    DeliveredMessage,
    DIDCommWallet,
    MediatorProblem,
    discover_mediator,
    fetch_invitation,
    open_http,
)
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    UnreadableMessage,
    anoncrypt,
    authcrypt,
    build_forward,
    compose_message,
)
from mediatord.wallet.didcomm_socket import SocketClosedError, connect_didcomm_socket
from mediatord.wallet.didcomm_v1_client import BASIC_MESSAGE as V1_BASIC_MESSAGE
from mediatord.wallet.didcomm_v1_client import V1Wallet, fetch_v1_invitation
from mediatord.wallet.didcomm_v1_messages import compose_v1_message
from mediatord.wallet.temporary_daemon import DaemonStartError, is_healthy, run_temporary_daemon
from mediatord.wallet.web_push_receiver import PushRefused, WebPushReceiver, WebPushSubscription

_PUSH_TIMEOUT_SECONDS = 30.0
_WIDTH = 96
_TEXT_LENGTH = 70
_DEFAULT_URL = "http://127.0.0.1:8080"
_OFFLINE_TEXT = "Hello Bob, read this when you are back."
_ONLINE_TEXT = "Hello Bob, you are online."
_WAKE_TEXT = "Hello Bob, wake up."
_V1_TEXT = "Hello Carol, read this when you are back."
_V1_REPLY_TEXT = "Hello Bob, I am back."
_PUBLIC_TEXT = "Hello everybody."
_CHAT_TAG = "chat.abc"
_BAD_BODY = "e.p.msg.bad-body"


class DemoStepFailed(Exception):
    """A check of the demo failed."""


class DemoPrinter:
    """Numbers the steps and prints them."""

    def __init__(self) -> None:
        self._steps = 0

    def section(self, title: str) -> None:
        """Print the heading of the next steps."""
        click.echo()
        click.secho(title, bold=True)

    def step(self, text: str, *details: str) -> None:
        """Print a step and details of it."""
        self._steps += 1
        click.echo(f"  {click.style(f'{self._steps:2}', fg='cyan')}  {text}")
        for detail in details:
            for line in textwrap.wrap(detail, _WIDTH, break_on_hyphens=False) or [""]:
                click.secho(f"      {line}", dim=True)

    def note(self, text: str) -> None:
        """Print why steps are left out."""
        click.secho(f"      {text}", dim=True)

    def check(self, text: str, passed: bool) -> None:
        """
        Print the result of a check.

        :raise DemoStepFailed: it failed.
        """
        verdict = click.style("ok", fg="green") if passed else click.style("failed", fg="red")
        click.echo(f"      {verdict}  {text}")
        if not passed:
            raise DemoStepFailed(text)


def truncate_text(text: str, length: int = _TEXT_LENGTH) -> str:
    """The beginning of a long text."""
    return text if len(text) <= length else text[:length] + "..."


@dataclass(frozen=True, slots=True)
class PushDemo:
    """A push service on loopback, which wakes Bob's wallet."""

    reactor: Any
    receiver: WebPushReceiver
    printer: DemoPrinter

    def show_registration(self, subscription: WebPushSubscription) -> None:
        """Bob's wallet has subscribed, and registered the subscription."""
        self.printer.step(
            "Bob's wallet subscribed at a push service, as a phone would, for messages of his mediator only.",
            truncate_text(subscription.endpoint),
        )
        self.printer.step("Bob's wallet registered the subscription at his mediator.")

    def show_sleep(self) -> None:
        """Bob's wallet has closed its socket."""
        self.printer.step(
            "Bob's wallet closed the socket, and sleeps.",
            "the mediator does not wake it within push.quiet_after_poll of its last request",
        )

    async def wake(self, subscription: WebPushSubscription) -> None:
        """
        Wait for the wake-up of a wallet that sleeps, and show what is in it.

        :raise DemoStepFailed: there is none, or it contains too much.
        """
        printer = self.printer
        try:
            ciphertext = await subscription.next_message().addTimeout(_PUSH_TIMEOUT_SECONDS, self.reactor)
        except TimeoutError:
            raise DemoStepFailed(
                f"the mediator sent no wake-up to {self.receiver.url} within {_PUSH_TIMEOUT_SECONDS:.0f} s; see "
                "outbound.allow_private and push.quiet_after_poll"
            ) from None
        printer.step(
            "The mediator sent a wake-up to the push service, which verified who sent it, but cannot read it:",
            f"{len(ciphertext)} bytes: {truncate_text(ciphertext.hex())}",
        )
        content = encoding.loads_object(subscription.decrypt(ciphertext))
        printer.step("The push service woke Bob's wallet, which decrypted:", encoding.dumps(content).decode())
        members = set(content) - {"message_ids"}  # an operator may have switched them on
        printer.check("it names the mediator, but neither sender nor text", members == {"mediator"})


@dataclass(frozen=True, slots=True)
class _DIDCommDemo:
    """
    Alice sends messages to Bob, who has an account at the mediator.

    :param push: None if the mediator cannot reach a push service on loopback.
    """

    reactor: Any
    url: str
    printer: DemoPrinter
    push: PushDemo | None

    async def run(self) -> None:
        """
        Run all steps.

        :raise DemoStepFailed: a check failed.
        """
        printer, http = self.printer, open_http(self.reactor)
        printer.section("DIDComm: discovering the mediator")
        invitation = await fetch_invitation(http, self.url)
        printer.step(f"Fetched {self.url}/invitation.", f"goal: {invitation['body'].get('goal', '')}")
        mediator = await discover_mediator(http, self.url)
        printer.step("Resolved the mediator's DID from the invitation.", mediator.did)
        printer.step("Read its endpoints.", f"{mediator.http_uri}   {mediator.ws_uri or 'no WebSocket'}")

        printer.section("DIDComm: Bob enrols")
        bob = DIDCommWallet.generate(mediator, http, self.reactor)
        printer.step("Bob created a DID whose service is the mediator's DID.", bob.did)
        await bob.ping()
        printer.step("Bob pinged the mediator; the response is encrypted and authenticated.")
        await bob.enrol()
        printer.step("Bob requested mediation, and it was granted.")
        printer.check("Bob's DID is registered", await bob.register() == ["success"])
        alice = DIDCommWallet.generate(mediator, http, self.reactor)
        await self._send_while_offline(alice, bob)
        await self._send_while_live(alice, bob)
        await self._send_while_asleep(alice, bob)
        await self._exchange_with_v1(http, bob)

    async def _send_while_offline(self, alice: DIDCommWallet, bob: DIDCommWallet) -> None:
        printer = self.printer
        printer.section("DIDComm: Alice sends a message while Bob is offline")
        message = compose_message(BASIC_MESSAGE, {"content": "..."}, to=[bob.did], **{"from": alice.did})
        inner = encoding.loads_object(authcrypt(message, alice.identity, bob.identity.document))
        printer.step("Alice encrypts the message for Bob, and a forward that contains it for the mediator.")
        printer.step(
            "The mediator decrypts the forward. It sees the recipient and a ciphertext:",
            f'next: "{truncate_text(bob.did)}"',
            f'attachment: {{"ciphertext": "{truncate_text(str(inner["ciphertext"]), 60)}", ...}}',
            "no sender, no text",
        )
        await alice.send(bob.did, _OFFLINE_TEXT)
        printer.step("Alice sent it. The mediator answered 202: the message is on disk.")
        printer.check("one message is queued for Bob", (await bob.status()).message_count == 1)
        (delivered,) = await bob.fetch()
        printer.step("Bob is back and fetched it.")
        self._open_message(alice, bob, delivered, _OFFLINE_TEXT)
        status = await bob.acknowledge([delivered])
        printer.check("Bob acknowledged it, and his queue is empty", status.message_count == 0)

    async def _send_while_live(self, alice: DIDCommWallet, bob: DIDCommWallet) -> None:
        printer = self.printer
        printer.section("DIDComm: Alice sends a message while Bob is online")
        socket = await connect_didcomm_socket(self.reactor, bob)
        try:
            printer.step("Bob opened a WebSocket.")
            printer.check("live delivery is on", (await socket.live()).live_delivery is True)
            await alice.send(bob.did, _ONLINE_TEXT)
            printer.step("Alice sent a message.")
            pushed: Deferred[DeliveredMessage] = socket.pushed.get()
            delivered = await pushed.addTimeout(_PUSH_TIMEOUT_SECONDS, self.reactor)
            printer.step("The mediator pushed it.")
            self._open_message(alice, bob, delivered, _ONLINE_TEXT)
            status = await socket.acknowledge([delivered])
            printer.check("Bob acknowledged it, and his queue is empty", status.message_count == 0)
        finally:
            await socket.close()
        printer.step("Bob closed the socket.")

    async def _send_while_asleep(self, alice: DIDCommWallet, bob: DIDCommWallet) -> None:
        printer, push = self.printer, self.push
        printer.section("DIDComm: Alice sends a message while Bob's wallet sleeps")
        if not await bob.serves(PUSH_PROTOCOLS["web_push"].uri):
            printer.note("Left out: the mediator has no Web Push configured.")
            return
        if push is None:
            printer.note("Left out: the mediator cannot reach the push service of this demo, at 127.0.0.1.")
            return
        subscription = push.receiver.subscribe(await bob.vapid_public_key())
        try:
            await bob.set_push_device("web_push", subscription.to_json())
        except MediatorProblem as problem:
            if problem.code != _BAD_BODY:
                raise
            printer.note("Left out: the mediator accepts no push service at 127.0.0.1 (outbound.allow_private).")
            return
        push.show_registration(subscription)
        socket = await connect_didcomm_socket(self.reactor, bob)
        try:
            printer.step("Bob opened a WebSocket.")
            printer.check("live delivery is on", (await socket.live()).live_delivery is True)
        finally:
            await socket.close()
        push.show_sleep()
        await alice.send(bob.did, _WAKE_TEXT)
        printer.step("Alice sent a message. The mediator answered 202: the message is on disk.")
        await push.wake(subscription)
        (delivered,) = await bob.fetch()
        printer.step("Bob's wallet fetched the message.")
        self._open_message(alice, bob, delivered, _WAKE_TEXT)
        status = await bob.acknowledge([delivered])
        printer.check("Bob acknowledged it, and his queue is empty", status.message_count == 0)
        await bob.remove_push_devices("web_push")

    async def _exchange_with_v1(self, http: HTTPClient, bob: DIDCommWallet) -> None:
        """A wallet of v1 sleeps while it is sent a message, and answers the one of v2, which is online."""
        printer = self.printer
        printer.section("DIDComm v1 and v2: Bob sends a message to Carol, whose wallet speaks v1 and sleeps")
        try:
            invitation = await fetch_v1_invitation(http, self.url)
        except UnreadableMessage:
            printer.note("Left out: the mediator has no invitation for DIDComm v1 (didcomm_v1.enabled).")
            return
        carol = await V1Wallet.connect(invitation, http, self.reactor)
        printer.step(f"Carol connected by {self.url}/invitation/v1, with DID Exchange.")
        route = await carol.enrol()
        printer.step("Carol requested mediation, and it was granted.", f"routing key {route.routing_keys[0]}")
        key = (await carol.add_key()).did_key
        printer.step("Carol registered a key, and sleeps.", key)
        message = compose_v1_message(V1_BASIC_MESSAGE, {"content": _V1_TEXT})
        forward = build_forward(key, [pack_anoncrypt(encoding.dumps(message), key)], to=[bob.mediator.did])
        response = await bob.post(anoncrypt(forward, bob.mediator.document))
        printer.step("Bob encrypted a message of v1 to her key, and sent it in a forward of v2.")
        printer.check("the mediator answered 202: the message is on disk", response.status == 202)
        socket = await connect_didcomm_socket(self.reactor, bob)
        try:
            await socket.live()
            printer.step("Bob opened a WebSocket and turned on live delivery.")
            (delivered,) = await carol.fetch()
            printer.step("Carol is back and fetched the message by Message Pickup 2.0.")
            printer.check("the text is intact", carol.open(delivered).text == _V1_TEXT)
            status = await carol.acknowledge([delivered])
            printer.check("Carol acknowledged it, and her queue is empty", status.message_count == 0)
            answer = compose_message(BASIC_MESSAGE, {"content": _V1_REPLY_TEXT}, to=[bob.did])
            await carol.post(carol.wrap(bob.did, anoncrypt(answer, bob.identity.document)), url=route.endpoint)
            printer.step("Carol encrypted a message of v2 to Bob's DID, and sent it in a forward of v1.")
            pushed: Deferred[DeliveredMessage] = socket.pushed.get()
            received = await pushed.addTimeout(_PUSH_TIMEOUT_SECONDS, self.reactor)
            printer.step("The mediator pushed it to Bob.")
            printer.check("the text is intact", bob.open(received).text == _V1_REPLY_TEXT)
            left = await socket.acknowledge([received])
            printer.check("Bob acknowledged it, and his queue is empty", left.message_count == 0)
        finally:
            await socket.close()

    def _open_message(self, alice: DIDCommWallet, bob: DIDCommWallet, delivered: DeliveredMessage, text: str) -> None:
        opened = bob.open(delivered)
        self.printer.step("Bob decrypted it.", f'"{opened.text}"')
        matches = (opened.text, opened.sender) == (text, alice.did)
        self.printer.check("the text is intact and the sender is authenticated", matches)


@dataclass(frozen=True, slots=True)
class _DecentrlDemo:
    """Alice sends events to Bob, who has another mediator; the mediators do not communicate."""

    reactor: Any
    urls: tuple[str, str]
    printer: DemoPrinter
    push: PushDemo

    async def run(self) -> None:
        """
        Run all steps.

        :raise DemoStepFailed: a check failed.
        """
        self.printer.section("Decentrl: Alice and Bob register at different mediators")
        http = open_http(self.reactor)
        alice, bob = [
            await self._register(http, name, url) for name, url in zip(("Alice", "Bob"), self.urls, strict=True)
        ]
        await self._make_contract(alice, bob)
        await self._send_while_offline(alice, bob)
        await self._send_while_online(alice, bob)
        await self._send_while_asleep(alice, bob)
        await self._query_history(alice, bob)
        await self._publish(alice, bob)

    async def _register(self, http: HTTPClient, name: str, url: str) -> DecentrlWallet:
        mediator = await discover_decentrl_mediator(http, url)
        wallet = DecentrlWallet.generate(name.lower(), mediator, http, self.reactor)
        self.printer.step(
            f"{name} created a DID that contains two public keys and a mediator's DID.", wallet.did, mediator.did
        )
        registration = await wallet.register()
        self.printer.check(f"the mediator signed a contract with {name}", registration.peer_did == mediator.did)
        return wallet

    async def _make_contract(self, alice: DecentrlWallet, bob: DecentrlWallet) -> None:
        printer = self.printer
        printer.section("Decentrl: a contract, without which Bob's mediator accepts no events for him")
        try:
            await alice.ask("junk", bob.did, PRIVATE_CHANNEL, at=bob.mediator)
            refusal = ""
        except CommandRefused as error:
            refusal = error.code
        printer.check("without a contract Alice is refused", refusal == "COMMUNICATION_CONTRACT_NOT_FOUND")
        await alice.request_contract(bob.did)
        printer.step("Alice signed a contract and requested it from Bob, at the mediator that his DID names.")
        (request,) = (await bob.pending_requests()).items
        printer.step(
            "Bob fetched the request. What his mediator sees:",
            f'encrypted_contract_request: "{truncate_text(request.encrypted_contract_request)}"',
        )
        accepted = bob.accept(request)
        printer.step("Bob decrypted it with the private key of his DID, and countersigned it.")
        await bob.save_contract(accepted)
        printer.step("Bob saved it at his mediator, which now accepts Alice's events.")
        await bob.respond(accepted)
        printer.step("Bob sent it to Alice's mediator, which now accepts Bob's events.")
        await bob.acknowledge_requests([request])
        printer.check("no request is left after Bob's acknowledgement", (await bob.pending_requests()).total == 0)
        (concluded,) = await alice.conclude()
        printer.step("Alice found the contract at her mediator.", f"contract {concluded.id}")
        same = concluded.root_secret == accepted.root_secret
        printer.check("both have the same secret, which no mediator knows", same)

    async def _send_while_offline(self, alice: DecentrlWallet, bob: DecentrlWallet) -> None:
        self.printer.section("Decentrl: Alice sends an event while Bob is offline")
        await self._send_event(alice, bob, _OFFLINE_TEXT)
        (event,) = (await bob.pending()).items
        self.printer.step(
            "Bob is back and fetched it. What his mediator sees:", f'payload: "{truncate_text(event.payload)}"'
        )
        await self._open_event(bob, event, _OFFLINE_TEXT)

    async def _send_while_online(self, alice: DecentrlWallet, bob: DecentrlWallet) -> None:
        printer = self.printer
        printer.section("Decentrl: Alice sends an event while Bob is online")
        socket = await connect_decentrl_socket(self.reactor, bob)
        try:
            printer.step("Bob opened a WebSocket and authenticated.", bob.mediator.ws_url)
            await self._send_event(alice, bob, _ONLINE_TEXT)
            pushed: Deferred[dict[str, Any]] = socket.pushed.get()
            (event,) = read_pushed_events(await pushed.addTimeout(_PUSH_TIMEOUT_SECONDS, self.reactor))
            printer.step("Bob's mediator pushed it.")
            await self._open_event(bob, event, _ONLINE_TEXT)
        finally:
            await socket.close()
        printer.step("Bob closed the socket.")

    async def _send_while_asleep(self, alice: DecentrlWallet, bob: DecentrlWallet) -> None:
        printer = self.printer
        printer.section("Decentrl: Alice sends an event while Bob's wallet sleeps")
        server_key = (await bob.push_devices()).vapid_public_key
        printer.check("Bob's mediator has Web Push", server_key is not None)
        subscription = self.push.receiver.subscribe(server_key or "")
        await bob.set_push_device("web_push", subscription.to_json())
        self.push.show_registration(subscription)
        socket = await connect_decentrl_socket(self.reactor, bob)
        printer.step("Bob opened a WebSocket and authenticated.")
        await socket.close()
        self.push.show_sleep()
        await self._send_event(alice, bob, _WAKE_TEXT)
        await self.push.wake(subscription)
        (event,) = (await bob.pending()).items
        printer.step("Bob's wallet fetched the event.")
        await self._open_event(bob, event, _WAKE_TEXT)

    async def _send_event(self, alice: DecentrlWallet, bob: DecentrlWallet, text: str) -> None:
        event = _make_chat_event(text)
        await alice.send(bob.did, event)
        self.printer.step("Alice signed an event, encrypted it under the contract, and sent it to Bob's mediator.")
        await alice.save_events(HistoryEntry(alice.did, bob.did, event, ("chat", _CHAT_TAG)))
        self.printer.step(
            "Alice stored a copy at her mediator, encrypted for herself, with encrypted tags.",
            f'encrypted_tags: "{truncate_text(alice.identity.tag(_CHAT_TAG))}"',
        )

    async def _open_event(self, bob: DecentrlWallet, pending: PendingEvent, text: str) -> None:
        event = bob.open(pending)
        matches = event.text == _make_chat_event(text)
        self.printer.check("the text is intact and the sender is authenticated", matches)
        tags = ("chat", _CHAT_TAG)
        await bob.save_events(HistoryEntry(event.sender_did, bob.did, event.text, tags, event.timestamp))
        self.printer.step("Bob stored it at his mediator, encrypted for himself, with tags of his own.")
        await bob.acknowledge([pending])
        self.printer.check("Bob acknowledged it, and his queue is empty", (await bob.pending()).total == 0)

    async def _query_history(self, alice: DecentrlWallet, bob: DecentrlWallet) -> None:
        self.printer.section("Decentrl: querying the history")
        for name, wallet in (("Alice", alice), ("Bob", bob)):
            events = (await wallet.events(tags=[_CHAT_TAG])).items
            texts = [_read_chat_event(wallet.identity.unseal(event.payload)) for event in events]
            self.printer.step(
                f"{name} queried events by the tag of the chat, and decrypted them.", *(f'"{text}"' for text in texts)
            )
            expected = [_OFFLINE_TEXT, _ONLINE_TEXT, _WAKE_TEXT]
            self.printer.check("all messages, in order of time", texts == expected)

    async def _publish(self, alice: DecentrlWallet, bob: DecentrlWallet) -> None:
        printer = self.printer
        printer.section("Decentrl: a public channel")
        event_id = await bob.publish(_make_chat_event(_PUBLIC_TEXT), ["greeting"])
        printer.step("Bob published a signed event.", bob.mediator.public_url(truncate_text(bob.did)))
        events = (await alice.public(bob.did, tags=["greeting"])).items
        texts = [_read_chat_event(event.event) for event in events]
        printer.check("anybody can read it and verify the signature", texts == [_PUBLIC_TEXT])
        await bob.unpublish(event_id)
        printer.check("it is gone after Bob deleted it", (await alice.public(bob.did)).total == 0)


def _make_chat_event(content: str) -> str:
    return encoding.dumps({"type": "chat.message", "data": {"chatId": "abc", "content": content}}).decode()


def _read_chat_event(event: str) -> str:
    return str(encoding.loads_object(event)["data"]["content"])


def run_demo(url: str | None) -> int:
    """
    Run the demo, with a temporary mediator for the second Decentrl wallet.

    :param url: of a running mediator. None for the one at http://127.0.0.1:8080, or a temporary one.
    :return: exit status: 1 if a step failed.
    """
    with ExitStack() as stack:
        try:
            if url is None and is_healthy(_DEFAULT_URL):
                url = _DEFAULT_URL
                click.echo(f"Using the mediator at {url}.")
            elif url is None:
                click.echo(f"No mediator at {_DEFAULT_URL}: starting a temporary one.")
                with progress_bar("starting"):
                    url = stack.enter_context(run_temporary_daemon(web_push=True)).url
            click.echo("Starting a second, temporary mediator for a wallet that is registered elsewhere.")
            with progress_bar("starting"):
                other = stack.enter_context(run_temporary_daemon(web_push=True))
            task.react(_run_steps, (url, other.url))
        except DaemonStartError as error:
            click.secho(f"The temporary mediator did not start: {error}", fg="red", err=True)
            return 1
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1


async def _run_steps(reactor: Any, url: str, other_url: str) -> None:
    printer, receiver = DemoPrinter(), WebPushReceiver(reactor)
    receiver.start()
    push = PushDemo(reactor, receiver, printer)
    try:
        await _DIDCommDemo(reactor, url, printer, push if is_on_loopback(url) else None).run()
        await _DecentrlDemo(reactor, (url, other_url), printer, push).run()
    except Exception as error:
        click.echo()
        click.secho(f"The demo failed: {_describe_error(error, url)}", fg="red", err=True)
        raise SystemExit(1) from None
    click.echo()
    click.secho("All steps succeeded.", fg="green")


def is_on_loopback(url: str) -> bool:
    """Whether the host of a URL is this one, by a loopback address or as localhost."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _describe_error(error: Exception, url: str) -> str:
    if isinstance(error, (MediatorProblem, CommandRefused)):
        return f"the mediator rejected a request ({error})"
    if isinstance(error, ConnectError):
        return f"cannot connect to the mediator at {url}"
    if isinstance(error, ResponseNeverReceived) and "certificate verify failed" in str(error):
        return "the mediator's certificate is not trusted; use --ca to trust its certificate authority"
    if isinstance(error, (DemoStepFailed, UnreadableMessage, SocketClosedError, PushRefused)):
        return str(error)
    return f"{type(error).__name__}: {error}"
