"""`mediatord demo`: throw-away wallets write to each other through a mediator, one step at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import click
from twisted.internet import task
from twisted.internet.error import ConnectError
from twisted.web.client import ResponseNeverReceived

from mediatord.wallet import demo_decentrl, demo_didcomm
from mediatord.wallet.decentrl.client import Refused
from mediatord.wallet.demo_narration import Failed, Narrator
from mediatord.wallet.mediation import Problem
from mediatord.wallet.packing import Unreadable
from mediatord.wallet.socket import SocketClosed
from mediatord.wallet.throwaway import Daemon, DaemonFailed, is_healthy, throw_away_daemon

DEFAULT_URL = "http://127.0.0.1:8080"


def main(url: str | None) -> int:
    """
    Run the demonstration. Its last wallet has a mediator of its own, which is a throw-away one.

    :param url: of a running mediator. None: the one at http://127.0.0.1:8080, or a throw-away one.
    :return: 0, or 1 when a step failed.
    """
    with ExitStack() as stack:
        try:
            if url is None:
                url = _running() or stack.enter_context(_started()).url
            click.echo("Starting one more, a throw-away one, for a wallet that is elsewhere.")
            other = stack.enter_context(throw_away_daemon())
            task.react(_demonstrate, (url, other.url))
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


async def _demonstrate(reactor: Any, url: str, other_url: str) -> None:
    say = Narrator()
    try:
        await demo_didcomm.tell(reactor, url, say)
        await demo_decentrl.tell(reactor, url, other_url, say)
    except Exception as error:
        click.echo()
        click.secho(f"The demonstration failed: {_in_words(error)}", fg="red", err=True)
        raise SystemExit(1) from None
    click.echo()
    click.secho("Every step went as it must.", fg="green")


def _in_words(error: Exception) -> str:
    if isinstance(error, (Problem, Refused)):
        return f"the mediator refused ({error})"
    if isinstance(error, ConnectError):
        return "nobody answers at the mediator's address"
    if isinstance(error, ResponseNeverReceived) and "certificate verify failed" in str(error):
        return "nobody here trusts the mediator's certificate; --ca names a file with those to trust"
    if isinstance(error, (Failed, Unreadable, SocketClosed)):
        return str(error)
    return f"{type(error).__name__}: {error}"
