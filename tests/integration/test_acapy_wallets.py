"""ACA-Py agents as mediated wallets and as senders (DIDComm v1 reference, 11)."""

from __future__ import annotations

from tests.integration.acapy_agent import ACAPyAgent


def test_agents_exchange_messages_through_mediator_of_their_own_kind() -> None:
    """The comparison: what the agents of these tests do with a mediator that is ACA-Py, too."""
    with (
        ACAPyAgent("mediator", "--open-mediation") as mediator,
        ACAPyAgent("wallet") as wallet,
        ACAPyAgent("sender") as sender,
    ):
        mediation = wallet.request_mediation(wallet.connect(mediator.create_invitation()))
        wallet.use_mediator(mediation)
        invitation = wallet.create_invitation()
        assert invitation["services"][0]["serviceEndpoint"] == f"http://127.0.0.1:{mediator.port}"
        connection = sender.connect(invitation)
        sender.send_message(connection, "to the wallet")
        assert wallet.await_messages(1) == ["to the wallet"]
        wallet.send_message(wallet.find_connection(invitation), "to the sender")
        assert sender.await_messages(1) == ["to the sender"]
