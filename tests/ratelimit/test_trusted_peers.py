"""`limits.trusted_peers`: another mediator has a larger limit, its neighbours have not."""

from __future__ import annotations

import json
from ipaddress import ip_network
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.config.settings import Config
from mediatord.http.client_address import ClientAddressResolver
from mediatord.ratelimit.rate_limiter import RateLimits
from tests.http.in_memory_site import InMemorySite
from tests.in_memory_identities import InMemoryIdentity
from tests.in_memory_mediator import FakeSocket, InMemoryWallet, pack_forward
from tests.ratelimit.rate_limiter_processes import LimiterProcesses

# Two hosts of another mediator, and a neighbour.
PEER_HOST, OTHER_HOST, NEIGHBOUR = "198.51.100.7", "198.51.100.9", "198.51.101.7"
# Rate limit keys of both.
PEER_NETWORK = "198.51.100.0/24"
LIMIT, MORE = 4, 40


class TrustedPeerTests(SynchronousTestCase):
    def setUp(self) -> None:
        limits = {
            "ip_per_minute": LIMIT,
            "did_per_minute": LIMIT,
            "account_per_minute": 1000,
            "max_connections_per_ip": 2,
            "trusted_peers": ["198.51.100.0/24"],
            "trusted_per_minute": MORE,
            "trusted_connections": 3,
        }
        self.site_fixture = InMemorySite(self, limits=limits)
        self.bob = InMemoryWallet(self.site_fixture).enrol()
        self.relay = InMemoryWallet(self.site_fixture)

    def reload_limits(self, **limits: Any) -> None:
        """Reload with other limits."""
        values = self.site_fixture.config.model_dump()
        new = Config.model_validate({**values, "limits": {**values["limits"], **limits}})
        self.site_fixture.base.reloader.reload(lambda: new)

    def send_anonymous(self, peer: str, count: int = 1) -> list[int]:
        """Replies to that many forwards."""
        raw = [pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload(str(n))) for n in range(count)]
        return [self.site_fixture.request("POST", "/didcomm", one, peer=peer).status for one in raw]

    def send_authenticated(self, peer: str) -> int:
        """The reply to a forward that the relay sends under its own DID, on a socket."""
        attachments = [{"data": {"json": json.loads(self.bob.make_payload())}}]
        body = {"next": self.bob.did}
        raw = self.relay.pack("https://didcomm.org/routing/2.0/forward", body, attachments=attachments)
        return self.site_fixture.receive(raw, FakeSocket(peer)).status

    def test_larger_limit_is_shared_by_network(self) -> None:
        """All hosts of the network share its limit; a neighbour has the default."""
        answers = self.send_anonymous(PEER_HOST, MORE // 2) + self.send_anonymous(OTHER_HOST, MORE // 2 + 1)
        self.assertEqual(answers, [202] * MORE + [429])
        self.assertEqual(self.send_anonymous(NEIGHBOUR, LIMIT + 1), [202] * LIMIT + [429])
        self.site_fixture.clock.advance(60)
        self.assertEqual(self.send_anonymous(PEER_HOST), [202])

    def test_sender_did_of_trusted_peer(self) -> None:
        """Under its DID the network is charged once; the same DID from elsewhere is charged as such."""
        answers = {self.send_authenticated(PEER_NETWORK) for _ in range(MORE)}
        self.assertEqual(answers, {202})
        self.assertEqual(self.send_authenticated(PEER_NETWORK), 429)
        self.assertEqual([self.send_authenticated(NEIGHBOUR) for _ in range(LIMIT + 1)], [202] * LIMIT + [429])

    def test_commands(self) -> None:
        """The same holds for commands; a replayed one refunds nothing that was not charged."""
        ann, bert = InMemoryIdentity(self.site_fixture, "ann"), InMemoryIdentity(self.site_fixture, "bert")
        for new_identity in (ann, bert):
            new_identity.register()
        bert.save_contract_with(ann)
        self.site_fixture.clock.advance(60)
        self.assertEqual({ann.send_event(bert, peer=PEER_NETWORK).status for _ in range(MORE)}, {200})
        self.assertEqual(ann.send_event(bert, peer=PEER_NETWORK).status, 429)
        self.assertEqual(
            [ann.send_event(bert, peer=NEIGHBOUR).status for _ in range(LIMIT + 1)], [200] * LIMIT + [429]
        )
        self.site_fixture.clock.advance(60)
        neighbours = ["203.0.113.5", "203.0.113.6"]
        self.assertEqual([ann.send_event(bert, peer=neighbours[0]).status for _ in range(LIMIT)], [200] * LIMIT)
        command = ann.command("sealed", to=bert.did, channel="TWO_WAY_PRIVATE")
        self.assertEqual(
            [self.site_fixture.receive_command(command, PEER_NETWORK).status for _ in range(2)], [200, 401]
        )
        self.assertEqual(ann.send_event(bert, peer=neighbours[1]).status, 429)

    def test_connections(self) -> None:
        """WebSockets of all its hosts are counted together, other connections per host; a neighbour has fewer."""
        for peer in (PEER_HOST, PEER_HOST, OTHER_HOST):
            self.site_fixture.websocket_client(peer=peer)
        self.assertEqual(self.site_fixture.upgrade(peer=OTHER_HOST)[1].status, 429)
        for _ in range(2):
            self.site_fixture.websocket_client(peer=NEIGHBOUR)
        self.assertEqual(self.site_fixture.upgrade(peer=NEIGHBOUR)[1].status, 429)

    def test_reload(self) -> None:
        """The list and its limits are reloaded, and open connections stay counted correctly."""
        lines = [self.site_fixture.connect(NEIGHBOUR) for _ in range(8)]
        self.assertRaises(AttributeError, self.site_fixture.connect, NEIGHBOUR)
        self.reload_limits(trusted_peers=["198.51.101.0/24"], trusted_per_minute=LIMIT + 2)
        lines.append(self.site_fixture.connect(NEIGHBOUR))
        for line in lines:
            line.disconnect()
        self.assertEqual(self.send_anonymous(NEIGHBOUR, LIMIT + 3), [202] * (LIMIT + 2) + [429])
        self.assertEqual(self.send_anonymous(PEER_HOST, LIMIT + 1), [202] * LIMIT + [429])
        self.reload_limits(trusted_peers=[])
        for _ in range(8):
            self.site_fixture.connect(NEIGHBOUR)
        self.assertRaises(AttributeError, self.site_fixture.connect, NEIGHBOUR)

    def test_event(self) -> None:
        """The event names the limited address as for any other."""
        self.send_anonymous(PEER_HOST, MORE + 1)
        (event,) = self.site_fixture.events("limit.hit")
        self.assertEqual((event["limit"], event["who"]), ("ip_per_minute", event["peer"]))


class TrustedPeerClusterTests(SynchronousTestCase):
    """Over several processes."""

    def test_larger_limit_over_processes(self) -> None:
        """All processes together admit 5 % more than one at most; other addresses have the default."""
        processes = LimiterProcesses(20)
        for process in processes.all:
            process.admission.set_limits(RateLimits(20, 20, 20, frozenset({PEER_NETWORK}), 200))
        admitted = {PEER_NETWORK: 0, NEIGHBOUR: 0}
        for number in range(300):
            for peer in admitted:
                admitted[peer] += processes[number % 3].admission.try_charge_anonymous(peer) or self.is_admitted(
                    processes, number % 3, peer
                )
        self.assertTrue(200 <= admitted[PEER_NETWORK] <= 210, admitted)
        self.assertTrue(20 <= admitted[NEIGHBOUR] <= 21, admitted)

    def is_admitted(self, processes: LimiterProcesses, number: int, peer: str) -> bool:
        """Whether a process admits it, with the store."""
        try:
            processes[number].admission.charge_anonymous(peer).send(None)
        except StopIteration:
            return True
        except Exception:
            return False
        self.fail("it waits")


class TrustedPeerNetworksTests(SynchronousTestCase):
    def test_keys_of_addresses(self) -> None:
        """The smallest network of an address is its key; a single IPv6 address is not reduced to its /64."""
        trusted = [ip_network(one) for one in ("10.0.0.0/8", "10.1.0.0/16", "192.0.2.1", "2001:db8::5")]
        peers = ClientAddressResolver([ip_network("127.0.0.1")], peer_networks=trusted)
        for address, name in {
            "10.1.2.3": "10.1.0.0/16",
            "10.2.2.3": "10.0.0.0/8",
            "192.0.2.1": "192.0.2.1",
            "192.0.2.2": "192.0.2.2",
            "2001:db8::5": "2001:db8::5",
            "2001:db8::6": "2001:db8::",
            "::ffff:10.1.2.3": "10.1.0.0/16",
        }.items():
            self.assertEqual(peers.rate_limit_key(address, None), name)
        self.assertEqual(peers.rate_limit_key("127.0.0.1", "10.9.9.9"), "10.0.0.0/8")
        self.assertEqual(peers.host("10.1.2.3"), "10.1.2.3")
        peers.set_peer_networks([])
        self.assertEqual(peers.rate_limit_key("10.1.2.3", None), "10.1.2.3")
