"""Completion scripts that wheel and Debian package install."""

from __future__ import annotations

from configparser import ConfigParser
from importlib import import_module

import click
import pytest
from click.shell_completion import ShellComplete, get_completion_class

from deb.tree import ROOT

_DIRECTORY = ROOT / "etc/completion"
_FILE_NAMES = {"bash": "{}", "zsh": "_{}", "fish": "{}.fish"}
_MODULES = {"mediatord": "mediatord.cli.commands", "mediatord-analytics": "analytics.cli"}
# Directories of each shell for scripts of packages, below the installation prefix.
_WHEEL_DIRECTORIES = {
    "bash": "share/bash-completion/completions",
    "zsh": "share/zsh/site-functions",
    "fish": "share/fish/vendor_completions.d",
}


def render_completion(program: str, shell: str) -> str:
    command: click.Command = import_module(_MODULES[program]).cli
    kind = get_completion_class(shell)
    assert kind is not None
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    return ShellComplete.source(kind(command, {}, program, variable))


@pytest.mark.parametrize("shell", _FILE_NAMES)
@pytest.mark.parametrize("program", _MODULES)
def test_is_up_to_date(program: str, shell: str) -> None:
    """`mediatord completion SHELL` writes the file that is installed; the analysis has the same script."""
    path = _DIRECTORY / shell / _FILE_NAMES[shell].format(program)
    assert path.read_text("utf-8").rstrip("\n") == render_completion(program, shell).rstrip("\n")


def test_contains_no_other_files() -> None:
    names = {str(path.relative_to(_DIRECTORY)) for path in _DIRECTORY.rglob("*") if path.is_file()}
    assert names == {f"{shell}/{name.format(program)}" for shell, name in _FILE_NAMES.items() for program in _MODULES}


def test_is_in_the_wheel() -> None:
    """The directories are those in which the shells look."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    declared = config["options.data_files"]
    for shell, directory in _WHEEL_DIRECTORIES.items():
        files = sorted(ROOT.glob(declared[directory]))
        assert files == sorted((_DIRECTORY / shell).iterdir())
