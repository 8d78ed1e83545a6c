"""`mediatord demo`: two throw-away wallets write to each other through a mediator, one step at a time."""

from __future__ import annotations

import textwrap
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import click
from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectError

from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.did import DIDDocument
from mediatord.wallet.client import Wallet
from mediatord.wallet.mediation import Delivered, Problem
from mediatord.wallet.mediator import HTTP, Mediator, discover, invitation, open_http
from mediatord.wallet.packing import BASIC_MESSAGE, Unreadable, authcrypt, compose, forward
from mediatord.wallet.socket import SocketClosed, connect
from mediatord.wallet.throwaway import Daemon, DaemonFailed, is_healthy, throw_away_daemon

DEFAULT_URL = "http://127.0.0.1:8080"

_PUSH_SECONDS = 10.0
_WIDTH = 96


class _Failed(Exception):
    """A step did not end as it must."""


class _Narrator:
    """Numbers the steps and prints them."""

    def __init__(self) -> None:
        self._steps = 0

    def chapter(self, title: str) -> None:
        click.echo()
        click.secho(title, bold=True)

    def step(self, text: str, *details: str) -> None:
        self._steps += 1
        click.echo(f"  {click.style(f'{self._steps:2}', fg='cyan')}  {text}")
        for detail in details:
            lines = textwrap.wrap(detail, _WIDTH, break_on_hyphens=False) or [""]
            for line in lines:
                click.secho(f"      {line}", dim=True)

    def check(self, text: str, passed: bool) -> None:
        """
        A step that can go wrong.

        :raise _Failed: it did.
        """
        mark = click.style("ok", fg="green") if passed else click.style("no", fg="red")
        click.echo(f"      {mark}  {text}")
        if not passed:
            raise _Failed(text)


def main(url: str | None) -> int:
    """
    Run the demonstration.

    :param url: of a running mediator. None: the one at http://127.0.0.1:8080, or a throw-away one.
    :return: 0, or 1 when a step failed.
    """
    with ExitStack() as stack:
        try:
            if url is None:
                url = _running() or stack.enter_context(_started()).url
            task.react(_demonstrate, (url,))
        except DaemonFailed as error:
            click.secho(f"The throw-away mediator did not start: {error}", fg="red", err=True)
            return 1
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1


def _running() -> str | None:
    if not is_healthy(DEFAULT_URL):
        return None
    click.echo(f"There is a mediator at {DEFAULT_URL}.")
    return DEFAULT_URL


def _started() -> AbstractContextManager[Daemon]:
    click.echo(f"No mediator at {DEFAULT_URL}: starting a throw-away one.")
    return throw_away_daemon()


async def _demonstrate(reactor: Any, url: str) -> None:
    say = _Narrator()
    try:
        await _all_chapters(reactor, url, say)
    except Exception as error:
        click.echo()
        click.secho(f"The demonstration failed: {_in_words(error)}", fg="red", err=True)
        raise SystemExit(1) from None
    click.echo()
    click.secho("Every step went as it must.", fg="green")


def _in_words(error: Exception) -> str:
    if isinstance(error, Problem):
        return f"the mediator refused ({error})"
    if isinstance(error, ConnectError):
        return "nobody answers at the mediator's address"
    if isinstance(error, (_Failed, Unreadable, SocketClosed)):
        return str(error)
    return f"{type(error).__name__}: {error}"


async def _all_chapters(reactor: Any, url: str, say: _Narrator) -> None:
    http = open_http(reactor)
    mediator = await _meet(http, url, say)
    bob = await _enrolled_bob(reactor, http, mediator, say)
    alice = Wallet.fresh(mediator, http, reactor)
    await _offline(alice, bob, say)
    await _live(reactor, alice, bob, say)


async def _meet(http: HTTP, url: str, say: _Narrator) -> Mediator:
    say.chapter("Meeting the mediator")
    found = await invitation(http, url)
    say.step(f"Fetched the invitation from {url}/invitation.", f"goal: {found['body'].get('goal', '')}")
    mediator = await discover(http, url)
    say.step("Resolved the mediator's DID from the invitation.", mediator.did)
    say.step("Its document names where to reach it.", f"{mediator.http_uri}   {mediator.ws_uri or 'no WebSocket'}")
    return mediator


async def _enrolled_bob(reactor: Any, http: HTTP, mediator: Mediator, say: _Narrator) -> Wallet:
    say.chapter("Bob gets a mailbox")
    bob = Wallet.fresh(mediator, http, reactor)
    say.step("Bob made himself a DID whose only address is the mediator's DID.", bob.did)
    await bob.ping()
    say.step("Bob pinged the mediator; the answer is encrypted to him and proves who sent it.")
    await bob.enrol()
    say.step("Bob asked for mediation, and it was granted.")
    say.check("his DID is registered", await bob.register() == ["success"])
    return bob


async def _offline(alice: Wallet, bob: Wallet, say: _Narrator) -> None:
    say.chapter("Bob is offline, Alice writes")
    _show_what_is_seen(alice, bob, say)
    text = "Hello Bob, read this when you are back."
    await alice.send(bob.did, text)
    say.step("Alice sent it. The mediator said 202: it is on disk.")
    say.check("one message waits for Bob", (await bob.status()).message_count == 1)
    say.step("Bob is back and picks it up.")
    (delivered,) = await bob.fetch()
    _read(alice, bob, delivered, text, say)
    say.check("nothing waits once Bob has acknowledged", (await bob.acknowledge([delivered])).message_count == 0)


def _show_what_is_seen(alice: Wallet, bob: Wallet, say: _Narrator) -> None:
    inner = authcrypt(_note(alice, bob.identity.document), alice.identity, bob.identity.document)
    seen = forward(bob.did, [inner], to=[alice.mediator.did])
    data = jsontext.loads_object(inner)
    say.step("Alice encrypts for Bob, puts that into a forward, and encrypts the forward for the mediator.")
    say.step(
        "What the mediator sees when it has opened the forward: where to, and something it has no key for.",
        f'next: "{_short(str(seen["body"]["next"]), 70)}"',
        f'attachment: {{"ciphertext": "{_short(str(data["ciphertext"]), 60)}", ...}}',
        "no sender, no text",
    )


def _note(alice: Wallet, recipient: DIDDocument) -> dict[str, Any]:
    return compose(BASIC_MESSAGE, {"content": "..."}, to=[recipient.did], **{"from": alice.did})


def _read(alice: Wallet, bob: Wallet, delivered: Delivered, text: str, say: _Narrator) -> None:
    opened = bob.open(delivered)
    say.step("Bob decrypts what came.", f'"{opened.text}"')
    say.check("it is what Alice wrote, and proved to be from her", (opened.text, opened.sender) == (text, alice.did))


async def _live(reactor: Any, alice: Wallet, bob: Wallet, say: _Narrator) -> None:
    say.chapter("Bob is online, Alice writes again")
    socket = await connect(reactor, bob)
    try:
        say.step("Bob opened a WebSocket.")
        say.check("live delivery is on", (await socket.live()).live_delivery is True)
        text = "Hello Bob, this comes while you watch."
        await alice.send(bob.did, text)
        say.step("Alice sent it.")
        pushed: Deferred[Delivered] = socket.pushed.get()
        delivered = await pushed.addTimeout(_PUSH_SECONDS, reactor)
        say.step("The mediator pushed it without being asked.")
        _read(alice, bob, delivered, text, say)
        say.check(
            "nothing waits once Bob has acknowledged", (await socket.acknowledge([delivered])).message_count == 0
        )
    finally:
        await socket.close()
    say.step("Bob closed the socket.")


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "..."
