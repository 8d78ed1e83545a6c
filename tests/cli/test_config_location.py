"""How commands find their configuration."""

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
from tests.cli.test_commands import Capture, call, list_subcommands, one_line

# Further arguments of each command that reads a configuration.
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
    "push test": ("--account", "did:web:a.example"),
    "queue list": (),
    "queue purge": ("did:web:a.example",),
    "queue show": ("did:web:a.example",),
    "run": (),
    "store check": (),
    "store create": (),
    "store vacuum": (),
    "whois": ("did:web:~1234",),
}


def list_commands(group: click.Group, name: str = "") -> Iterator[tuple[str, list[click.Command]]]:
    """Every command with its groups, by its words."""
    for child, command in list_subcommands(group):
        typed = f"{name} {child}".strip()
        if isinstance(command, click.Group):
            yield from ((below, [command, *path]) for below, path in list_commands(command, typed))
        else:
            yield typed, [command]


def has_config_option(command: click.Command) -> bool:
    return any({"-c", "--config"} <= {*one.opts} for one in command.params)


READERS = {name for name, path in list_commands(cli) if has_config_option(path[-1])}


def place_option(command: str, config: str) -> Iterator[tuple[str, ...]]:
    """The arguments with the option in each possible position."""
    words, rest = command.split(), COMMANDS[command]
    for place in range(len(words) + 1):
        yield (*words[:place], "-c", config, *words[place:], *rest)
        yield (*words[:place], f"--config={config}", *words[place:], *rest)
    yield (*words, *rest, "-c", config)


def test_groups_accept_options_of_their_commands() -> None:
    """Each command that reads a configuration accepts it from every group above, and is tested here."""
    for name, path in list_commands(cli):
        if has_config_option(path[-1]):
            assert [one.name for one in path if not has_config_option(one)] == [], name
    assert READERS - {"restore"} <= COMMANDS.keys()


@pytest.mark.parametrize("command", sorted(READERS & COMMANDS.keys()))
def test_option_is_accepted_in_any_position(command: str, tmp_path: Path, capsys: Capture) -> None:
    """Before the command, between its words, or after them."""
    config = str(tmp_path / "nowhere.yaml")
    for arguments in place_option(command, config):
        assert call(*arguments) == 2, arguments
        assert one_line(capsys) == f"{config}: No such file or directory"


@pytest.mark.parametrize("command", sorted(READERS & COMMANDS.keys()))
def test_reads_environment_unless_option_is_given(
    command: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDIATORD_CONFIG", str(tmp_path / "variable.yaml"))
    words, rest = command.split(), COMMANDS[command]
    assert call(*words, *rest) == 2
    assert one_line(capsys) == f"{tmp_path}/variable.yaml: No such file or directory"
    for arguments in place_option(command, "option.yaml"):
        assert call(*arguments) == 2
        assert one_line(capsys) == "option.yaml: No such file or directory"


def test_restore_requires_explicit_target(
    config_path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option, the variable, or a directory, which takes precedence over the variable."""
    saved = str(tmp_path / "b.tar")
    add_account(config_path.parent / "mediator.sqlite3", "did:a")
    assert call("-c", str(config_path), "backup", "--to", saved) == 0
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


def test_last_option_counts(config_path: Path, capsys: Capture) -> None:
    assert call("-c", "a.yaml", "keys", "-c", "b.yaml", "list", "-c", str(config_path), "--json") == 0
    assert call("-c", "a.yaml", "keys", "-c", str(config_path), "list", "--json") == 0
    assert call("-c", "a.yaml", "did", "-c", "b.yaml", "--config", str(config_path)) == 0
    capsys.readouterr()


@pytest.mark.parametrize("command", ["status", "init", "demo", "bench", "completion"])
def test_commands_without_configuration_refuse_option(command: str, config_path: Path, capsys: Capture) -> None:
    """They ignore the variable."""
    assert call("-c", str(config_path), command) == 2
    assert one_line(capsys) == f"{command} reads no configuration; omit --config"


def test_other_commands_ignore_variable(config_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIATORD_CONFIG", str(config_path))
    assert call("completion", "bash") == call("did") == call("keys", "list") == 0
    capsys.readouterr()


def test_defaults_to_system_configuration(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that file, one line names the alternatives."""
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
                "MEDIATORD_CONFIG, or create it with `mediatord init --dir /etc/mediatord`"
            )


def test_twistd_plugin_reads_same_configuration(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the option, otherwise from the variable."""
    monkeypatch.setenv("MEDIATORD_CONFIG", str(config_path))
    options = Options()
    options.parseOptions([])
    assert options.settings.identity.keys == config_path.parent / "keys.jwks"
    monkeypatch.setenv("MEDIATORD_CONFIG", "nowhere.yaml")
    for option in ("-c", "--config"):
        options = Options()
        options.parseOptions([option, str(config_path)])
        assert options.settings.identity.keys == config_path.parent / "keys.jwks"
    with pytest.raises(SystemExit) as caught:
        Options().parseOptions([])
    assert caught.value.code == 2


@pytest.fixture
def config_path(tmp_path: Path, capsys: Capture) -> Path:
    """A configuration written by init."""
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    capsys.readouterr()
    return tmp_path / "m" / "mediator.yaml"
