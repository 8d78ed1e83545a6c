"""How the command line is told which configuration to read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mediatord.cli.commands import cli
from mediatord.config.value_syntax import DEFAULT_CONFIG_PATH
from mediatord.tap import Options
from tests.backup.store_contents import add_account
from tests.cli.test_commands import Capture, call, one_line, subcommands

# What each command that reads a configuration needs besides.
COMMANDS = {
    "accounts list": (),
    "accounts show": ("did:web:a.example",),
    "accounts remove": ("did:web:a.example",),
    "backup": ("--to", "backup.tar"),
    "check-config": (),
    "did": (),
    "export": ("--to", "archive.tar"),
    "import": ("--from", os.devnull),
    "invitation": (),
    "keys decrypt": (),
    "keys encrypt": (),
    "keys list": (),
    "keys retire": ("kid",),
    "keys rotate": (),
    "log-keys forget": ("1",),
    "log-keys list": (),
    "log-keys rotate": (),
    "queue list": (),
    "queue purge": ("did:web:a.example",),
    "queue show": ("did:web:a.example",),
    "run": (),
    "store check": (),
    "store create": (),
    "store vacuum": (),
    "whois": ("did:web:~1234",),
}


def leaves(group: click.Group, name: str = "") -> Iterator[tuple[str, list[click.Command]]]:
    """Every command, by what is typed, with the groups above it."""
    for child, command in subcommands(group):
        typed = f"{name} {child}".strip()
        if isinstance(command, click.Group):
            yield from ((below, [command, *path]) for below, path in leaves(command, typed))
        else:
            yield typed, [command]


def is_told(command: click.Command) -> bool:
    """Whether it has the option."""
    return any({"-c", "--config"} <= {*one.opts} for one in command.params)


READERS = {name for name, path in leaves(cli) if is_told(path[-1])}


def positions(command: str, config: str) -> Iterator[tuple[str, ...]]:
    """The arguments with the configuration wherever it may stand."""
    words, rest = command.split(), COMMANDS[command]
    for place in range(len(words) + 1):
        yield (*words[:place], "-c", config, *words[place:], *rest)
        yield (*words[:place], f"--config={config}", *words[place:], *rest)
    yield (*words, *rest, "-c", config)


def test_groups_take_what_their_commands_take() -> None:
    """Each command that reads a configuration is told by every group above it, and has its arguments here."""
    for name, path in leaves(cli):
        if is_told(path[-1]):
            assert [one.name for one in path if not is_told(one)] == [], name
    assert READERS - {"restore"} <= COMMANDS.keys()


@pytest.mark.parametrize("command", sorted(READERS & COMMANDS.keys()))
def test_before_and_after_the_command(command: str, tmp_path: Path, capsys: Capture) -> None:
    """The option stands before the command, between its words, or after them; a file that is missing costs a line."""
    config = str(tmp_path / "nowhere.yaml")
    for arguments in positions(command, config):
        assert call(*arguments) == 2, arguments
        assert one_line(capsys) == f"{config}: No such file or directory"


@pytest.mark.parametrize("command", sorted(READERS & COMMANDS.keys()))
def test_from_the_environment(command: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable names the file, unless the command line does."""
    monkeypatch.setenv("MEDIATORD_CONFIG", str(tmp_path / "variable.yaml"))
    words, rest = command.split(), COMMANDS[command]
    assert call(*words, *rest) == 2
    assert one_line(capsys) == f"{tmp_path}/variable.yaml: No such file or directory"
    for arguments in positions(command, "option.yaml"):
        assert call(*arguments) == 2
        assert one_line(capsys) == "option.yaml: No such file or directory"


