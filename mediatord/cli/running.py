"""Subcommands that run something: the daemon, one of its processes, the demo, the benchmark."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from mediatord import __version__
from mediatord.cli.options import ca_option, config_option, url_option
from mediatord.config import Config, load
from mediatord.identity import Identity
from mediatord.invitation import invitation_url


@click.command()
@config_option
def run(path: Path) -> None:
    """Run the daemon in the foreground until it is interrupted."""
    from mediatord.cli.mediator import identity_of

    config = load(path)
    banner = _welcome(config, identity_of(config))
    # Here, and not at the top: twistd chooses the reactor.
    from twisted.scripts import twistd

    sys.argv = ["mediatord", "--nodaemon", "--pidfile=", "mediatord", "--config", str(path), "--banner", banner]
    twistd.run()


@click.command(hidden=True)
@click.argument("name")
def worker(name: str) -> int:
    """Be one of the processes of a daemon; its supervisor begins them."""
    from mediatord.cli.worker import serve

    return serve()


@click.command()
@url_option(help="A running mediator; without it one is started.")
@ca_option
def demo(url: str | None) -> int:
    """Let two throw-away wallets talk through a mediator, and show each step."""
    from mediatord.wallet.demo import main as run_demo

    return run_demo(url)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
    short_help="Measure how much a mediator takes.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> int:
    """Measure how much a mediator takes; the benchmark has a --help of its own."""
    from mediatord.bench.cli import bench as measure

    status = measure.main(list(arguments), prog_name="mediatord bench", standalone_mode=False)
    return status if isinstance(status, int) else 0


def program() -> str:
    """What to type to run this program again: its name, or where it is if it is not on the path."""
    called = Path(sys.argv[0])
    if called.name != "mediatord" or shutil.which("mediatord") == str(called.absolute()):
        return "mediatord"
    return os.path.relpath(called)


def _welcome(config: Config, identity: Identity) -> str:
    return "\n".join(
        (
            f"mediatord {__version__} for {config.public_url}, on {', '.join(config.listen)}",
            "",
            f"DID         {identity.did}",
            f"            {identity.web_did}",
            f"invitation  {invitation_url(config.public_url, identity.did)}",
            "",
            f"try         open {config.public_url}/invitation in a browser, or in another terminal:",
            f"            {program()} demo --url {config.public_url}",
            f"            {program()} status --url {config.public_url}",
            "",
        )
    )
