"""
Catalogue of the subcommands, their errors and shell completion.

A subcommand's module is imported when it is used: most of them need imports that take a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

import click
from click.shell_completion import ShellComplete, get_completion_class

from mediatord import __version__
from mediatord.cli.console import escape_control_characters, find_given_config, group_config_option


class LazyCommands(MutableMapping[str, click.Command]):
    """
    Commands by name, imported at the first lookup.

    :param places: `module:variable` of each.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            module, _, variable = self._places[name].partition(":")
            self._loaded[name] = getattr(import_module(module), variable)
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._places.setdefault(name, "")
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self._loaded.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def loaded(self, name: str) -> click.Command | None:
        """The command if it was imported already."""
        return self._loaded.get(name)


class LazyGroup(click.Group):
    """
    Lists its subcommands without importing them.

    :param catalogue: `module:variable` and short help by name; commands without a short help are not listed.
    """

    def __init__(self, name: str | None = None, *, catalogue: Mapping[str, tuple[str, str]], **options: Any) -> None:
        loading = LazyCommands({name: place for name, (place, _) in catalogue.items()})
        super().__init__(name, commands=loading, **options)
        self._loading = loading
        self.short_helps = {name: text for name, (_, text) in catalogue.items()}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As in click, without imports."""
        names = [name for name in self.list_commands(ctx) if self._is_listed(name)]
        limit = formatter.width - 6 - max(len(name) for name in names)
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._short_help(name, limit)) for name in names])

    def _is_listed(self, name: str) -> bool:
        command = self._loading.loaded(name)
        return bool(self.short_helps.get(name)) if command is None else not command.hidden

    def _short_help(self, name: str, limit: int) -> str:
        known = self.short_helps.get(name)
        return known or self._loading[name].get_short_help_str(limit)


_PROGRAM_NAME = "mediatord"
_COMPLETION_VARIABLE = "_MEDIATORD_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """
    Print a shell completion script.

    \b
    For bash, type: source <(mediatord completion bash)
    """
    click.echo(render_completion_script(context.find_root().command, shell))


def render_completion_script(command: click.Command, shell: str) -> str:
    """:param shell: bash, zsh or fish."""
    kind = get_completion_class(shell)
    assert kind is not None
    # The method of the class for bash would run bash to check its version.
    return ShellComplete.source(kind(command, {}, _PROGRAM_NAME, _COMPLETION_VARIABLE))


_EXIT_FAILED, _EXIT_WRONG_USAGE = 1, 2
# Errors whose text is one line for the operator. By name, so that their modules need not be imported.
_OPERATOR_ERRORS = frozenset(
    {
        "mediatord.errors.StartupError",
        "mediatord.backup.records.BackupError",
        "mediatord.cli.configuration.SetupError",
        "mediatord.cli.status.MediatorUnreachable",
        "mediatord.identity.mediator_identity.IdentityError",
        "mediatord.private_file.PrivateFileError",
    }
)
# Location and short help of each.
_COMMANDS = {
    "accounts": ("mediatord.cli.accounts:accounts", "List, show and remove accounts of DIDComm wallets."),
    "backup": (
        "mediatord.cli.backup:backup_command",
        "Write configuration, keys and the store to one file, consistently, while the daemon runs.",
    ),
    "bench": ("mediatord.cli.run:bench", "Run the benchmark."),
    "check-config": (
        "mediatord.cli.configuration:check_config",
        "Validate a configuration file and the files that it names.",
    ),
    "completion": (
        "mediatord.cli.commands:completion",
        "Print a shell completion script.",
    ),
    "demo": (
        "mediatord.cli.run:demo",
        "Run a demo: two temporary wallets exchange messages through a mediator.",
    ),
    "did": ("mediatord.cli.keys:did", "Print the mediator's DIDs: the did:peer:2, then the did:web."),
    "export": (
        "mediatord.cli.backup:export_command",
        "Export the store to an archive that any backend can import.",
    ),
    "import": (
        "mediatord.cli.backup:import_command",
        "Import an archive into an empty store and compare the counts.",
    ),
    "init": ("mediatord.cli.configuration:init", "Write mediator.yaml and fresh keys."),
    "invitation": ("mediatord.cli.keys:invitation", "Print the invitation as a URL and as a QR code."),
    "keys": (
        "mediatord.cli.keys:keys",
        "Show, rotate, retire and encrypt the mediator's keys.",
    ),
    "log-keys": (
        "mediatord.cli.keys:log_keys",
        "Show, rotate and delete the keys of the event log's pseudonyms.",
    ),
    "queue": ("mediatord.cli.queue:queue", "List message queues and remove messages from them."),
    "restore": ("mediatord.cli.backup:restore_command", "Restore a backup without overwriting anything."),
    "run": ("mediatord.cli.run:run", "Run the daemon in the foreground until it is interrupted."),
    "status": ("mediatord.cli.status:status", "Show the status of a running mediator."),
    "store": ("mediatord.cli.store:store", "Check, compact or create the SQLite database."),
    "whois": (
        "mediatord.cli.keys:whois",
        "Print the registered DIDs behind a pseudonym, with its key epoch.",
    ),
    "worker": ("mediatord.cli.run:worker", ""),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a subcommand and exit. :param arguments: without the program name; default: those of the process."""
    sys.exit(_run_command(arguments))


def _run_command(arguments: Sequence[str] | None) -> int:
    try:
        status = cli.main(arguments, prog_name="mediatord", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return _EXIT_WRONG_USAGE
    except click.ClickException as error:
        return _print_error(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _print_error("interrupted", _EXIT_FAILED)
    except Exception as error:
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
        if "mediatord.config.file.ConfigError" in names:
            return _report_config_error(error.args[0].splitlines())
        if names & _OPERATOR_ERRORS:
            return _print_error(str(error), _EXIT_FAILED)
        if isinstance(error, OSError):
            return _print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error), _EXIT_FAILED)
        raise


def _report_config_error(problems: Sequence[str]) -> int:
    more = len(problems) - 1
    hint = f" (and {more} more; mediatord check-config lists all)" if more else ""
    return _print_error(problems[0] + hint, _EXIT_WRONG_USAGE)


def _print_error(text: str, status: int) -> int:
    click.echo(f"mediatord: {escape_control_characters(' '.join(text.split()))}", err=True)
    return status


class MediatordGroup(LazyGroup):
    """Refuses --config before a command that does not read it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name, command and remaining arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        if (
            command is not None
            and find_given_config(ctx)
            and not ctx.resilient_parsing
            and not _reads_config(command)
        ):
            raise click.UsageError(f"{name} reads no configuration; leave out --config")
        return name, command, rest


def _reads_config(command: click.Command) -> bool:
    return any("--config" in parameter.opts for parameter in command.params)


@click.group(cls=MediatordGroup, catalogue=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@group_config_option
@click.version_option(__version__, prog_name="mediatord", message="%(prog)s %(version)s")
def cli() -> None:
    """A store-and-forward mediator for DIDComm v2 and Decentrl wallets."""
