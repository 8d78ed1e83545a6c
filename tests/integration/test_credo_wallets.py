"""
Wallets of Credo with a running daemon (DIDComm v1 reference, 11): how they connect, and each way to get their mail.

tests/foreign/credo has their process, and compares with Credo's own mediator.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from mediatord.protocol.didcomm_v1.out_of_band import OOB_PARAMETER, build_url
from tests.foreign.credo.processes import (
    BATCHES,
    IMPLICIT,
    LIVE,
    POLLING,
    STRATEGIES,
    CredoWallet,
    CredoWallets,
    require_credo,
)
from tests.integration.daemon import START_SECONDS, Daemon
from tests.ledger_checks import read_sqlite_ledger

DELIVERY = "messagepickup/2.0/delivery"
BATCH = "messagepickup/1.0/batch"
# What brings the mail; a wallet with implicit pickup is sent deliveries as long as it acknowledges them.
CARRIERS = {LIVE: DELIVERY, POLLING: DELIVERY, BATCHES: BATCH, IMPLICIT: DELIVERY}

# More than fits into a delivery or a batch.
MANY = [f"while away {number}" for number in range(12)]

# Starts a new wallet with a pickup strategy and options of CredoWallets.create.
Start = Callable[..., CredoWallet]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One mediator for all wallets, which connect in quick succession; it must stop cleanly afterwards."""
    require_credo()
    with Daemon({"didcomm_v1": {"connections_per_minute": 1_000_000}}) as running:
        yield running


@pytest.fixture(scope="module")
def wallets() -> Iterator[CredoWallets]:
    """One process for all wallets."""
    running = CredoWallets()
    yield running
    running.close()


@pytest.fixture
def start(wallets: CredoWallets, daemon: Daemon) -> Iterator[Start]:
    """Stops the wallets after the test."""

    def start(strategy: str | None, *, invitation: str = "", **options: Any) -> CredoWallet:
        wallet = wallets.create(invitation or find_invitation(daemon, "oob"), strategy, **options)
        wallet.start()
        mediator = wallet.find_mediator()
        assert (mediator["state"], mediator["endpoint"]) == ("granted", f"{daemon.url}/didcomm")
        return wallet

    yield start
    wallets.stop()


def fetch(url: str, accept: str) -> str:
    """The body at a URL."""
    request = Request(url, headers={"Accept": accept})
    with build_opener(ProxyHandler({})).open(request, timeout=START_SECONDS) as response:
        return str(response.read().decode())


def find_invitation(daemon: Daemon, parameter: str) -> str:
    """The URL with a query parameter of this name, on the page for people."""
    page = unescape(fetch(f"{daemon.url}/invitation", "text/html"))
    found = re.search(rf"{re.escape(daemon.url)}/\S*\?{parameter}=[\w-]+", page)
    assert found, page
    return found[0]


def await_empty_queues(daemon: Daemon) -> None:
    """Wait until all mail has been acknowledged, which happens after wallets have shown it."""
    database = daemon.directory / "mediator.sqlite3"
    end = time.monotonic() + START_SECONDS
    while (ledger := read_sqlite_ledger(database).didcomm).waiting and time.monotonic() < end:
        time.sleep(0.02)
    assert (ledger.waiting, ledger.acknowledged) == (0, ledger.accepted), ledger


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mail(strategy: str, start: Start, daemon: Daemon) -> None:
    """Two wallets connect through the mediator and talk; what comes while one is away waits for it, in order."""
    alice, bob = start(strategy), start(strategy)
    to_bob, to_alice = alice.connect(bob)
    alice.send(to_bob, "from Alice")
    bob.send(to_alice, "from Bob")
    assert (alice.await_texts(1), bob.await_texts(1)) == (["from Bob"], ["from Alice"])
    alice.ping_mediator()
    alice.stop()
    for text in MANY:
        bob.send(to_alice, text)
    alice.start()
    assert alice.await_texts(1 + len(MANY)) == ["from Bob", *MANY]
    assert CARRIERS[strategy] in alice.received_types()
    await_empty_queues(daemon)
    assert alice.await_texts(0) == ["from Bob", *MANY]


def test_overlapping_polls(start: Start, daemon: Daemon) -> None:
    """A wallet that polls anew before it has worked off what it got gets each message once."""
    alice, bob = start(POLLING), start(LIVE)
    _, to_alice = alice.connect(bob)
    alice.stop()
    texts = [f"text {number}" for number in range(40)]
    for text in texts:
        bob.send(to_alice, text)
    alice.start()
    alice.await_texts(len(texts))
    await_empty_queues(daemon)
    assert sorted(alice.await_texts(0)) == sorted(texts)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_restarted_mediator(strategy: str, start: Start, daemon: Daemon) -> None:
    """Wallets that run through a restart get mail again by themselves; what is queued outlasts a killed mediator."""
    alice, bob = start(strategy), start(LIVE)
    _, to_alice = alice.connect(bob)
    daemon.restart()
    bob.send(to_alice, "after the restart")
    assert alice.await_texts(1) == ["after the restart"]
    await_empty_queues(daemon)
    alice.stop()
    for text in MANY:
        bob.send(to_alice, text)
    daemon.kill()
    daemon.start()
    alice.start()
    bob.send(to_alice, "after the kill")
    assert sorted(alice.await_texts(2 + len(MANY))) == sorted(["after the restart", *MANY, "after the kill"])
    await_empty_queues(daemon)


