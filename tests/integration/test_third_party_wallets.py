"""
Wallets of other authors against a running daemon (reference 10.2 to 10.4).

Each library runs all of its themes once, in an environment of its own; the tests below read its step log. The steps
themselves are in tests/foreign/themes.py and in the driver of the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.foreign.environments import python_of, run_driver
from tests.integration.daemon import Daemon

DRIVERS = {
    "sicpa": (".venv-sicpa", "sicpa_wallet.py"),
    "indicio-askar": (".venv-indicio", "indicio_wallet.py", "askar"),
    "indicio-authlib": (".venv-indicio", "indicio_wallet.py", "authlib"),
}
COMMON = (
    "introduction",
    "mediation-3",
    "mediation-2",
    "pickup",
    "live",
    "authcrypted-forward",
    "refusals",
)
OWN = {
    "sicpa": (
        "pickup-old-key-ids",
        "nesting",
        "rotation",
        "did-web-mediation-3",
        "did-web-X25519",
        "did-web-P-256",
        "did-web-P-384",
        "did-web-P-521",
    ),
    "indicio-askar": ("quickstart",),
    "indicio-authlib": (),
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One mediator for all of them; it has to stop in an orderly way after all that."""
    with Daemon() as running:
        yield running


Log = list[dict[str, Any]]


def step_log(library: str, url: str, *themes: str) -> Log:
    """What `library` did with the mediator at `url`: theme, name, ok and detail of each step."""
    environment, program, *arguments = DRIVERS[library]
    ran = run_driver(environment, program, *arguments, url, *themes)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture(scope="module")
def full_log(daemon: Daemon) -> Callable[[str], Log]:
    """The log of all themes of a library, in one run."""
    return cache(lambda library: step_log(library, daemon.url, *COMMON, *OWN[library]))


def assert_complete(log: Log, theme: str) -> None:
    """No step of the theme failed, and it got to its end."""
    steps = [step for step in log if step["theme"] == theme]
    assert [step for step in steps if not step["ok"]] == []
    assert [step["name"] for step in steps][-1:] == ["end"]


@pytest.mark.parametrize(("library", "theme"), [(name, theme) for name in DRIVERS for theme in COMMON + OWN[name]])
def test_round_trip(library: str, theme: str, request: pytest.FixtureRequest) -> None:
    """Each step of the theme succeeds, by the foreign library's own packing, unpacking, routing and resolution."""
    python_of(DRIVERS[library][0])  # skips before there is a daemon
    assert_complete(request.getfixturevalue("full_log")(library), theme)


def test_raw_push() -> None:
    """A client that does not know deliveries gets the envelopes themselves by live_push: raw (reference 6.3)."""
    python_of(DRIVERS["indicio-askar"][0])
    with Daemon({"didcomm": {"live_push": "raw"}}) as daemon:
        assert_complete(step_log("indicio-askar", daemon.url, "raw-push"), "raw-push")


def test_rewrapped() -> None:
    """SICPA's library unwraps the forward to itself that rewrap: true puts around its messages (reference 4.6)."""
    python_of(DRIVERS["sicpa"][0])
    with Daemon({"didcomm": {"rewrap": True}}) as daemon:
        assert_complete(step_log("sicpa", daemon.url, "rewrapped"), "rewrapped")
