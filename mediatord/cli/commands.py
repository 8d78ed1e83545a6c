"""
The command group: catalogue of the subcommands, errors and exit status, shell completion and the demo.

A subcommand's module is imported when it is used: most of them need imports that take a second.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

import click
from click.shell_completion import ShellComplete, get_completion_class

from mediatord import __version__
from mediatord.cli.console import (
    LOCAL_URL,
    ca_option,
    escape_control_characters,
    find_given_config,
    group_config_option,
    url_option,
)
from mediatord.errors import OperatorError

_PROGRAM_NAME = "mediatord"
_COMPLETION_VARIABLE = "_MEDIATORD_COMPLETE"
_EXIT_FAILED, _EXIT_WRONG_USAGE = 1, 2
_SYNTAX_ERRORS = ("No such command", "No such option", "Got unexpected", "Missing argument", "Missing option")
# Location and short help of each; those without a short help are not listed.
_COMMANDS = {
    "accounts": ("cli.accounts:accounts", "List, show and remove accounts of DIDComm wallets."),
    "backup": (
        "cli.backup:backup_command",
        "Back up configuration, keys and store to one file; the daemon can keep running.",
    ),
    "bench": ("bench.cli:bench", "Run the benchmark."),
    "check-config": ("cli.check_config:check_config", "Validate the configuration and the files that it names."),
    "completion": ("cli.commands:completion", "Print a completion script for bash, zsh or fish."),
    "demo": ("cli.commands:demo", "Run a demo: temporary wallets exchange messages through a mediator."),
    "did": ("cli.keys:did", "Print the mediator's DIDs: did:peer:2, then did:web."),
    "export": ("cli.backup:export_command", "Export the store to an archive that any backend can import."),
    "import": ("cli.backup:import_command", "Import an archive into an empty store."),
    "init": ("cli.init:init", "Write mediator.yaml and new keys without overwriting anything."),
    "invitation": ("cli.keys:invitation", "Print the invitation: short URL, QR code and long URL."),
    "keys": ("cli.keys:keys", "List, rotate, retire and encrypt the mediator's keys."),
    "log-keys": ("cli.keys:log_keys", "List, rotate and delete the pseudonym keys of the event log."),
    "push": ("cli.push:push", "Test push notifications and make keys."),
    "push-sender": ("cli.run_and_worker:push_sender", ""),
    "queue": ("cli.queue:queue", "List message queues and remove messages from them."),
    "restore": ("cli.backup:restore_command", "Restore a backup without overwriting anything."),
    "run": ("cli.run_and_worker:run", "Run the daemon in the foreground."),
    "status": ("cli.status:status", "Show the status of a running mediator."),
    "store": ("cli.sqlite_database:store", "Check, compact or create the SQLite database."),
    "whois": ("cli.keys:whois", "Print the registered DIDs that match a pseudonym, or the pseudonyms of a DID."),
    "worker": ("cli.run_and_worker:worker", ""),
}


class LazyGroup(click.Group):
    """
    Imports subcommands when they are used, not to list them. Refuses --config before one that does not read it.

    :param catalogue: `module:variable` and short help by name.
    """

    def __init__(self, name: str | None = None, *, catalogue: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(name, **options)
        self._catalogue = catalogue

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in order."""
        return sorted(self._catalogue)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand."""
        if cmd_name not in self._catalogue:
            return None
        module, _, variable = self._catalogue[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"mediatord.{module}"), variable)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As in click, without imports."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(self._catalogue.items()) if text])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name, command and remaining arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and find_given_config(ctx) and not ctx.resilient_parsing:
            if not any("--config" in parameter.opts for parameter in command.params):
                raise click.UsageError(f"{name} reads no configuration; omit --config")
        return name, command, rest


@click.group(cls=LazyGroup, catalogue=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@group_config_option
@click.version_option(__version__, prog_name=_PROGRAM_NAME, message="%(prog)s %(version)s")
def cli() -> None:
    """A store-and-forward mediator for DIDComm v2 and Decentrl wallets."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a subcommand and exit. :param arguments: without the program name; default: those of the process."""
    sys.exit(_run_command(arguments))


def _run_command(arguments: Sequence[str] | None) -> int:
    try:
        status = cli.main(arguments, prog_name=_PROGRAM_NAME, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return _EXIT_WRONG_USAGE
    except click.ClickException as error:
        return _print_error(_format_click_error(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _print_error("interrupted", _EXIT_FAILED)
    except OperatorError as error:
        more = len(error.problems) - 1
        hint = f" (and {more} more; run `mediatord check-config` to list all)" if more else ""
        return _print_error(error.problems[0] + hint, error.exit_status)
    except OSError as error:
        return _print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error), _EXIT_FAILED)


def _format_click_error(error: click.ClickException) -> str:
    """Its message; names the help to read after an error of syntax that suggests nothing."""
    text = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx and text.startswith(_SYNTAX_ERRORS) and text[-1] != "?":
        return f"{text.rstrip('.')}; see {error.ctx.command_path} --help"
    return text


def _print_error(text: str, status: int) -> int:
    click.echo(f"{_PROGRAM_NAME}: {escape_control_characters(' '.join(text.split()))}", err=True)
    return status


@click.command()
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """
    Print a completion script for bash, zsh or fish.

    In bash and zsh, run: source <(mediatord completion SHELL)

    In fish, run: mediatord completion fish | source
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # The method of the class for bash would run bash to check its version.
    complete = kind(context.find_root().command, {}, _PROGRAM_NAME, _COMPLETION_VARIABLE)
    click.echo(ShellComplete.source(complete))


@click.command()
@url_option(
    help=f"URL of a running mediator. Default: {LOCAL_URL} if a mediator runs there, else a temporary mediator."
)
@ca_option
def demo(url: str | None) -> int:
    """Run a demo: temporary wallets exchange messages through a mediator."""
    from mediatord.wallet.demo import run_demo

    return run_demo(url)
