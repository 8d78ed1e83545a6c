"""Credo's wallets with Credo's own mediator: what tests of ours ask of them, they can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.foreign.credo.processes import (
    BATCHES,
    DIRECT,
    IMPLICIT,
    LIVE,
    POLLING,
    QUEUE_AND_LIVE,
    STRATEGIES,
    CredoWallet,
    CredoWallets,
    require_credo,
    run_credo_mediator,
)

# What brings a wallet its mail, where a message does.
CARRIERS = {
    LIVE: "messagepickup/2.0/delivery",
    POLLING: "messagepickup/2.0/delivery",
    BATCHES: "messagepickup/1.0/batch",
}

# Starts a new wallet, which is granted mediation.
Start = Callable[[str | None], CredoWallet]


@pytest.fixture(scope="module")
def wallets() -> Iterator[CredoWallets]:
    """One process for all wallets."""
    running = CredoWallets()
    yield running
    running.close()


@pytest.fixture(scope="module")
def invite() -> Iterator[Callable[[str | None], str]]:
    """Returns the invitation of a mediator that serves a strategy; none serves all."""
    require_credo()
    with ExitStack() as stack:

        @cache
        def run(forwarding: str) -> str:
            directory = Path(stack.enter_context(TemporaryDirectory()))
            return stack.enter_context(run_credo_mediator(directory, forwarding)).invitation

        yield lambda strategy: run(DIRECT if strategy == IMPLICIT else QUEUE_AND_LIVE)


@pytest.fixture
def start(wallets: CredoWallets, invite: Callable[[str | None], str]) -> Iterator[Start]:
    """Stops the wallets after the test."""

    def start(strategy: str | None) -> CredoWallet:
        wallet = wallets.create(invite(strategy), strategy)
        wallet.start()
        assert wallet.find_mediator()["state"] == "granted"
        return wallet

    yield start
    wallets.stop()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mail_while_connected(strategy: str, start: Start) -> None:
    """Two wallets connect through the mediator, and exchange texts and pings."""
    alice, bob = start(strategy), start(strategy)
    to_bob, to_alice = alice.connect(bob)
    alice.send(to_bob, "from Alice")
    bob.send(to_alice, "from Bob")
    assert (alice.await_texts(1), bob.await_texts(1)) == (["from Bob"], ["from Alice"])
    bob.ping(to_alice)
    alice.ping_mediator()
    if strategy in CARRIERS:
        assert CARRIERS[strategy] in alice.received_types()


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != IMPLICIT])
def test_mail_after_absence(strategy: str, start: Start) -> None:
    """It waits until the wallet is back, except that this mediator gives none of it to implicit pickup."""
    alice, bob = start(strategy), start(LIVE)
    _, to_alice = alice.connect(bob)
    alice.stop()
    for text in ("first", "second", "third"):
        bob.send(to_alice, text)
    alice.start()
    assert sorted(alice.await_texts(3)) == ["first", "second", "third"]


def test_strategy_by_features(start: Start) -> None:
    """Without a strategy, a wallet asks for features, and polls by pickup 2.0."""
    alice, bob = start(None), start(LIVE)
    _, to_alice = alice.connect(bob)
    bob.send(to_alice, "text")
    assert alice.await_texts(1) == ["text"]
    assert alice.find_mediator()["pickupStrategy"] == POLLING
