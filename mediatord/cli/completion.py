"""Completion of the command line by a shell, with what click has for that."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

_PROGRAM = "mediatord"
_VARIABLE = "_MEDIATORD_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """
    Print the script that lets a shell complete mediatord's commands and options.

    \b
    For bash, type: source <(mediatord completion bash)
    """
    click.echo(completion_script(context.find_root().command, shell))


def completion_script(command: click.Command, shell: str) -> str:
    """:param shell: bash, zsh or fish."""
    kind = get_completion_class(shell)
    assert kind is not None
    # Not that of the class, which for bash runs one to find out how old it is.
    return ShellComplete.source(kind(command, {}, _PROGRAM, _VARIABLE))
