"""The manual pages: made of the help, all of it, and nothing that a formatter would stumble over."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest

from mediatord.cli.commands import cli
from mediatord.cli.man import render_man_pages, render_manual
from tests.cli.test_commands import subcommands

DAY = datetime(2026, 11, 22, tzinfo=UTC)
NAMES = ("mediatord.1", "mediatord-analytics.1")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a build has them written."""
    directory = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, "-m", "mediatord.cli.man", str(directory)], check=True)
    return directory


def leaves(group: click.Group, words: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that is shown, with what is typed for it."""
    for name, command in subcommands(group):
        if isinstance(command, click.Group):
            yield from leaves(command, f"{words}{name} ")
        elif not command.hidden:
            yield words + name, command


def test_pages(written: Path) -> None:
    """There is one for each program, and nothing else."""
    assert sorted(path.name for path in written.iterdir()) == sorted(NAMES)


def test_everything_is_in_it() -> None:
    """Every command has its heading and every option its entry, with the exit statuses, signals and files."""
    text = render_man_pages(DAY)["mediatord.1"]
    for words, command in leaves(cli):
        assert f'.SS "{words}'.replace("-", "\\-") in text
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0].replace("-", "\\-") in text
    for section in ("NAME", "SYNOPSIS", "COMMANDS", "EXIT STATUS", "SIGNALS", "ENVIRONMENT", "FILES", "SEE ALSO"):
        assert f"\n.SH {section}\n" in text


def test_help_is_said_once() -> None:
    """Although click remembers of a command by what name the first who asked had its help."""
    group = click.Group("one", [click.Command("two", help="Do.")], help="A program.")
    group.context_settings["help_option_names"] = ["-h", "--help"]
    text = render_manual(group, "one", {}, "", DAY)
    assert [line for line in text.splitlines() if "help" in line] == [r"\fB\-h, \-\-help\fR"]
    group.commands["two"] = click.Command("two", help="Do.")
    group.commands["two"].get_help_option(click.Context(group.commands["two"]))
    assert render_manual(group, "one", {}, "", DAY) == text


def test_the_same_source_gives_the_same_page(tmp_path: Path) -> None:
    """A build says what day it is."""
    command = [sys.executable, "-m", "mediatord.cli.man", str(tmp_path)]
    subprocess.run(command, check=True, env={"SOURCE_DATE_EPOCH": f"{DAY.timestamp():.0f}"})
    assert {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()} == render_man_pages(DAY)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "command",
    [["mandoc", "-T", "lint", "-W", "warning"], ["groff", "-man", "-T", "utf8", "-ww", "-z"]],
    ids=lambda c: c[0],
)
def test_formatters_have_nothing_to_say(command: list[str], name: str, written: Path) -> None:
    """Neither of the two that there are."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    done = subprocess.run([*command, str(written / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
