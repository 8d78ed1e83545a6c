"""ACA-Py connects with mediatord: by both versions of DID Exchange, with each form of DID."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest

from tests.integration.acapy_agent import DID_EXCHANGE_1_0, DID_EXCHANGE_1_1, ACAPyAgent, run_agents
from tests.integration.daemon import Daemon


@pytest.fixture(scope="module")
def wallet() -> Iterator[ACAPyAgent]:
    """An agent for all tests, as each start takes seconds."""
    agent = ACAPyAgent("wallet")
    with run_agents(agent):
        yield agent


@pytest.fixture(scope="module")
def invitation(wallet: ACAPyAgent) -> Iterator[dict[str, Any]]:
    """The invitation of a mediator that may post to the agent."""
    with Daemon({"outbound": {"allow_private": ["127.0.0.0/8"]}}) as daemon:
        with urlopen(f"{daemon.url}/invitation/v1") as response:
            yield json.load(response)


@pytest.mark.parametrize(
    ("protocol", "method", "form"),
    [
        (DID_EXCHANGE_1_1, None, "did:peer:4"),
        (DID_EXCHANGE_1_1, "did:peer:4", "did:peer:4"),
        (DID_EXCHANGE_1_1, "did:peer:2", "did:peer:2"),
        (DID_EXCHANGE_1_0, None, ""),
    ],
)
def test_agent_connects(
    wallet: ACAPyAgent, invitation: dict[str, Any], protocol: str, method: str | None, form: str
) -> None:
    """The agent has a DID of the mediator in the form of its own, unqualified in 1.0, and is granted mediation."""
    received = {**invitation, "handshake_protocols": [protocol]}
    if method is None:
        connection = wallet.connect(received)
    else:
        path, options = (
            "/out-of-band/receive-invitation",
            {"use_existing_connection": "false", "auto_accept": "false"},
        )
        connection = str(wallet.request("POST", path, received, **options)["connection_id"])
        wallet.request("POST", f"/didexchange/{connection}/accept-invitation", use_did_method=method)
    record = wallet.await_connection(connection)
    assert record["connection_protocol"] == protocol.removeprefix("https://didcomm.org/")
    for did in (record["my_did"], record["their_did"]):
        assert did.startswith("did:") == bool(form) and did.startswith(form)
    wallet.request_mediation(connection)
