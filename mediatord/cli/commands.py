"""The subcommands, and what becomes of their errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from mediatord import __version__
from mediatord.cli.loading import LoadingGroup
from mediatord.cli.options import given_config, group_config_option
from mediatord.cli.visible import visible

_FAILED, _WRONG_USAGE = 1, 2
# Whose text is one line for the operator. By name: who raises one has imported it, and nobody else needs it.
_FAILURES = frozenset(
    {
        "mediatord.errors.StartupError",
        "mediatord.transfer.errors.TransferError",
        "mediatord.cli.files.SetupError",
        "mediatord.cli.scraping.Unreachable",
        "mediatord.identity.IdentityError",
        "mediatord.private_file.PrivateFileError",
    }
)
# Where each is, and its short help; one without is not listed.
_CATALOGUE = {
    "accounts": ("mediatord.cli.accounts:accounts", "List, show and remove accounts of DIDComm wallets."),
    "backup": (
        "mediatord.cli.backups:backup_command",
        "Write configuration, keys and the store to one file, consistently, while the daemon runs.",
    ),
    "bench": ("mediatord.cli.running:bench", "Measure how much a mediator takes."),
    "check-config": ("mediatord.cli.checking:check_config", "Say what is wrong with a configuration, one line each."),
    "completion": (
        "mediatord.cli.completion:completion",
        "Print the script that lets a shell complete mediatord's commands and options.",
    ),
    "demo": (
        "mediatord.cli.running:demo",
        "Let two throw-away wallets talk through a mediator, and show each step.",
    ),
    "did": ("mediatord.cli.mediator:did", "Print the mediator's DIDs: the did:peer:2, then the did:web."),
    "export": (
        "mediatord.cli.transfer:export_command",
        "Write all that the store keeps to an archive that any backend can import.",
    ),
    "import": (
        "mediatord.cli.transfer:import_command",
        "Bring an archive into an empty store, and compare the counts.",
    ),
    "init": ("mediatord.cli.init:init", "Write mediator.yaml and fresh keys."),
    "invitation": ("mediatord.cli.mediator:invitation", "Print the invitation as a URL and as a QR code."),
    "keys": (
        "mediatord.cli.keys:keys",
        "Show, rotate, retire and encrypt the keys that the mediator's DIDs are made of.",
    ),
    "log-keys": (
        "mediatord.cli.pseudonyms:log_keys",
        "Show and change the keys that pseudonyms of the event log are made with.",
    ),
    "queue": ("mediatord.cli.queue:queue", "Look into the queues of waiting messages, and take messages out."),
    "restore": ("mediatord.cli.backups:restore_command", "Bring back a backup where nothing is yet."),
    "run": ("mediatord.cli.running:run", "Run the daemon in the foreground until it is interrupted."),
    "status": ("mediatord.cli.status:status", "Ask a running mediator how it is."),
    "store": ("mediatord.cli.store:store", "Check the SQLite database, make it smaller, or make a new one."),
    "whois": (
        "mediatord.cli.pseudonyms:whois",
        "Print the registered DIDs that a pseudonym stands for, with its epoch.",
    ),
    "worker": ("mediatord.cli.running:worker", ""),
}


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
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", _FAILED)
    except Exception as error:
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
        if "mediatord.config.file.ConfigError" in names:
            return _refuse_configuration(error.args[0].splitlines())
        if names & _FAILURES:
            return _complain(str(error), _FAILED)
        if isinstance(error, OSError):
            return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), _FAILED)
        raise


def _refuse_configuration(problems: Sequence[str]) -> int:
    more = len(problems) - 1
    hint = f" (and {more} more; mediatord check-config lists all)" if more else ""
    return _complain(problems[0] + hint, _WRONG_USAGE)


def _complain(text: str, status: int) -> int:
    click.echo(f"mediatord: {visible(' '.join(text.split()))}", err=True)
    return status


class Program(LoadingGroup):
    """Refuses a configuration in front of a command that does not read it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is asked for, and its arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and given_config(ctx) and not ctx.resilient_parsing and not _reads_config(command):
            raise click.UsageError(f"{name} reads no configuration; leave out --config")
        return name, command, rest


def _reads_config(command: click.Command) -> bool:
    return any("--config" in parameter.opts for parameter in command.params)


@click.group(cls=Program, catalogue=_CATALOGUE, context_settings={"help_option_names": ["-h", "--help"]})
@group_config_option
@click.version_option(__version__, prog_name="mediatord", message="%(prog)s %(version)s")
def cli() -> None:
    """A store-and-forward mediator for DIDComm v2 and Decentrl wallets."""
