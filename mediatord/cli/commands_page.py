"""docs/cli.md: every command with its help, as click has it."""

from __future__ import annotations

from collections.abc import Iterator

import click

from mediatord.bench.cli import bench
from mediatord.cli.commands import cli

_HEAD = """\
# Command line

<!-- Written by `python -m mediatord.cli.reference docs`; a test compares. -->

One program, `mediatord`; this is what its `--help` says. Every command exits with 0 when done, 1 when it failed, and
2 when it was called wrongly or the configuration cannot be used. What went wrong is one line on standard error.

Commands that read the configuration take `-c PATH` or `--config PATH`, before the command, between its words or after
them; if there are several, the last one counts. Otherwise the variable `MEDIATORD_CONFIG` names the file; without it
that is `/etc/mediatord/mediator.yaml`. `twistd mediatord` goes by the same.

"""
_WIDTH = 100


def commands_page() -> str:
    """The page, as Markdown."""
    return _HEAD + "".join(_sections(cli, "mediatord", None, 2)).rstrip("\n") + "\n"


def _sections(command: click.Command, name: str, above: click.Context | None, level: int) -> Iterator[str]:
    context = click.Context(
        command,
        info_name=name,
        parent=above,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
        **command.context_settings,
    )
    text = command.get_help(context)
    # What it says of defaults must not depend on where this is written.
    yield f"{'#' * min(level, 3)} {context.command_path}\n\n```text\n{text.rstrip()}\n```\n\n"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = _named(command, child)
            if not found.hidden:
                yield from _sections(found, child, context, level + 1)


def _named(group: click.Group, name: str) -> click.Command:
    """A subcommand; the benchmark is behind one that only hands its arguments on."""
    return bench if group is cli and name == "bench" else group.commands[name]
