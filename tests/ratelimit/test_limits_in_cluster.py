"""Rate limits and replay protection for wallets that use several nodes."""

from __future__ import annotations

from itertools import cycle

from mediatord.errors import ReplayedMessage
from mediatord.wallet.didcomm_messages import authcrypt, build_forward
from tests.cluster.in_memory_cluster import InMemoryClusterTestCase
from tests.in_memory_identities import PRIVATE, InMemoryDecentrlSocket, code_of
from tests.in_memory_mediator import CM3, PING, InMemoryWallet, from_header

OTHER_ADDRESS = "198.51.100.7"
# Only the sender is limited, unless a test says otherwise.
PLENTY = {"ip_per_minute": 100_000, "account_per_minute": 100_000}


class SenderLimitTests(InMemoryClusterTestCase):
    """Three nodes behind a load balancer in turn."""

    names = ("a", "b", "c")
    settings = {"limits": {**PLENTY, "did_per_minute": 60}}

    def setUp(self) -> None:
        super().setUp()
        self.bob = self.new_wallet(self.in_memory_nodes[0])
        self.alice = InMemoryWallet(self.in_memory_nodes[0])
        self.next = cycle(self.in_memory_nodes)

    def make_forward(self) -> bytes:
        """A forward of Alice to Bob."""
        message = build_forward(self.bob.did, [self.bob.make_payload()], **from_header(self.alice.did))
        return authcrypt(message, self.alice.identity, self.in_memory_nodes[0].document)

    def test_didcomm_sender(self) -> None:
        """60 payloads in a minute at any nodes, and as many in the next."""
        for _ in range(2):
            statuses = [next(self.next).receive(self.make_forward()).status for _ in range(90)]
            self.assertIn(statuses.count(202), range(57, 64))
            self.assertEqual(set(statuses), {202, 429})
            self.advance(61)

    def test_decentrl_sender(self) -> None:
        """The same in Decentrl; a command replayed at another node does not charge its sender."""
        alice, bob = (
            self.new_identity(self.in_memory_nodes[0], "alice"),
            self.new_identity(self.in_memory_nodes[1], "bob"),
        )
        alice.register()
        bob.register()
        bob.save_contract_with(alice)
        self.advance(61)
        statuses = []
        for _ in range(90):
            command = alice.command("sealed", to=bob.did, channel=PRIVATE)
            statuses.append(next(self.next).receive_command(command).status)
            repeated = next(self.next).receive_command(command, OTHER_ADDRESS)
            if statuses[-1] == 200:
                self.assertIn(code_of(repeated)[1], ("DUPLICATE_NONCE", "RATE_LIMITED"))
        self.assertIn(statuses.count(200), range(57, 64))

    def test_replayed_forward(self) -> None:
        """It charges its sender once at each node, and its address each time."""
        raws = [self.make_forward() for _ in range(15)]
        for _ in range(4):
            for in_memory in self.in_memory_nodes:
                self.assertEqual({in_memory.receive(raw, peer=OTHER_ADDRESS).status for raw in raws}, {202})
        statuses = [next(self.next).receive(self.make_forward()).status for _ in range(30)]
        self.assertIn(statuses.count(202), range(60 - 3 * 15 - 3, 60 - 3 * 15 + 4))


class AddressLimitTests(InMemoryClusterTestCase):
    """Charges of an address."""

    names = ("a", "b", "c")
    settings = {"limits": {**PLENTY, "ip_per_minute": 120}}

    def test_undecryptable_messages(self) -> None:
        """120 in a minute, and one more for each node."""
        nodes = cycle(self.in_memory_nodes)
        statuses = [next(nodes).receive(b"{}").status for _ in range(200)]
        self.assertIn(statuses.count(400), range(114, 127))
        self.assertEqual(set(statuses), {400, 429})


class ReplayTests(InMemoryClusterTestCase):
    """Messages are known at all nodes."""

    def setUp(self) -> None:
        super().setUp()
        self.a, self.b = self.in_memory_nodes

    def test_messages(self) -> None:
        """A request repeated at the other node is a replay."""
        alice = InMemoryWallet(self.a).enrol()
        for kind in (PING, f"{CM3}/recipient-query"):
            raw = alice.pack(kind, {}, return_route="none")
            self.assertEqual(self.a.receive(raw).status, 202)
            self.assertEqual(self.b.receive(raw).fault, ReplayedMessage)

    def test_commands_and_sockets(self) -> None:
        """So are nonces of both kinds."""
        alice = self.new_identity(self.a, "alice")
        alice.register()
        command = alice.command({"type": "QUERY_EVENTS"})
        self.assertEqual(self.a.receive_command(command).status, 200)
        self.assertEqual(code_of(self.b.receive_command(command)), (401, "DUPLICATE_NONCE"))
        greeting = alice.authentication_frame()
        frames = []
        for in_memory in (self.a, self.b):
            dialogue = InMemoryDecentrlSocket(in_memory)
            dialogue.send(greeting)
            frames += dialogue.take_frames()
        self.assertEqual([frame["type"] for frame in frames], ["AUTH_SUCCESS", "AUTH_FAILED"])
        self.assertEqual([event["code"] for event in self.b.events("replay.drop")], ["DUPLICATE_NONCE"] * 2)
