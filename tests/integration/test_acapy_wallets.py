"""
ACA-Py agents as mediated wallets and as senders (DIDComm v1).

They are what operators run: no return route, no pickup, every message to them is POSTed to their endpoint.
"""

from __future__ import annotations

import html
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from twisted.internet import reactor  # noqa: TID251
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_methods import expand_did_peer, make_did_peer_4
from mediatord.protocol.didcomm_v1.did_document import OwnDocument
from mediatord.protocol.didcomm_v1.envelope import pack_authcrypt
from mediatord.protocol.didcomm_v1.keys import parse_key
from mediatord.protocol.didcomm_v1.out_of_band import OOB_PARAMETER, build_url
from mediatord.wallet.didcomm_client import open_http
from mediatord.wallet.didcomm_v1_client import V1Grant, V1Wallet
from mediatord.wallet.didcomm_v1_messages import OpenedV1Message, V1Handshake, V1Invitation
from tests.foreign.credo.processes import LIVE, CredoWallets
from tests.foreign.environments import find_python
from tests.integration.acapy_agent import (
    DID_EXCHANGE_1_0,
    DID_EXCHANGE_1_1,
    ENVIRONMENT,
    PATIENCE_SECONDS,
    ACAPyAgent,
    run_agents,
)
from tests.integration.daemon import Daemon
from tests.ledger_checks import read_sqlite_ledger

SETTINGS = {"outbound": {"allow_private": ["127.0.0.0/8"]}}
ACAPY_MEDIA_TYPE = "application/ssi-agent-wire"
_POLL_SECONDS = 0.05


def fetch_invitation(daemon: Daemon) -> dict[str, Any]:
    """The invitation for wallets of DIDComm v1."""
    with urllib.request.urlopen(f"{daemon.url}/invitation/v1") as response:
        return dict(json.load(response))


def fetch_invitation_link(daemon: Daemon) -> str:
    """The link that the invitation page shows."""
    with urllib.request.urlopen(
        urllib.request.Request(f"{daemon.url}/invitation", headers={"Accept": "text/html"})
    ) as page:
        text = page.read().decode()
    found = re.search(r"<code>([^<]*[?]oob=[^<]*)</code>", text)
    assert found is not None, text
    return html.unescape(found[1])


def await_queued(daemon: Daemon, count: int) -> None:
    """Wait until so many messages are queued."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    database = daemon.directory / "mediator.sqlite3"
    while (found := read_sqlite_ledger(database).didcomm.waiting) != count:
        assert time.monotonic() < deadline, f"{found} messages are queued, not {count}"
        time.sleep(_POLL_SECONDS)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A mediator, which may POST to loopback addresses; it must stop cleanly afterwards."""
    find_python(ENVIRONMENT)
    with Daemon(SETTINGS) as running:
        yield running
        assert "Traceback" not in running.output()


@pytest.fixture(scope="module")
def agents(daemon: Daemon) -> Iterator[tuple[ACAPyAgent, ACAPyAgent]]:
    """A wallet and a sender."""
    wallet, sender = ACAPyAgent("wallet"), ACAPyAgent("sender")
    with run_agents(wallet, sender):
        yield wallet, sender


@pytest.fixture(scope="module")
def credo_wallets() -> Iterator[CredoWallets]:
    """Wallets of Credo; skips the test if that is not installed."""
    running = CredoWallets()
    yield running
    running.stop()
    running.close()


@dataclass(frozen=True)
class Route:
    """
    A connection of a sender with a wallet behind the mediator.

    :param mediation: of the wallet.
    :param invitation_key: of the wallet.
    :param to_wallet: id of the connection at the sender.
    :param to_sender: id of the connection at the wallet.
    """

    wallet: ACAPyAgent
    sender: ACAPyAgent
    mediation: str
    invitation_key: str
    to_wallet: str
    to_sender: str


