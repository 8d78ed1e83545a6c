"""Who may have a connection with the node-to-node listener."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.places import MAX_NODES, MAX_OF_ONE, MAX_STRANGERS, Places, origin_of


class Caller:
    """One connection."""

    def __init__(self) -> None:
        self.silent = True
        self.ended = False

    def end(self) -> None:
        """Noted."""
        self.ended = True


class PlacesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.places = Places()

    def come(self, count: int = 1, origin: str = "10.0.0.1") -> list[Caller]:
        """So many from one address."""
        callers = [Caller() for _ in range(count)]
        for caller in callers:
            self.assertTrue(self.places.make_room(origin))
            self.places.enter(caller, origin)
        return callers

    def fill(self) -> list[Caller]:
        """All places of strangers, each from an address of its own."""
        return [self.come(origin=f"10.0.0.{number}")[0] for number in range(MAX_STRANGERS)]

    def test_full(self) -> None:
        """Who comes has a place; the oldest gives its own up."""
        strangers = self.fill()
        self.come(2, origin="10.0.1.1")
        self.assertEqual([one.ended for one in strangers[:3]], [True, True, False])
        self.assertEqual(len(self.places), MAX_STRANGERS)

    def test_one_address(self) -> None:
        """It takes no place of others, however often it comes."""
        (other,) = self.come(origin="10.0.1.1")
        strangers = self.come(MAX_OF_ONE + 1)
        self.assertEqual([one.ended for one in strangers[:2]], [True, False])
        self.come(MAX_STRANGERS)
        self.assertFalse(other.ended)
        self.assertEqual(len(self.places), 1 + MAX_OF_ONE)

    def test_no_address(self) -> None:
        """On a UNIX socket all are from nowhere."""
        self.come(MAX_STRANGERS, origin="")
        self.assertEqual(len(self.places), MAX_STRANGERS)

    def test_speaking(self) -> None:
        """Who waits for an answer keeps its place; when all do there is none."""
        strangers = self.fill()
        for one in strangers:
            one.silent = False
        self.assertFalse(self.places.make_room("10.0.1.1"))
        strangers[7].silent = True
        self.come(origin="10.0.1.1")
        self.assertEqual([one for one in strangers if one.ended], [strangers[7]])

    def test_nodes(self) -> None:
        """Take no place of strangers, and are not ended for them; they are counted as well."""
        nodes = self.come(MAX_OF_ONE)
        for node in nodes:
            self.places.known(node)
            self.places.known(node)
        self.come(MAX_OF_ONE)
        self.fill()
        self.assertFalse(any(node.ended for node in nodes))
        self.assertEqual(len(self.places), MAX_OF_ONE + MAX_STRANGERS)
        for node in nodes:
            self.places.leave(node)
        self.assertEqual(len(self.places), MAX_STRANGERS)

    def test_too_many_nodes(self) -> None:
        """What is over the limit stays a stranger, which may have to go."""
        for number in range(MAX_NODES):
            (node,) = self.come(origin=f"node {number}")
            self.places.known(node)
        (late,) = self.come()
        self.places.known(late)
        self.fill()
        self.assertTrue(late.ended)
        self.assertEqual(len(self.places), MAX_NODES + MAX_STRANGERS)

    def test_iterates(self) -> None:
        """Over all, and they may leave meanwhile."""
        callers = self.come(3)
        self.places.known(callers[1])
        for one in self.places:
            self.places.leave(one)
        self.assertEqual(len(self.places), 0)

    def test_late(self) -> None:
        """Who has given up its place is no node any more."""
        (caller,) = self.come()
        self.places.leave(caller)
        self.places.known(caller)
        self.assertEqual(len(self.places), 0)


class OriginTests(SynchronousTestCase):
    def test_ipv4(self) -> None:
        """Each address, however it is written."""
        self.assertEqual(origin_of("10.0.0.1"), "10.0.0.1")
        self.assertEqual(origin_of("::ffff:10.0.0.1"), "10.0.0.1")

    def test_ipv6(self) -> None:
        """A network of 64 bits is one customer's."""
        self.assertEqual(origin_of("2001:db8:1:2::1"), origin_of("2001:db8:1:2:ffff::"))
        self.assertNotEqual(origin_of("2001:db8:1:2::1"), origin_of("2001:db8:1:3::1"))
        self.assertEqual(origin_of("fe80::1%eth0"), origin_of("fe80::2%eth0"))

    def test_none(self) -> None:
        """On a UNIX socket."""
        self.assertEqual(origin_of(""), "")
