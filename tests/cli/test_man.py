"""Manual pages: complete, generated from the help, and valid for formatters."""

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
from tests.cli.test_commands import list_subcommands

DAY = datetime(2026, 11, 22, tzinfo=UTC)
NAMES = ("mediatord.1", "mediatord-analytics.1")


@pytest.fixture(scope="module")
def man_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the generated pages."""
    directory = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, "-m", "mediatord.cli.man", str(directory)], check=True)
    return directory


def list_commands(group: click.Group, words: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every visible command, by its words."""
    for name, command in list_subcommands(group):
        if isinstance(command, click.Group):
            yield from list_commands(command, f"{words}{name} ")
        elif not command.hidden:
            yield words + name, command


def test_one_page_per_program(man_directory: Path) -> None:
    assert sorted(path.name for path in man_directory.iterdir()) == sorted(NAMES)


def test_page_has_all_commands_and_options() -> None:
    """And exit statuses, signals and files."""
    text = render_man_pages(DAY)["mediatord.1"]
    for words, command in list_commands(cli):
        assert f'.SS "{words}'.replace("-", "\\-") in text
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0].replace("-", "\\-") in text
    for section in ("NAME", "SYNOPSIS", "COMMANDS", "EXIT STATUS", "SIGNALS", "ENVIRONMENT", "FILES", "SEE ALSO"):
        assert f"\n.SH {section}\n" in text


def test_help_uses_names_of_program() -> None:
    """Although click caches the help under the name of the first caller."""
    group = click.Group("one", [click.Command("two", help="Do.")], help="A program.")
    group.context_settings["help_option_names"] = ["-h", "--help"]
    text = render_manual(group, "one", {}, "", DAY)
    assert [line for line in text.splitlines() if "help" in line] == [r"\fB\-h, \-\-help\fR"]
    group.commands["two"] = click.Command("two", help="Do.")
    group.commands["two"].get_help_option(click.Context(group.commands["two"]))
    assert render_manual(group, "one", {}, "", DAY) == text


def test_pages_are_reproducible(tmp_path: Path) -> None:
    """The build sets the date."""
    command = [sys.executable, "-m", "mediatord.cli.man", str(tmp_path)]
    subprocess.run(command, check=True, env={"SOURCE_DATE_EPOCH": f"{DAY.timestamp():.0f}"})
    assert {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()} == render_man_pages(DAY)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "command",
    [["mandoc", "-T", "lint", "-W", "warning"], ["groff", "-man", "-T", "utf8", "-ww", "-z"]],
    ids=lambda c: c[0],
)
def test_formatters_report_no_problems(command: list[str], name: str, man_directory: Path) -> None:
    """Neither mandoc nor groff."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    completed = subprocess.run([*command, str(man_directory / name)], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")