def test_strategy_by_features(start: Start, daemon: Daemon) -> None:
    """A wallet that is given no strategy asks for features, and polls by pickup 2.0."""
    alice, bob = start(None), start(LIVE)
    _, to_alice = alice.connect(bob)
    bob.send(to_alice, "text")
    assert alice.await_texts(1) == ["text"]
    assert alice.find_mediator()["pickupStrategy"] == POLLING
    await_empty_queues(daemon)


def test_raw_frames(start: Start, daemon: Daemon) -> None:
    """A wallet with implicit pickup that knows no pickup 2.0 gets the mail itself, and no delivery a second time."""
    alice, bob = start(IMPLICIT, knows_pickup_2=False), start(LIVE)
    _, to_alice = alice.connect(bob)
    bob.send(to_alice, "while connected")
    assert alice.await_texts(1) == ["while connected"]
    assert DELIVERY in alice.received_types()  # to find out
    await_empty_queues(daemon)
    alice.stop()
    for text in MANY:
        bob.send(to_alice, text)
    alice.start()
    assert alice.await_texts(1 + len(MANY)) == ["while connected", *MANY]
    assert set(alice.received_types()) == {"basicmessage/1.0/message"}
    await_empty_queues(daemon)


# Options of a wallet, by what is uncommon about it.
FORMS: dict[str, dict[str, Any]] = {
    "did:peer:1": {"peer_did": 1},
    "did:peer:2": {"peer_did": 2},
    "keys in base58": {"useDidKeyInProtocols": False},
    "old media type": {"didCommMimeType": "application/ssi-agent-wire"},
    "old types of messages": {"useDidSovPrefixWhereAllowed": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, start: Start, daemon: Daemon) -> None:
    """Older wallets name DIDs, keys and messages otherwise."""
    assert_reachable(start(LIVE, **FORMS[form]), start(LIVE), daemon)


def test_connections_protocol(start: Start, daemon: Daemon) -> None:
    """By the invitation for older wallets, with names of messages as Bifold has them."""
    invitation = find_invitation(daemon, "c_i")
    alice = start(IMPLICIT, invitation=invitation, useDidSovPrefixWhereAllowed=True)
    assert "connections/1.0/response" in alice.received_types()
    assert_reachable(alice, start(LIVE), daemon)


def test_short_invitation(start: Start, daemon: Daemon) -> None:
    """By the short URL, which leads to the invitation."""
    assert_reachable(start(LIVE, invitation=f"{daemon.url}/invitation/v1"), start(LIVE), daemon)


def assert_reachable(alice: CredoWallet, bob: CredoWallet, daemon: Daemon) -> None:
    """Bob connects with Alice, and they exchange texts."""
    to_bob, to_alice = alice.connect(bob)
    alice.send(to_bob, "from Alice")
    bob.send(to_alice, "from Bob")
    assert (alice.await_texts(1), bob.await_texts(1)) == (["from Bob"], ["from Alice"])
    await_empty_queues(daemon)


def test_removed_key(start: Start, daemon: Daemon) -> None:
    """With a connection, its key goes; mail to it is no longer taken."""
    alice, bob = start(LIVE), start(LIVE)
    _, to_alice = alice.connect(bob)
    to_bob_again, again = alice.connect(bob)
    alice.forget(to_bob_again)
    alice.ping_mediator()
    (response,) = (message for message in alice.received() if "remove" in json.dumps(message))
    assert [update["result"] for update in response["updated"]] == ["success"]
    await_empty_queues(daemon)
    accepted = read_sqlite_ledger(daemon.directory / "mediator.sqlite3").didcomm.accepted
    bob.send(again, "to nobody")
    bob.send(to_alice, "text")
    assert alice.await_texts(1) == ["text"]
    await_empty_queues(daemon)
    assert read_sqlite_ledger(daemon.directory / "mediator.sqlite3").didcomm.accepted == accepted + 1


def test_invitation_of_former_id(start: Start, daemon: Daemon) -> None:
    """A wallet knows by the key that it has this connection, and uses it again."""
    alice = start(LIVE)
    invitation = json.loads(fetch(f"{daemon.url}/invitation/v1", "application/json"))
    former = build_url(daemon.url, OOB_PARAMETER, {**invitation, "@id": "a-former-invitation"})
    assert alice.reuse(former) == alice.find_mediator()["connectionId"]
