"""`mediatord run`, and the hidden subcommands that run its child processes."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.stdio import StandardIO
from twisted.logger import globalLogBeginner

from mediatord import __version__
from mediatord.app.daemon import build_daemon
from mediatord.app.push import SenderSpec, build_requester, load_push_credentials
from mediatord.cli.console import config_option, find_program_name
from mediatord.cli.init import make_local_url
from mediatord.cli.keys import read_identity
from mediatord.config.file import load_config
from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.identity.invitation import build_short_invitation_url, make_v1_invitation
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.net.listeners import find_self_signed_certificate
from mediatord.push.sender_process import COMMAND_FD, REPORT_FD, SENDER_SUBCOMMAND, SenderServer, write_start_error
from mediatord.runtime.epoll_reactor import use_lean_events
from mediatord.runtime.reactor_clock import install_monotonic_clock
from mediatord.tap import DaemonService
from mediatord.workers.supervised_worker import SPEC_FD, WorkerSpec
from mediatord.workers.supervisor_connection import SupervisorConnection, reset_hang_alarm


@click.command()
@config_option
def run(path: Path) -> None:
    """Run the daemon in the foreground."""
    config = load_config(path)
    banner = _make_banner(config, read_identity(config))
    # Not at the top: importing twistd installs a reactor.
    from twisted.scripts import twistd

    sys.argv = ["mediatord", "--nodaemon", "--pidfile=", "mediatord", "--config", str(path), "--banner", banner]
    twistd.run()


def _make_banner(config: Config, identity: MediatorIdentity) -> str:
    certificate = find_self_signed_certificate(config.public_url, config.listen)
    trusting = "" if certificate is None else f" --ca {shlex.quote(str(certificate))}"
    v1_lines = []
    if config.didcomm_v1.enabled:
        v1 = make_v1_invitation(config.public_url, identity.root_secret, config.didcomm_v1.label)
        v1_lines.append(f"v1 wallets  {v1.short_url}")
    return "\n".join(
        (
            f"mediatord {__version__} for {config.public_url}, on {', '.join(config.listen)}",
            "",
            f"DID         {identity.did}",
            f"            {identity.web_did}",
            f"invitation  {build_short_invitation_url(config.public_url)}",
            *v1_lines,
            "",
            f"try         open {config.public_url}/invitation in a browser, or in another terminal:",
            f"            {find_program_name()} demo --url {config.public_url}{trusting}",
            f"            {find_program_name()} status --url {_choose_status_url(config)}{trusting}",
            "",
        )
    )


def _choose_status_url(config: Config) -> str:
    """The public URL, or the local one behind a proxy, which hides /metrics and /ready."""
    is_proxied = config.public_url.startswith("https:") and config.listen[0].startswith("tcp:")
    return make_local_url(config) if is_proxied else config.public_url


@click.command(hidden=True)
@click.argument("name")
def worker(name: str) -> int:
    """
    Run one worker process until its supervisor, which has started it, stops it or is gone.

    :raise StartupError: it was not started by a supervisor.
    """
    # Before the reactor runs: a process that hangs earlier must end even if its supervisor is gone.
    reset_hang_alarm()
    try:
        with os.fdopen(SPEC_FD, "rb") as file:
            spec = WorkerSpec.from_bytes(file.read())
    except (OSError, ValueError):
        raise StartupError("only the daemon starts workers; use `mediatord run`") from None
    from twisted.internet import reactor as global_reactor  # noqa: TID251  this is the program

    reactor: Any = global_reactor
    use_lean_events(reactor)
    install_monotonic_clock(reactor)
    connection = SupervisorConnection(reactor, spec, partial(_exit_without_supervisor, Path(spec.node_socket).parent))
    root = DaemonService(reactor, connection.report_failure)
    reactor.callWhenRunning(connection.connect)
    reactor.callWhenRunning(globalLogBeginner.beginLoggingTo, [connection.observe])
    root.run(Config.model_validate_json(spec.settings), partial(build_daemon, worker=connection))
    root.privilegedStartService()
    root.startService()

    async def stop() -> None:
        await maybeDeferred(root.stopService)
        connection.leave()

    reactor.addSystemEventTrigger("before", "shutdown", lambda: Deferred.fromCoroutine(stop()))
    reactor.run()
    return 1 if root.failed else 0


def _exit_without_supervisor(directory: Path) -> NoReturn:
    """
    End at once, as the supervisor did; accepted messages are on disk.

    A worker that went on would conflict with the worker of the same name of the next daemon.
    """
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


@click.command(SENDER_SUBCOMMAND, hidden=True)
def push_sender() -> int:
    """
    Make the requests to push services until the daemon, which has started this process, stops it or is gone.

    :raise StartupError: it was not started by a daemon.
    """
    # The daemon ends it by closing its standard input.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        with os.fdopen(SPEC_FD, "rb") as file:
            spec = SenderSpec.from_bytes(file.read())
    except (OSError, ValueError):
        raise StartupError("only the daemon starts push senders; use `mediatord run`") from None
    try:
        credentials = load_push_credentials(spec.push)
    except StartupError as error:
        write_start_error(str(error))
        return 1
    from twisted.internet import reactor as global_reactor  # noqa: TID251  this is the program

    reactor: Any = global_reactor
    use_lean_events(reactor)
    install_monotonic_clock(reactor)
    make_requester = partial(build_requester, reactor, spec, credentials, monotonic=time.monotonic)
    # At once: threads that resolve host names could delay the end of the process.
    server = SenderServer(reactor, make_requester, lambda: os._exit(0))
    reactor.callWhenRunning(StandardIO, server, COMMAND_FD, REPORT_FD, reactor)
    reactor.callWhenRunning(globalLogBeginner.beginLoggingTo, [server.observe])
    reactor.run(installSignalHandlers=False)
    return 0
