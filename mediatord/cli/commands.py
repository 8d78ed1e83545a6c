"""The subcommands, and what becomes of their errors."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from mediatord import __version__
from mediatord.cli.files import SetupError, set_up
from mediatord.cli.pseudonyms import log_keys, whois
from mediatord.cli.status import Unreachable, ask_status
from mediatord.config import Config, ConfigError, load
from mediatord.config.values import split_url
from mediatord.identity import Identity, IdentityError
from mediatord.invitation import invitation_url, qr_terminal
from mediatord.keyfile import load_keys
from mediatord.private_file import PrivateFileError
from mediatord.service import StartupError, refuse_unavailable

_FAILED, _WRONG_USAGE = 1, 2
_FAILURES = (StartupError, SetupError, Unreachable, IdentityError, PrivateFileError)
_LOCAL_URL = "http://127.0.0.1:8080"

_config_option = click.option(
    "--config",
    "path",
    required=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="The configuration, mediator.yaml.",
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a subcommand and exit. :param arguments: without the name of the program; by default those it was given."""
    sys.exit(_status_of(arguments))


def _status_of(arguments: Sequence[str] | None) -> int:
    try:
        status = cli.main(arguments, prog_name="mediatord", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return _WRONG_USAGE
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except ConfigError as error:
        more = len(error.problems) - 1
        hint = f" (and {more} more; mediatord check-config lists all)" if more else ""
        return _complain(error.problems[0] + hint, _WRONG_USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", _FAILED)
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), _FAILED)
    except _FAILURES as error:
        return _complain(str(error), _FAILED)


def _complain(text: str, status: int) -> int:
    click.echo(f"mediatord: {' '.join(text.split())}", err=True)
    return status


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mediatord", message="%(prog)s %(version)s")
def cli() -> None:
    """A store-and-forward mediator for DIDComm v2 and Decentrl wallets."""


@cli.command()
@click.option(
    "--dir",
    "directory",
    default=".",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write; made if it is not there. Default: here.",
)
@click.option("--public-url", default=_LOCAL_URL, metavar="URL", show_default=True, help="What DIDs will name.")
def init(directory: Path, public_url: str) -> None:
    """Write mediator.yaml and fresh keys. Overwrites nothing."""
    try:
        config, path = set_up(directory, public_url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--public-url") from None
    identity = identity_of(config)
    click.echo(f"wrote {path}, keys.jwks and log.key\n\n{identity.did}\n{identity.web_did}\n")
    click.echo(f"next: {_program()} run --config {path}")


@cli.command()
@_config_option
def run(path: Path) -> None:
    """Run the daemon in the foreground until it is interrupted."""
    config = load(path)
    click.echo(_welcome(config, identity_of(config)))
    sys.stdout.flush()
    # Here, and not at the top: twistd chooses the reactor.
    from twisted.scripts import twistd

    sys.argv = ["mediatord", "--nodaemon", "--pidfile=", "mediatord", "--config", str(path)]
    twistd.run()


@cli.command(hidden=True)
@click.argument("name")
def worker(name: str) -> int:
    """Be one of the processes of a daemon; its supervisor begins them."""
    from mediatord.cli.worker import serve

    return serve()


@cli.command("check-config")
@_config_option
def check_config(path: Path) -> int:
    """Say what is wrong with a configuration, one line each."""
    try:
        config = load(path)
    except ConfigError as error:
        for problem in error.problems:
            click.echo(problem, err=True)
        return _WRONG_USAGE
    refuse_unavailable(config)
    _check_store(config)
    identity_of(config)
    click.echo(f"{path}: ok")
    return 0


@cli.command()
@_config_option
def did(path: Path) -> None:
    """Print the mediator's DIDs: the did:peer:2, then the did:web."""
    identity = identity_of(load(path))
    click.echo(f"{identity.did}\n{identity.web_did}")


@cli.command()
@_config_option
def invitation(path: Path) -> None:
    """Print the invitation as a URL and as a QR code."""
    config = load(path)
    url = invitation_url(config.public_url, identity_of(config).did)
    click.echo(f"{url}\n\n{qr_terminal(url)}")


def _checked_url(context: click.Context, parameter: click.Parameter, url: str | None) -> str | None:
    if url is not None and split_url(url) is None:
        raise click.BadParameter("expected an http:// or https:// URL")
    return url and url.rstrip("/")


@cli.command()
@click.option("--url", metavar="URL", callback=_checked_url, help="A running mediator; without it one is started.")
def demo(url: str | None) -> int:
    """Let two throw-away wallets talk through a mediator, and show each step."""
    from mediatord.wallet.demo import main as run_demo

    return run_demo(url)


@cli.command()
@click.option("--url", default=_LOCAL_URL, metavar="URL", show_default=True, callback=_checked_url)
def status(url: str) -> int:
    """Ask a running mediator how it is. Exits with 1 if it is not well."""
    report = ask_status(url)
    click.echo(report.table())
    return 0 if report.healthy else _FAILED


@cli.command(
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


cli.add_command(log_keys)
cli.add_command(whois)


def _check_store(config: Config) -> None:
    if config.storage.backend != "mongodb":
        return
    from mediatord.store.mongo.uri import read_uri

    try:
        read_uri(config.storage.mongodb.uri)
    except ValueError as error:
        raise StartupError(f"storage.mongodb.uri: {error}") from None


def identity_of(config: Config) -> Identity:
    """
    Who the mediator of this configuration is.

    :raise PrivateFileError: its key file cannot be used.
    :raise IdentityError: keys and DIDs do not fit together.
    """
    return Identity(
        load_keys(config.identity.keys),
        config.public_url,
        config.identity.former_dids,
        raw_keys=config.decentrl.raw_keys,
    )


def _program() -> str:
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
            f"            {_program()} demo --url {config.public_url}",
            f"            {_program()} status --url {config.public_url}",
            "",
        )
    )
