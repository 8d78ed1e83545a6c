"""
Third-party wallets against a running daemon (reference 10.2 to 10.4).

Each library runs all of its scenarios once, in its own environment; the tests read its step log. The steps are in
tests/foreign/themes.py and in the driver of the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.foreign.environments import find_python, run_driver
from tests.integration.daemon import Daemon
from tests.integration.push_services import PushServices

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
LIBRARY_THEMES = {
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
    """One mediator for all of them; it must stop cleanly afterwards."""
    with Daemon() as running:
        yield running


Log = list[dict[str, Any]]


def step_log(library: str, url: str, *themes: str) -> Log:
    """What `library` did with the mediator at `url`: theme, name, ok and detail of each step."""
    environment, program, *arguments = DRIVERS[library]
    result = run_driver(environment, program, *arguments, url, *themes)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def full_log(daemon: Daemon) -> Callable[[str], Log]:
    """Returns the log of all themes of a library, from one run."""
    return cache(lambda library: step_log(library, daemon.url, *COMMON, *LIBRARY_THEMES[library]))


def assert_complete(log: Log, theme: str) -> None:
    """All steps of the theme succeeded, up to its end."""
    steps = [step for step in log if step["theme"] == theme]
    assert [step for step in steps if not step["ok"]] == []
    assert [step["name"] for step in steps][-1:] == ["end"]


@pytest.mark.parametrize(
    ("library", "theme"), [(name, theme) for name in DRIVERS for theme in COMMON + LIBRARY_THEMES[name]]
)
def test_every_step_succeeds(library: str, theme: str, request: pytest.FixtureRequest) -> None:
    """With the library's own packing, unpacking, routing and resolution."""
    find_python(DRIVERS[library][0])  # skips before a daemon is started
    assert_complete(request.getfixturevalue("full_log")(library), theme)


def test_raw_push_reaches_client_without_deliveries() -> None:
    """live_push: raw pushes the envelopes themselves (reference 6.3)."""
    find_python(DRIVERS["indicio-askar"][0])
    with Daemon({"didcomm": {"live_push": "raw"}}) as daemon:
        assert_complete(step_log("indicio-askar", daemon.url, "raw-push"), "raw-push")


def test_library_unwraps_rewrapped_forwards() -> None:
    """SICPA's library unwraps forwards to itself, sent with rewrap: true (reference 4.6)."""
    find_python(DRIVERS["sicpa"][0])
    with Daemon({"didcomm": {"rewrap": True}}) as daemon:
        assert_complete(step_log("sicpa", daemon.url, "rewrapped"), "rewrapped")


@pytest.mark.parametrize("library", ["sicpa", "indicio-askar"])
def test_registers_devices_for_push_notifications(library: str) -> None:
    """With the services that are configured, as Discover Features shows."""
    find_python(DRIVERS[library][0])
    services = PushServices()
    try:
        with services.prepare_daemon() as daemon:
            assert_complete(step_log(library, daemon.url, "push-registration"), "push-registration")
    finally:
        services.close()
