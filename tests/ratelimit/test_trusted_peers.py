"""`limits.trusted_peers`: another mediator is not throttled as one wallet, and its neighbours are."""

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

# Two hosts of another mediator, and somebody beside it.
FRIEND, OTHER_HOST, STRANGER = "198.51.100.7", "198.51.100.9", "198.51.101.7"
# What both are called behind the door.
FRIENDS = "198.51.100.0/24"
LIMIT, MORE = 4, 40


class TrustedTests(SynchronousTestCase):
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

    def limit(self, **limits: Any) -> None:
        """Reload with other limits."""
        values = self.site_fixture.config.model_dump()
        new = Config.model_validate({**values, "limits": {**values["limits"], **limits}})
        self.site_fixture.base.reloader.reload(lambda: new)

    def anonymous(self, peer: str, count: int = 1) -> list[int]:
        """Answers to that many forwards."""
        raw = [pack_forward(self.site_fixture, self.bob.did, self.bob.letter(str(n))) for n in range(count)]
        return [self.site_fixture.request("POST", "/didcomm", one, peer=peer).status for one in raw]

    def authenticated(self, peer: str) -> int:
        """The answer to a forward that the relay sends under its own DID, on a socket."""
        attachments = [{"data": {"json": json.loads(self.bob.letter())}}]
        body = {"next": self.bob.did}
        raw = self.relay.pack("https://didcomm.org/routing/2.0/forward", body, attachments=attachments)
        return self.site_fixture.receive(raw, FakeSocket(peer)).status

    def test_ten_times_the_limit(self) -> None:
        """All of it is taken, together from all of its hosts, and then nothing; a neighbour has what anybody has."""
        answers = self.anonymous(FRIEND, MORE // 2) + self.anonymous(OTHER_HOST, MORE // 2 + 1)
        self.assertEqual(answers, [202] * MORE + [429])
        self.assertEqual(self.anonymous(STRANGER, LIMIT + 1), [202] * LIMIT + [429])
        self.site_fixture.clock.advance(60)
        self.assertEqual(self.anonymous(FRIEND), [202])

    def test_its_own_name(self) -> None:
        """What it sends under its DID is charged to it once; under the same DID from elsewhere, to that DID."""
        answers = {self.authenticated(FRIENDS) for _ in range(MORE)}
        self.assertEqual(answers, {202})
        self.assertEqual(self.authenticated(FRIENDS), 429)
        self.assertEqual([self.authenticated(STRANGER) for _ in range(LIMIT + 1)], [202] * LIMIT + [429])

    def test_the_other_half(self) -> None:
        """Commands likewise; a repeated one gives nothing back that was never charged."""
        ann, bert = InMemoryIdentity(self.site_fixture, "ann"), InMemoryIdentity(self.site_fixture, "bert")
        for new_identity in (ann, bert):
            new_identity.register()
        bert.befriend(ann)
        self.site_fixture.clock.advance(60)
        self.assertEqual({ann.tell(bert, peer=FRIENDS).status for _ in range(MORE)}, {200})
        self.assertEqual(ann.tell(bert, peer=FRIENDS).status, 429)
        self.assertEqual([ann.tell(bert, peer=STRANGER).status for _ in range(LIMIT + 1)], [200] * LIMIT + [429])
        self.site_fixture.clock.advance(60)
        elsewhere = ["203.0.113.5", "203.0.113.6"]
        self.assertEqual([ann.tell(bert, peer=elsewhere[0]).status for _ in range(LIMIT)], [200] * LIMIT)
        again = ann.command("sealed", to=bert.did, channel="TWO_WAY_PRIVATE")
        self.assertEqual([self.site_fixture.obey(again, FRIENDS).status for _ in range(2)], [200, 401])
        self.assertEqual(ann.tell(bert, peer=elsewhere[1]).status, 429)

    def test_connections(self) -> None:
        """Sockets of all its hosts together, and other connections of each; a neighbour has fewer."""
        for peer in (FRIEND, FRIEND, OTHER_HOST):
            self.site_fixture.websocket_client(peer=peer)
        self.assertEqual(self.site_fixture.upgrade(peer=OTHER_HOST)[1].status, 429)
        for _ in range(2):
            self.site_fixture.websocket_client(peer=STRANGER)
        self.assertEqual(self.site_fixture.upgrade(peer=STRANGER)[1].status, 429)

    def test_reloading(self) -> None:
        """Who is trusted, and with how much, is read again, and every connection is still counted right."""
        lines = [self.site_fixture.connect(STRANGER) for _ in range(8)]
        self.assertRaises(AttributeError, self.site_fixture.connect, STRANGER)
        self.limit(trusted_peers=["198.51.101.0/24"], trusted_per_minute=LIMIT + 2)
        lines.append(self.site_fixture.connect(STRANGER))
        for line in lines:
            line.disconnect()
        self.assertEqual(self.anonymous(STRANGER, LIMIT + 3), [202] * (LIMIT + 2) + [429])
        self.assertEqual(self.anonymous(FRIEND, LIMIT + 1), [202] * LIMIT + [429])
        self.limit(trusted_peers=[])
        for _ in range(8):
            self.site_fixture.connect(STRANGER)
        self.assertRaises(AttributeError, self.site_fixture.connect, STRANGER)

    def test_the_event(self) -> None:
        """Says whose limit it was, as of any address."""
        self.anonymous(FRIEND, MORE + 1)
        (event,) = self.site_fixture.events("limit.hit")
        self.assertEqual((event["limit"], event["who"]), ("ip_per_minute", event["peer"]))


class ClusterTests(SynchronousTestCase):
    """Over several processes."""

    def test_the_larger_limit_is_that_of_all(self) -> None:
        """Together they admit to it what one would, 5 % more at most, and to others what others have."""
        processes = LimiterProcesses(20)
        for process in processes.all:
            process.admission.set_limits(RateLimits(20, 20, 20, frozenset({FRIENDS}), 200))
        admitted = {FRIENDS: 0, STRANGER: 0}
        for number in range(300):
            for peer in admitted:
                admitted[peer] += processes[number % 3].admission.try_charge_anonymous(peer) or self.asked(
                    processes, number % 3, peer
                )
        self.assertTrue(200 <= admitted[FRIENDS] <= 210, admitted)
        self.assertTrue(20 <= admitted[STRANGER] <= 21, admitted)

    def asked(self, processes: LimiterProcesses, number: int, peer: str) -> bool:
        """Whether it is admitted by a process that asks the store."""
        try:
            processes[number].admission.charge_anonymous(peer).send(None)
        except StopIteration:
            return True
        except Exception:
            return False
        self.fail("it waits")


class PeersTests(SynchronousTestCase):
    def test_names(self) -> None:
        """The smallest network that an address is in; one address is itself, and IPv6 ones are not cut off first."""
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
