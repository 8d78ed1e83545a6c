"""`mediatord demo` at running mediators: all steps, and those that a mediator's configuration rules out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mediatord.runtime.secret_files import create_secret_file
from mediatord.wallet.temporary_daemon import make_vapid_key
from tests.integration.message_load import prepare_daemon

# The demo starts another mediator.
DEMO_SECONDS = 300.0
WEB_PUSH = {"web_push": {"key_file": "vapid.pem", "contact": "mailto:admin@mediator.example"}}
LOOPBACK = {"allow_private": ["127.0.0.0/8"]}
WOKEN = 'The push service woke Bob\'s wallet, which decrypted:\n      {"mediator":'


def run_demo_at(settings: dict[str, Any]) -> str:
    """The output of the demo, all steps of which succeed, at a daemon with these settings."""
    daemon = prepare_daemon(settings)
    create_secret_file(daemon.directory / "vapid.pem", make_vapid_key())
    with daemon:
        output = subprocess.run(
            [sys.executable, "-m", "mediatord", "demo", "--url", daemon.url],
            capture_output=True,
            text=True,
            timeout=DEMO_SECONDS,
            check=False,
        )
    assert (output.returncode, output.stderr) == (0, ""), output.stdout
    assert output.stdout.endswith("\nAll steps succeeded.\n")
    return output.stdout


def test_wallets_of_both_protocols_are_woken() -> None:
    """Each sleeps, is woken by what names its mediator only, and fetches what arrived."""
    output = run_demo_at({"push": {**WEB_PUSH, "quiet_after_poll": "0s"}, "outbound": LOOPBACK})
    sections = [section for section in output.split("\n\n") if WOKEN in section]
    titles = [section.partition("\n")[0] for section in sections]
    assert titles == [
        "DIDComm: Alice sends a message while Bob's wallet sleeps",
        "Decentrl: Alice sends an event while Bob's wallet sleeps",
    ]
    for section, fetched in zip(sections, ("message", "event"), strict=True):
        steps = (
            "registered the subscription",
            "closed the socket, and sleeps",
            WOKEN,
            f"Bob's wallet fetched the {fetched}",
        )
        positions = [section.find(step) for step in steps]
        assert -1 not in positions and positions == sorted(positions), section
        assert "ok  Bob acknowledged it, and his queue is empty" in section
    assert "Left out" not in output
    (section,) = (one for one in output.split("\n\n") if one.startswith("DIDComm v1 and v2: "))
    v1_steps = (
        "Carol registered a key, and sleeps.",
        "ok  the mediator answered 202: the message is on disk",
        "Carol is back and fetched the message",
        "ok  Carol acknowledged it, and her queue is empty",
        "The mediator pushed it to Bob.",
        "ok  Bob acknowledged it, and his queue is empty",
    )
    positions = [section.find(step) for step in v1_steps]
    assert -1 not in positions and positions == sorted(positions), section
    assert section.count("ok  the text is intact") == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "the mediator has no Web Push configured."),
        ({"push": WEB_PUSH}, "the mediator accepts no push service at 127.0.0.1 (outbound.allow_private)."),
    ],
)
def test_wakeup_is_left_out(settings: dict[str, Any], reason: str) -> None:
    """At a mediator that cannot wake by the demo's push service; Decentrl's is shown at the demo's own mediator."""
    output = run_demo_at(settings)
    assert f"DIDComm: Alice sends a message while Bob's wallet sleeps\n      Left out: {reason}\n" in output
    assert output.count(WOKEN) == 1


def test_v1_is_left_out() -> None:
    """At a mediator that does not serve it."""
    output = run_demo_at({"didcomm_v1": {"enabled": False}})
    assert "Left out: the mediator has no invitation for DIDComm v1 (didcomm_v1.enabled)." in output
    assert "Carol connected" not in output
