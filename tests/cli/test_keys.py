"""`mediatord keys`: new keys beside those of before, and the end of old ones."""

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
def made(tmp_path: Path, capsys: Capture) -> Path:
    """A configuration with its keys."""
    assert call("init", "--dir", str(tmp_path / "m"), "--public-url", URL) == 0
    capsys.readouterr()
    return tmp_path / "m" / "mediator.yaml"


def asked(made: Path, capsys: Capture, *words: str) -> dict[str, Any]:
    """What programs are told."""
    assert call("keys", *words, "--config", str(made), "--json") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    found: dict[str, Any] = json.loads(shown.out)
    return found


def secrets_of(made: Path) -> list[str]:
    """What must never be shown."""
    return [key.jwk()["d"] for _, key in load_keys(made.with_name("keys.jwks"))]


def test_list(made: Path, capsys: Capture) -> None:
    """Which keys there are, which are current, and the DID of each pair."""
    first = load_identity(load_config(made, {})).did
    asked(made, capsys, "rotate")
    second = load_identity(load_config(made, {})).did
    asked(made, capsys, "rotate", "--prepare")
    listed = asked(made, capsys, "list")
    assert listed["file"] == str(made.with_name("keys.jwks"))
    (prepared, *others) = listed["generations"]
    assert (prepared["state"], prepared["kids"][0]) == ("prepared", "prekey-3")
    assert others == [
        {"state": "current", "kids": FRESH, "did": second},
        {"state": "former", "kids": FIRST, "did": first},
    ]
    assert call("keys", "list", "--config", str(made)) == 0
    shown = capsys.readouterr().out
    assert (
        f"current   {' '.join(FRESH)}\n          {second}\nformer    {' '.join(FIRST)}\n          {first}\n" in shown
    )
    assert not [secret for secret in secrets_of(made) if secret in shown]


def test_rotate(made: Path, capsys: Capture) -> None:
    """It says which DID is new, which are former, and what to do next; no secret."""
    before = load_identity(load_config(made, {})).did
    assert call("keys", "rotate", "--config", str(made)) == 0
    shown = capsys.readouterr().out
    after = load_identity(load_config(made, {}))
    assert after.former_peer_dids == (before,)
    assert f"DID       {after.did}\n          {after.web_did}\nformer    {before}\n" in shown
    assert "systemctl reload mediatord" in shown and "kill -HUP" in shown
    assert not [secret for secret in secrets_of(made) if secret in shown]
    again = asked(made, capsys, "rotate")
    assert again["former_dids"] == [after.did, before]
    assert again["kids"][0] == "prekey-3"


def test_prepare(made: Path, capsys: Capture) -> None:
    """The DID stays, until the next rotate; preparing twice is a mistake."""
    before = load_identity(load_config(made, {})).did
    found = asked(made, capsys, "rotate", "--prepare")
    assert (found["did"], found["former_dids"], found["kids"]) == (before, [], FRESH)
    (prepared,) = found["prepared_dids"]
    assert call("keys", "rotate", "--prepare", "--config", str(made)) == 1
    assert "already has prepared keys" in one_line(capsys)
    found = asked(made, capsys, "rotate")
    assert (found["did"], found["former_dids"], found["prepared_dids"], found["kids"]) == (
        prepared,
        [before],
        [],
        FRESH,
    )


def test_retire(made: Path, capsys: Capture) -> None:
    """Without --yes it says what it would do; with it, which DID is accepted no more."""
    before = load_identity(load_config(made, {})).did
    asked(made, capsys, "rotate")
    path = made.with_name("keys.jwks")
    content = path.read_bytes()
    assert call("keys", "retire", "signing", "--config", str(made)) == 0
    shown = capsys.readouterr().out
    assert f"{', '.join(FIRST)} would be deleted\nwould no longer be accepted: {before}\n" in shown
    assert "nothing was deleted; add --yes to delete" in shown
    found = asked(made, capsys, "retire", "signing")
    assert (found["did"], found["kids"], found["left"], found["done"]) == (before, FIRST, FRESH, False)
    assert path.read_bytes() == content
    found = asked(made, capsys, "retire", "signing", "--yes")
    assert (found["did"], found["done"]) == (before, True)
    assert [kid for kid, _ in load_keys(path)] == FRESH


@pytest.mark.parametrize(
    ("kid", "why"),
    [
        ("prekey", "is a current key, which cannot be retired; run mediatord keys rotate first"),
        ("x", "has no key x;"),
    ],
)
def test_not_retired(made: Path, capsys: Capture, kid: str, why: str) -> None:
    """What is in use, or is not there, is said in one line, with --yes or without."""
    for more in ((), ("--yes",)):
        assert call("keys", "retire", kid, *more, "--config", str(made)) == 1
        assert why in one_line(capsys)


def test_a_former_did_that_is_listed(made: Path, capsys: Capture) -> None:
    """The key of a DID that the configuration wants to be accepted is not retired."""
    former = load_identity(load_config(made, {})).did
    asked(made, capsys, "rotate")
    text = made.read_text("utf-8").replace(URL, "https://new.example")
    made.write_text(text.replace("former_dids: []", f"former_dids: [{former}]"), "utf-8")
    assert load_config(made, {}).identity.former_dids == (former,)
    assert call("keys", "retire", "prekey", "--yes", "--config", str(made)) == 1
    assert one_line(capsys).endswith("remove it from identity.former_dids first")
    assert [kid for kid, _ in load_keys(made.with_name("keys.jwks"))] == FRESH + FIRST


@pytest.mark.parametrize("words", [("list",), ("rotate",), ("retire", "prekey")])
def test_open_to_others(made: Path, capsys: Capture, words: tuple[str, ...]) -> None:
    """A key file that others can read is refused with the command that mends it."""
    path = made.with_name("keys.jwks")
    path.chmod(0o644)
    assert call("keys", *words, "--config", str(made)) == 1
    assert one_line(capsys) == f"{path} is accessible to other users (mode 0644); run: chmod 600 {path}"