def test_restoring(made: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is named: by the option, by the variable, or by a directory, which goes before the variable."""
    saved = str(tmp_path / "b.tar")
    add_account(made.parent / "mediator.sqlite3", "did:a")
    assert call("-c", str(made), "backup", "--to", saved) == 0
    monkeypatch.setenv("MEDIATORD_CONFIG", str(tmp_path / "variable" / "mediator.yaml"))
    assert call("restore", "--from", saved) == 0
    assert call("-c", str(tmp_path / "option" / "m.yaml"), "restore", "--from", saved) == 0
    assert call("restore", "--from", saved, "--dir", str(tmp_path / "directory")) == 0
    capsys.readouterr()
    assert (tmp_path / "variable" / "mediator.yaml").exists()
    assert (tmp_path / "option" / "m.yaml").exists()
    assert (tmp_path / "directory" / "mediator.yaml").exists()
    for options in (("-c", "x.yaml", "restore", "--dir", "y"), ("restore", "-c", "x.yaml", "--dir", "y")):
        assert call(*options, "--from", saved) == 2
        assert one_line(capsys) == "expected either --config PATH or --dir DIR"
    monkeypatch.delenv("MEDIATORD_CONFIG")
    assert call("restore", "--from", saved) == 2
    assert one_line(capsys) == "expected either --config PATH or --dir DIR"


def test_the_last_one_counts(made: Path, capsys: Capture) -> None:
    """As with an option that is given twice."""
    assert call("-c", "a.yaml", "keys", "-c", "b.yaml", "list", "-c", str(made), "--json") == 0
    assert call("-c", "a.yaml", "keys", "-c", str(made), "list", "--json") == 0
    assert call("-c", "a.yaml", "did", "-c", "b.yaml", "--config", str(made)) == 0
    capsys.readouterr()


@pytest.mark.parametrize("command", ["status", "init", "demo", "bench", "completion"])
def test_whoever_reads_none_says_so(command: str, made: Path, capsys: Capture) -> None:
    """A configuration before such a command is a mistake; a variable is not."""
    assert call("-c", str(made), command) == 2
    assert one_line(capsys) == f"{command} reads no configuration; omit --config"


def test_a_variable_is_for_whoever_reads_it(made: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other commands do not mind it."""
    monkeypatch.setenv("MEDIATORD_CONFIG", str(made))
    assert call("completion", "bash") == call("did") == call("keys", "list") == 0
    capsys.readouterr()


def test_nobody_says_which(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is that of the system's daemon; where there is none, the line says what to do."""
    monkeypatch.delenv("MEDIATORD_CONFIG", raising=False)
    assert call("queue", "list", "--help") == 0
    assert str(DEFAULT_CONFIG_PATH) in capsys.readouterr().out
    if DEFAULT_CONFIG_PATH.exists():
        pytest.skip(f"there is a {DEFAULT_CONFIG_PATH}")
    for variable in (None, ""):
        if variable is not None:
            monkeypatch.setenv("MEDIATORD_CONFIG", variable)
        for command in ("did", "check-config"):
            assert call(command) == 2
            assert one_line(capsys) == (
                "/etc/mediatord/mediator.yaml: No such file or directory; pass --config PATH, set "
                "MEDIATORD_CONFIG, or create it with mediatord init --dir /etc/mediatord"
            )


def test_twistd_reads_the_same(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin goes by the option, else by the variable."""
    monkeypatch.setenv("MEDIATORD_CONFIG", str(made))
    options = Options()
    options.parseOptions([])
    assert options.settings.identity.keys == made.parent / "keys.jwks"
    monkeypatch.setenv("MEDIATORD_CONFIG", "nowhere.yaml")
    for option in ("-c", "--config"):
        options = Options()
        options.parseOptions([option, str(made)])
        assert options.settings.identity.keys == made.parent / "keys.jwks"
    with pytest.raises(SystemExit) as caught:
        Options().parseOptions([])
    assert caught.value.code == 2


@pytest.fixture
def made(tmp_path: Path, capsys: Capture) -> Path:
    """A configuration that init has made."""
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    capsys.readouterr()
    return tmp_path / "m" / "mediator.yaml"
