"""Fixtures: a mediator and a backup of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mediatord.config.file import load_config
from tests.backup.store_contents import add_account
from tests.cli.test_commands import Capture, call


@pytest.fixture
def mediator_config(tmp_path: Path, capsys: Capture) -> Path:
    """A configuration with an account in its store, a cluster secret and a token for the status page."""
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    path = tmp_path / "m" / "mediator.yaml"
    for name in ("secret", "token"):
        (path.parent / name).write_text("s" * 40)
        (path.parent / name).chmod(0o600)
    settings = yaml.safe_load(path.read_text())
    settings["cluster"]["secret_file"], settings["admin"]["token_file"] = "secret", "token"
    path.write_text(yaml.safe_dump(settings))
    add_account(load_config(path).storage.sqlite.path, "did:a")
    capsys.readouterr()
    return path


@pytest.fixture
def backup(mediator_config: Path, tmp_path: Path, capsys: Capture) -> Path:
    """A backup of that mediator."""
    backup = tmp_path / "backup.tar"
    assert call("backup", "--config", str(mediator_config), "--to", str(backup)) == 0
    capsys.readouterr()
    return backup
