"""`mediatord keys`: rotation, preparation and retirement of keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mediatord.app.current_identity import load_identity
from mediatord.config.file import load_config
from mediatord.identity.key_file import load_keys
from tests.cli.test_commands import Capture, call, one_line

FRESH = ["prekey-2", "signing-2", "p256-2", "p384-2", "p521-2"]
FIRST = ["prekey", "signing", "p256", "p384", "p521"]
URL = "https://m.example"


@pytest.fixture
def config_path(tmp_path: Path, capsys: Capture) -> Path:
    """A configuration with keys."""
    assert call("init", "--dir", str(tmp_path / "m"), "--public-url", URL) == 0
    capsys.readouterr()
    return tmp_path / "m" / "mediator.yaml"


def run_json(config_path: Path, capsys: Capture, *words: str) -> dict[str, Any]:
    """Run a command, and return its JSON document."""
    assert call("keys", *words, "--config", str(config_path), "--json") == 0
    output = capsys.readouterr()
    assert output.err == ""
    found: dict[str, Any] = json.loads(output.out)
    return found


def read_secrets(config_path: Path) -> list[str]:
    """Secrets that no output may contain."""
    return [key.jwk()["d"] for _, key in load_keys(config_path.with_name("keys.jwks"))]


def test_lists_keys_with_did_of_each_generation(config_path: Path, capsys: Capture) -> None:
    first = load_identity(load_config(config_path, {})).did
    run_json(config_path, capsys, "rotate")
    second = load_identity(load_config(config_path, {})).did
    run_json(config_path, capsys, "rotate", "--prepare")
    listed = run_json(config_path, capsys, "list")
    assert listed["file"] == str(config_path.with_name("keys.jwks"))
    (prepared, *others) = listed["generations"]
    assert (prepared["state"], prepared["kids"][0]) == ("prepared", "prekey-3")
    assert others == [
        {"state": "current", "kids": FRESH, "did": second},
        {"state": "former", "kids": FIRST, "did": first},
    ]
    assert call("keys", "list", "--config", str(config_path)) == 0
    output = capsys.readouterr().out
    assert (
        f"current   {' '.join(FRESH)}\n          {second}\nformer    {' '.join(FIRST)}\n          {first}\n" in output
    )
    assert not [secret for secret in read_secrets(config_path) if secret in output]


def test_rotates_keys(config_path: Path, capsys: Capture) -> None:
    """Prints the new and the former DIDs and the next step, without secrets."""
    before = load_identity(load_config(config_path, {})).did
    assert call("keys", "rotate", "--config", str(config_path)) == 0
    output = capsys.readouterr().out
    after = load_identity(load_config(config_path, {}))
    assert after.former_peer_dids == (before,)
    assert f"DID       {after.did}\n          {after.web_did}\nformer    {before}\n" in output
    assert "systemctl reload mediatord" in output and "kill -HUP" in output
    assert not [secret for secret in read_secrets(config_path) if secret in output]
    again = run_json(config_path, capsys, "rotate")
    assert again["former_dids"] == [after.did, before]
    assert again["kids"][0] == "prekey-3"


def test_prepares_keys_once(config_path: Path, capsys: Capture) -> None:
    """The DID stays until the next rotation; a second preparation is an error."""
    before = load_identity(load_config(config_path, {})).did
    found = run_json(config_path, capsys, "rotate", "--prepare")
    assert (found["did"], found["former_dids"], found["kids"]) == (before, [], FRESH)
    (prepared,) = found["prepared_dids"]
    assert call("keys", "rotate", "--prepare", "--config", str(config_path)) == 1
    assert "already has prepared keys" in one_line(capsys)
    found = run_json(config_path, capsys, "rotate")
    assert (found["did"], found["former_dids"], found["prepared_dids"], found["kids"]) == (
        prepared,
        [before],
        [],
        FRESH,
    )


def test_retires_keys_after_confirmation(config_path: Path, capsys: Capture) -> None:
    """Without --yes it only names the DIDs concerned."""
    before = load_identity(load_config(config_path, {})).did
    run_json(config_path, capsys, "rotate")
    path = config_path.with_name("keys.jwks")
    content = path.read_bytes()
    assert call("keys", "retire", "signing", "--config", str(config_path)) == 0
    output = capsys.readouterr().out
    assert f"{', '.join(FIRST)} would be deleted\nwould no longer be accepted: {before}\n" in output
    assert "nothing was deleted; add --yes to delete" in output
    found = run_json(config_path, capsys, "retire", "signing")
    assert (found["did"], found["kids"], found["left"], found["done"]) == (before, FIRST, FRESH, False)
    assert path.read_bytes() == content
    found = run_json(config_path, capsys, "retire", "signing", "--yes")
    assert (found["did"], found["done"]) == (before, True)
    assert [kid for kid, _ in load_keys(path)] == FRESH


def test_retires_root_secret_after_confirmation(config_path: Path, capsys: Capture) -> None:
    """It outlasts the keys that it follows from, and is deleted by a name of its own."""

    def read_secret() -> bytes:
        return load_identity(load_config(config_path, {})).root_secret

    first = read_secret()
    assert call("keys", "retire", "root", "--yes", "--config", str(config_path)) == 1
    assert "retire the oldest keys first" in one_line(capsys)
    run_json(config_path, capsys, "rotate")
    run_json(config_path, capsys, "retire", "signing", "--yes")
    assert read_secret() == first
    assert call("keys", "retire", "root", "--config", str(config_path)) == 0
    assert "have to connect again" in capsys.readouterr().out
    assert read_secret() == first
    assert run_json(config_path, capsys, "retire", "root", "--yes")["done"]
    assert read_secret() != first


@pytest.mark.parametrize(
    ("kid", "why"),
    [
        ("prekey", "is a current key, which cannot be retired; run `mediatord keys rotate` first"),
        ("x", "has no key x;"),
    ],
)
def test_refuses_to_retire_current_or_unknown_keys(config_path: Path, capsys: Capture, kid: str, why: str) -> None:
    """In one line, with or without --yes."""
    for more in ((), ("--yes",)):
        assert call("keys", "retire", kid, *more, "--config", str(config_path)) == 1
        assert why in one_line(capsys)


def test_refuses_to_retire_key_of_configured_former_did(config_path: Path, capsys: Capture) -> None:
    former = load_identity(load_config(config_path, {})).did
    run_json(config_path, capsys, "rotate")
    text = config_path.read_text("utf-8").replace(URL, "https://new.example")
    config_path.write_text(text.replace("former_dids: []", f"former_dids: [{former}]"), "utf-8")
    assert load_config(config_path, {}).identity.former_dids == (former,)
    assert call("keys", "retire", "prekey", "--yes", "--config", str(config_path)) == 1
    assert one_line(capsys).endswith("remove it from identity.former_dids first")
    assert [kid for kid, _ in load_keys(config_path.with_name("keys.jwks"))] == FRESH + FIRST


@pytest.mark.parametrize("words", [("list",), ("rotate",), ("retire", "prekey")])
def test_refuses_accessible_key_file(config_path: Path, capsys: Capture, words: tuple[str, ...]) -> None:
    """With the command that fixes it."""
    path = config_path.with_name("keys.jwks")
    path.chmod(0o644)
    assert call("keys", *words, "--config", str(config_path)) == 1
    assert one_line(capsys) == f"{path} is accessible to other users (mode 0644); run: chmod 600 {path}"
