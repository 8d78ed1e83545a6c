"""Subcommands that run something: the daemon, a worker process, the demo, the benchmark."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import globalLogBeginner

from mediatord import __version__
from mediatord.app.daemon import build_daemon
from mediatord.cli.console import ca_option, config_option, url_option
from mediatord.clock import install_monotonic_clock
from mediatord.config.file import load_config
from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.identity.invitation import build_invitation_url
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.tap import DaemonService
from mediatord.workers.supervisor_connection import SupervisorConnection, reset_hang_alarm
from mediatord.workers.worker_process import SPEC_FD, WorkerSpec


def run_worker() -> int:
    """
    Run one worker until its supervisor stops it or is gone; returns the exit status.

    :raise StartupError: it was not started by a supervisor.
    """
    # Before the reactor runs: a process that hangs earlier must end even if its supervisor is gone.
    reset_hang_alarm()
    try:
        with os.fdopen(SPEC_FD, "rb") as file:
            spec = WorkerSpec.from_bytes(file.read())
    except (OSError, ValueError):
        raise StartupError("workers are started by mediatord run") from None
    from twisted.internet import reactor  # noqa: TID251  this is the program

    install_monotonic_clock(reactor)
    return _run_reactor(reactor, spec)


def _run_reactor(reactor: Any, spec: WorkerSpec) -> int:
    worker = SupervisorConnection(reactor, spec, partial(_exit_without_supervisor, Path(spec.node_socket).parent))
    root = DaemonService(reactor, worker.report_failure)
    reactor.callWhenRunning(worker.connect)
    reactor.callWhenRunning(globalLogBeginner.beginLoggingTo, [worker.observe])
    root.run(Config.model_validate_json(spec.settings), partial(build_daemon, worker=worker))
    root.privilegedStartService()
    root.startService()

    async def stop() -> None:
        await maybeDeferred(root.stopService)
        worker.leave()

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


@click.command()
@config_option
def run(path: Path) -> None:
    """Run the daemon in the foreground until it is interrupted."""
    from mediatord.cli.keys import read_identity

    config = load_config(path)
    banner = _make_banner(config, read_identity(config))
    # Not at the top: importing twistd installs a reactor.
    from twisted.scripts import twistd

    sys.argv = ["mediatord", "--nodaemon", "--pidfile=", "mediatord", "--config", str(path), "--banner", banner]
    twistd.run()


@click.command(hidden=True)
@click.argument("name")
def worker(name: str) -> int:
    """Run one worker process; started by the supervisor."""

    return run_worker()


@click.command()
@url_option(help="A running mediator; default: a temporary one.")
@ca_option
def demo(url: str | None) -> int:
    """Run a demo: two temporary wallets exchange messages through a mediator."""
    from mediatord.wallet.demo import run_demo

    return run_demo(url)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
    short_help="Run the benchmark.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> int:
    """Run the benchmark, which has its own --help."""
    from mediatord.bench.cli import bench as measure

    status = measure.main(list(arguments), prog_name="mediatord bench", standalone_mode=False)
    return status if isinstance(status, int) else 0


def find_program_name() -> str:
    """How to call this program from a shell: by name, or by path if it is not on the search path."""
    called = Path(sys.argv[0])
    if called.name != "mediatord" or shutil.which("mediatord") == str(called.absolute()):
        return "mediatord"
    return os.path.relpath(called)


def _make_banner(config: Config, identity: MediatorIdentity) -> str:
    return "\n".join(
        (
            f"mediatord {__version__} for {config.public_url}, on {', '.join(config.listen)}",
            "",
            f"DID         {identity.did}",
            f"            {identity.web_did}",
            f"invitation  {build_invitation_url(config.public_url, identity.did)}",
            "",
            f"try         open {config.public_url}/invitation in a browser, or in another terminal:",
            f"            {find_program_name()} demo --url {config.public_url}",
            f"            {find_program_name()} status --url {config.public_url}",
            "",
        )
    )