# Both versions, or in `make test` the later one.
VERSIONS = pytest.mark.parametrize(
    "route", [DID_EXCHANGE_1_1, DID_EXCHANGE_1_0], ids=["1.1", "1.0"], indirect=True, scope="module"
)
LATER_VERSION = pytest.mark.parametrize(
    "route",
    [DID_EXCHANGE_1_1, pytest.param(DID_EXCHANGE_1_0, marks=pytest.mark.exhaustive)],
    ids=["1.1", "1.0"],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def route(daemon: Daemon, agents: tuple[ACAPyAgent, ACAPyAgent], request: pytest.FixtureRequest) -> Route:
    """A sender and a wallet that has connected with the mediator by this version of DID Exchange."""
    wallet, sender = agents
    invitation = fetch_invitation(daemon)
    assert request.param in invitation["handshake_protocols"]
    wallet.use_mediator(None)
    mediator = wallet.connect({**invitation, "handshake_protocols": [request.param]})
    assert wallet.await_connection(mediator)["connection_protocol"] == request.param.partition("didcomm.org/")[2]
    mediation = wallet.request_mediation(mediator)
    wallet.use_mediator(mediation)
    own_invitation = wallet.create_invitation()
    (service,) = own_invitation["services"]
    assert service["serviceEndpoint"] == f"{daemon.url}/didcomm"
    assert len(service["routingKeys"]) == 1
    to_wallet = sender.connect(own_invitation)
    (key,) = service["recipientKeys"]
    return Route(wallet, sender, mediation, key, to_wallet, wallet.find_connection(own_invitation))


def test_agents_exchange_messages_through_mediator_of_their_own_kind() -> None:
    """The comparison: what the agents of these tests do with a mediator that is ACA-Py, too."""
    mediator, wallet, sender = ACAPyAgent("mediator", "--open-mediation"), ACAPyAgent("wallet"), ACAPyAgent("sender")
    with run_agents(mediator, wallet, sender):
        mediation = wallet.request_mediation(wallet.connect(mediator.create_invitation()))
        wallet.use_mediator(mediation)
        invitation = wallet.create_invitation()
        assert invitation["services"][0]["serviceEndpoint"] == f"http://127.0.0.1:{mediator.port}"
        connection = sender.connect(invitation)
        sender.send_message(connection, "to the wallet")
        assert wallet.await_messages(1) == ["to the wallet"]
        wallet.send_message(wallet.find_connection(invitation), "to the sender")
        assert sender.await_messages(1) == ["to the sender"]


def test_mediator_named_at_start(daemon: Daemon) -> None:
    """The link of the invitation page, as the start option of an agent that uses it for all of its invitations."""
    wallet = ACAPyAgent("wallet", "--mediator-invitation", fetch_invitation_link(daemon))
    with run_agents(wallet):
        assert wallet.await_default_mediator()["endpoint"] == f"{daemon.url}/didcomm"


@VERSIONS
def test_registers_keys(route: Route) -> None:
    """The mediator has confirmed the key of the connection, and the removal of that of the invitation."""
    (key,) = route.wallet.await_keylist(route.mediation, 1)
    assert parse_key(key) != parse_key(route.invitation_key)


@VERSIONS
def test_message_while_connected(route: Route, daemon: Daemon) -> None:
    """A forward is POSTed to the wallet at once, and taken from the queue."""
    route.sender.send_message(route.to_wallet, "to the wallet")
    assert route.wallet.await_messages(1) == ["to the wallet"]
    route.wallet.send_message(route.to_sender, "to the sender")
    assert route.sender.await_messages(1) == ["to the sender"]
    await_queued(daemon, 0)


@LATER_VERSION
def test_messages_while_away(route: Route, daemon: Daemon) -> None:
    """What comes while the wallet is stopped is queued, and delivered when it shows itself again."""
    route.wallet.stop()
    for number in range(3):
        route.sender.send_message(route.to_wallet, f"while away {number}")
    await_queued(daemon, 3)
    route.wallet.start()
    route.wallet.create_invitation()  # sends a keylist update
    assert sorted(route.wallet.await_messages(3)) == [f"while away {number}" for number in range(3)]
    await_queued(daemon, 0)


@LATER_VERSION
def test_restart_of_mediator(route: Route, daemon: Daemon) -> None:
    """Connection, grant, keys and queued messages outlast the mediator; nobody tells it that the wallet is back."""
    route.wallet.stop()
    route.sender.send_message(route.to_wallet, "before the restart")
    await_queued(daemon, 1)
    daemon.restart()
    route.wallet.start()
    assert route.wallet.await_messages(1) == ["before the restart"]
    route.sender.send_message(route.to_wallet, "after the restart")
    assert route.wallet.await_messages(1) == ["after the restart"]
    invitation = route.wallet.create_invitation()
    route.sender.send_message(route.sender.connect(invitation), "by a new key")
    assert route.wallet.await_messages(1) == ["by a new key"]
    await_queued(daemon, 0)


@pytest.mark.parametrize("route", [DID_EXCHANGE_1_1], ids=["1.1"], indirect=True, scope="module")
def test_exchanges_messages_with_credo(route: Route, daemon: Daemon, credo_wallets: CredoWallets) -> None:
    """Both behind the mediator: one gets its messages by POST, the other by pickup, also those sent while away."""
    credo = credo_wallets.create(fetch_invitation_link(daemon), LIVE)
    credo.start()
    # ACA-Py does not read the response of this version of Credo, which names no parent thread.
    invitation = route.wallet.create_invitation()
    to_acapy = credo.accept(build_url(daemon.url, OOB_PARAMETER, invitation))
    to_credo = route.wallet.find_connection(invitation)
    route.wallet.send_message(to_credo, "from ACA-Py")
    assert credo.await_texts(1) == ["from ACA-Py"]
    credo.send(to_acapy, "from Credo")
    assert route.wallet.await_messages(1) == ["from Credo"]
    credo.stop()
    route.wallet.send_message(to_credo, "while away")
    await_queued(daemon, 1)
    credo.start()
    assert credo.await_texts(2) == ["from ACA-Py", "while away"]
    await_queued(daemon, 0)


@dataclass(frozen=True)
class RoutedHandshake(V1Handshake):
    """The handshake of a wallet whose peers reach it through a mediator."""

    route: V1Grant = V1Grant("", ())

    def make_document(self) -> OwnDocument:
        """The document names the mediator's endpoint and routing key."""
        document = expand_did_peer(super().make_document().did)
        (service,) = document["service"]
        keys = [key if "#" in key else f"{key}#{key.removeprefix('did:key:')}" for key in self.route.routing_keys]
        service |= {"serviceEndpoint": self.route.endpoint, "routingKeys": keys}
        return OwnDocument(make_did_peer_4({name: document[name] for name in document if name != "id"}))


class SenderTests(TestCase):
    """ACA-Py as the sender to a wallet that picks its messages up."""

    async def test_sends_to_wallet_of_another_kind(self) -> None:
        """The answer of the handshake and the messages come through the mediator's queue."""
        sender = ACAPyAgent("sender")
        with Daemon() as daemon, run_agents(sender):
            invitation = V1Invitation.from_json(fetch_invitation(daemon))
            wallet = await V1Wallet.connect(invitation, open_http(reactor), reactor)
            grant = await wallet.enrol()
            key = await wallet.add_key()
            offered = await deferToThread(sender.create_invitation)
            handshake = RoutedHandshake(V1Invitation.from_json(offered), key, route=grant)
            await self.post(wallet, handshake, handshake.invitation.key, handshake.make_request())
            response = await self.fetch_one(wallet)
            # An agent that is no mediator sends it with its new key already.
            peer = handshake.read_response(replace(response, sender=handshake.invitation.key))
            self.assertEqual(response.sender, peer.key)
            await self.post(wallet, handshake, peer.key, handshake.make_complete())
            connection = await deferToThread(sender.find_connection, offered)
            for text in ("one", "two"):
                await deferToThread(sender.send_message, connection, text)
                self.assertEqual((await self.fetch_one(wallet)).text, text)
            self.assertEqual((await wallet.status()).message_count, 0)

    async def post(self, wallet: V1Wallet, handshake: V1Handshake, to: str, message: dict[str, Any]) -> None:
        """Send a message of the handshake to the agent, which has to answer through the mediator."""
        message.pop("~transport", None)
        packed = pack_authcrypt(encoding.dumps(message), to, handshake.key)
        response = await wallet.post(packed, url=handshake.invitation.endpoint, media_type=ACAPY_MEDIA_TYPE)
        self.assertEqual((response.status, response.body), (200, b""))

    async def fetch_one(self, wallet: V1Wallet) -> OpenedV1Message:
        """Wait for the one message that the wallet gets, and acknowledge it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := await wallet.fetch()):
            self.assertLess(time.monotonic(), deadline, "no message has come")
            await deferLater(reactor, _POLL_SECONDS)
        (delivered,) = found
        await wallet.acknowledge([delivered])
        return wallet.open(delivered)
