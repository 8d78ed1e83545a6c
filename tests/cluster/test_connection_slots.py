"""Who may have a connection with the node-to-node listener."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.peer_server import (
    MAX_AUTHENTICATED,
    MAX_UNAUTHENTICATED,
    MAX_UNAUTHENTICATED_PER_ADDRESS,
    ConnectionSlots,
    PeerChannel,
    normalize_address,
)


class SlotConnection(PeerChannel):
    """One connection."""

    is_idle = True

    def __init__(self) -> None:
        self.ended = False

    def end(self) -> None:
        """Noted."""
        self.ended = True


class ConnectionSlotsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.slots = ConnectionSlots()

    def come(self, count: int = 1, origin: str = "10.0.0.1") -> list[SlotConnection]:
        """So many from one address."""
        callers = [SlotConnection() for _ in range(count)]
        for caller in callers:
            self.assertTrue(self.slots.reserve(origin))
            self.slots.add(caller, origin)
        return callers

    def fill(self) -> list[SlotConnection]:
        """All places of strangers, each from an address of its own."""
        return [self.come(origin=f"10.0.0.{number}")[0] for number in range(MAX_UNAUTHENTICATED)]

    def test_full(self) -> None:
        """Who comes has a place; the oldest gives its own up."""
        strangers = self.fill()
        self.come(2, origin="10.0.1.1")
        self.assertEqual([one.ended for one in strangers[:3]], [True, True, False])
        self.assertEqual(len(self.slots), MAX_UNAUTHENTICATED)

    def test_one_address(self) -> None:
        """It takes no place of others, however often it comes."""
        (other,) = self.come(origin="10.0.1.1")
        strangers = self.come(MAX_UNAUTHENTICATED_PER_ADDRESS + 1)
        self.assertEqual([one.ended for one in strangers[:2]], [True, False])
        self.come(MAX_UNAUTHENTICATED)
        self.assertFalse(other.ended)
        self.assertEqual(len(self.slots), 1 + MAX_UNAUTHENTICATED_PER_ADDRESS)

    def test_no_address(self) -> None:
        """On a UNIX socket all are from nowhere."""
        self.come(MAX_UNAUTHENTICATED, origin="")
        self.assertEqual(len(self.slots), MAX_UNAUTHENTICATED)

    def test_speaking(self) -> None:
        """Who waits for an answer keeps its place; when all do there is none."""
        strangers = self.fill()
        for one in strangers:
            one.is_idle = False
        self.assertFalse(self.slots.reserve("10.0.1.1"))
        strangers[7].is_idle = True
        self.come(origin="10.0.1.1")
        self.assertEqual([one for one in strangers if one.ended], [strangers[7]])

    def test_nodes(self) -> None:
        """Take no place of strangers, and are not ended for them; they are counted as well."""
        nodes = self.come(MAX_UNAUTHENTICATED_PER_ADDRESS)
        for node in nodes:
            self.slots.mark_authenticated(node)
            self.slots.mark_authenticated(node)
        self.come(MAX_UNAUTHENTICATED_PER_ADDRESS)
        self.fill()
        self.assertFalse(any(node.ended for node in nodes))
        self.assertEqual(len(self.slots), MAX_UNAUTHENTICATED_PER_ADDRESS + MAX_UNAUTHENTICATED)
        for node in nodes:
            self.slots.remove(node)
        self.assertEqual(len(self.slots), MAX_UNAUTHENTICATED)

    def test_too_many_nodes(self) -> None:
        """What is over the limit stays a stranger, which may have to go."""
        for number in range(MAX_AUTHENTICATED):
            (node,) = self.come(origin=f"node {number}")
            self.slots.mark_authenticated(node)
        (late,) = self.come()
        self.slots.mark_authenticated(late)
        self.fill()
        self.assertTrue(late.ended)
        self.assertEqual(len(self.slots), MAX_AUTHENTICATED + MAX_UNAUTHENTICATED)

    def test_iterates(self) -> None:
        """Over all, and they may leave meanwhile."""
        callers = self.come(3)
        self.slots.mark_authenticated(callers[1])
        for one in self.slots:
            self.slots.remove(one)
        self.assertEqual(len(self.slots), 0)

    def test_late(self) -> None:
        """Who has given up its place is no node any more."""
        (caller,) = self.come()
        self.slots.remove(caller)
        self.slots.mark_authenticated(caller)
        self.assertEqual(len(self.slots), 0)


class OriginTests(SynchronousTestCase):
    def test_ipv4(self) -> None:
        """Each address, however it is written."""
        self.assertEqual(normalize_address("10.0.0.1"), "10.0.0.1")
        self.assertEqual(normalize_address("::ffff:10.0.0.1"), "10.0.0.1")

    def test_ipv6(self) -> None:
        """A network of 64 bits is one customer's."""
        self.assertEqual(normalize_address("2001:db8:1:2::1"), normalize_address("2001:db8:1:2:ffff::"))
        self.assertNotEqual(normalize_address("2001:db8:1:2::1"), normalize_address("2001:db8:1:3::1"))
        self.assertEqual(normalize_address("fe80::1%eth0"), normalize_address("fe80::2%eth0"))

    def test_none(self) -> None:
        """On a UNIX socket."""
        self.assertEqual(normalize_address(""), "")
