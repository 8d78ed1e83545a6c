"""Credo's wallets connect with mediatord: by each form of its invitation, with each form of DID."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mediatord.identity.invitation import V1Invitation, make_v1_invitation
from mediatord.identity.key_file import load_keys
from tests.foreign.credo.processes import IMPLICIT, POLLING, CredoWallets
from tests.integration.daemon import Daemon

GRANT = "coordinate-mediation/1.0/mediate-grant"


@pytest.fixture(scope="module")
def wallets() -> Iterator[CredoWallets]:
    """One process for all wallets."""
    running = CredoWallets()
    yield running
    running.close()


@pytest.fixture(scope="module")
def invitation(wallets: CredoWallets) -> Iterator[V1Invitation]:
    """The invitation of a running mediator."""
    with Daemon() as daemon:
        root_secret = load_keys(daemon.directory / "keys.jwks").root_secret
        yield make_v1_invitation(daemon.url, root_secret, "mediatord")


@pytest.mark.parametrize(
    ("form", "algorithm", "response"),
    [
        ("url", 4, "didexchange/1.1/response"),
        ("url", 2, "didexchange/1.1/response"),
        ("url", 1, "didexchange/1.1/response"),
        ("short_url", 4, "didexchange/1.1/response"),
        ("connection_url", 4, "connections/1.0/response"),
    ],
)
@pytest.mark.parametrize("strategy", [POLLING, IMPLICIT])
def test_wallet_connects(
    wallets: CredoWallets, invitation: V1Invitation, form: str, algorithm: int, response: str, strategy: str
) -> None:
    """
    A wallet is granted mediation, over HTTP or, with implicit pickup, over its WebSocket; started again, it goes on
    with the same connection.
    """
    connections = {"autoAcceptConnections": True, "peerNumAlgoForDidExchangeRequests": algorithm}
    wallet = wallets.create(getattr(invitation, form), strategy, connections=connections)
    try:
        wallet.start()
        assert list(wallet.received_types())[:2] == [response, GRANT]
        mediator = wallet.find_mediator()
        assert (mediator["state"], mediator["endpoint"]) == (
            "granted",
            invitation.message["services"][0]["serviceEndpoint"],
        )
        wallet.ping_mediator()
        wallet.stop()
        wallet.start()
        assert wallet.find_mediator() == mediator
        wallet.ping_mediator()
        assert response not in wallet.received_types()
    finally:
        wallets.stop()
