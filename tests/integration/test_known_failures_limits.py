"""A limit that holds on one way in and not on another: each limit, on each way, and on all of them together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, cycle
from typing import Any

from mediatord.protocol import encoding
from mediatord.wallet.didcomm_client import PICKUP
from mediatord.wallet.didcomm_messages import authcrypt, build_forward
from tests.in_memory_mediator import from_header
from tests.integration.devices import DeviceWallet
from tests.integration.message_load import ROOMY
from tests.integration.raw_decentrl_client import PeerClosedSocket, RawDecentrlClient, RawWebSocket
from tests.integration.shared_daemon import SharedDaemonTestCase

FORWARDS, COMMANDS, REQUESTS = 7, 7, 9
SMALL = 20_000
SOCKETS = 3
ROOM = 4

# One attempt from an address: whether it was let in.
Attempt = Callable[[str], bool]
_addresses = (f"127.0.{one // 250}.{one % 250 + 2}" for one in count(250))


class EntryPointTestCase(SharedDaemonTestCase):
    """The ways that something can come in by, each from an address of the test's choice."""

    def setUp(self) -> None:
        self.bob = DeviceWallet(self.daemon_client).enrol()
        self.lines: dict[str, RawWebSocket] = {}

    def http(self, make: Callable[[], bytes], **headers: str) -> Attempt:
        """POSTed; with an odd header through twisted.web."""
        return lambda source: self.bob.post(make(), source=source, **headers).status != 429

    def socket(self, make: Callable[[], bytes], path: str) -> Attempt:
        """As a frame; that an answer to a request behind it comes first says that it was taken."""

        def attempt(source: str) -> bool:
            line = self.line(source, path)
            line.say(make())
            line.say(self.bob.pack(f"{PICKUP}/status-request", {}))
            answers = [line.hear_raw()]
            while b'"ciphertext"' not in answers[-1]:
                answers.append(line.hear_raw())
            codes = [encoding.loads_object(one)["body"]["code"] for one in answers[:-1]]
            assert codes in ([], ["e.m.req.rate-limited"]), codes
            return not codes

        return attempt

    def line(self, source: str, path: str) -> RawWebSocket:
        """The socket of an address, which it keeps."""
        key = f"{source}{path}"
        if key not in self.lines:
            self.lines[key] = RawWebSocket(self.daemon_client, path, source=source)
            self.addCleanup(self.lines[key].close)
        return self.lines[key]

    def every_way(self, make: Callable[[], bytes], nested: Callable[[], bytes]) -> dict[str, Attempt]:
        """All that an envelope can come by. :param nested: makes one with the same within."""
        return {
            "short way": self.http(make),
            "long way": self.http(make, **{"X-Odd": "1"}),
            "socket": self.socket(make, "/didcomm"),
            "socket of both protocols": self.socket(make, "/ws"),
            "nested": self.http(nested),
            "nested on a socket": self.socket(nested, "/didcomm"),
        }

    def assert_exact(self, ways: dict[str, Attempt], limit: int, *, one_address: bool = True) -> None:
        """So many are let in by each way alone, and so many by all of them in turn, after which none lets in."""

        def sources() -> Any:
            fixed = next(_addresses)
            return iter(lambda: fixed if one_address else next(_addresses), None)

        for name, way in ways.items():
            self.begin()
            source = sources()
            self.assertEqual([way(next(source)) for _ in range(limit + 2)], [True] * limit + [False] * 2, name)
        self.begin()
        source, turn = sources(), cycle(ways.values())
        self.assertEqual([next(turn)(next(source)) for _ in range(limit)], [True] * limit)
        self.assertEqual({name: way(next(source)) for name, way in ways.items()}, dict.fromkeys(ways, False))

    def begin(self) -> None:
        """Whoever is charged is somebody else from now on."""


class AddressLimitTests(EntryPointTestCase):
    """`limits.ip_per_minute`: forwards of one address, whoever sent them."""

    settings = {**ROOMY, "limits": {"ip_per_minute": FORWARDS}}

    def test_forwards(self) -> None:
        inner = self.bob.forward(self.bob.letter("x"))
        nested = self.bob.forward(inner, to=self.bob.mediator.did)
        self.assert_exact(self.every_way(lambda: inner, lambda: nested), FORWARDS)

    def test_payloads(self) -> None:
        """Each is charged as a forward of its own, at whichever depth."""
        inner = self.bob.forward(*[self.bob.letter("x")] * 3)
        nested = self.bob.forward(inner, to=self.bob.mediator.did)
        many = self.bob.forward(*[self.bob.forward(self.bob.letter("x"))] * 3, to=self.bob.mediator.did)
        for within in (nested, many):
            for name, way in self.every_way(lambda: inner, lambda within=within: within).items():  # type: ignore[misc]
                source = next(_addresses)
                self.assertEqual(
                    [way(source) for _ in range(FORWARDS // 3 + 1)], [True] * (FORWARDS // 3) + [False], name
                )

    def test_what_does_not_open(self) -> None:
        """It is charged as a forward is, on each way; from then on no forward is let in by any."""
        inner = self.bob.forward(self.bob.letter("x"))
        for spoil in (self.post_nonsense, self.say_nonsense):
            source = next(_addresses)
            for _ in range(FORWARDS):
                spoil(source)
            for name, way in self.every_way(lambda: inner, lambda: inner).items():
                self.assertFalse(way(source), name)

    def post_nonsense(self, source: str) -> None:
        """By HTTP."""
        self.assertEqual(self.bob.post(b"{}", source=source).status, 400)

    def say_nonsense(self, source: str) -> None:
        """On a socket of its own, since one on which it is said again and again is closed."""
        line = RawWebSocket(self.daemon_client, "/didcomm", source=source)
        self.addCleanup(line.close)
        line.say(b"{}")
        self.assertEqual(line.hear()["body"]["code"], "e.p.msg")


class SenderLimitTests(EntryPointTestCase):
    """`limits.did_per_minute`: forwards and events of one sender, wherever they come from."""

    settings = {**ROOMY, "limits": {"did_per_minute": FORWARDS}}

    def begin(self) -> None:
        self.sender = DeviceWallet(self.daemon_client)

    def sealed(self, to: str, *payloads: bytes) -> bytes:
        """A forward of the sender."""
        message = build_forward(to, payloads, **from_header(self.sender.did))
        return authcrypt(message, self.sender.identity, self.bob.mediator)

    def test_forwards(self) -> None:
        letter = self.bob.letter("x")
        inner = self.bob.forward(letter)
        ways = self.every_way(
            lambda: self.sealed(self.bob.did, letter), lambda: self.sealed(self.bob.mediator.did, inner)
        )
        # An answer on the connection would be encrypted: what is refused is told by its code, in the clear.
        self.assert_exact(ways, FORWARDS, one_address=False)

    def test_events(self) -> None:
        """Commands come by POST only; what is written on a socket is not carried out."""
        alice, dave = RawDecentrlClient(self.daemon_client, "alice"), RawDecentrlClient(self.daemon_client, "dave")
        alice.register()
        dave.register()
        dave.befriend(alice)
        # A registration is a command that reaches others, and has been charged.
        statuses = [alice.tell(dave, "x").status for _ in range(COMMANDS)]
        self.assertEqual(statuses, [200] * (COMMANDS - 1) + [429])
        line = alice.socket()
        self.addCleanup(line.close)
        line.say(alice.command("by socket", to=dave.did, channel="TWO_WAY_PRIVATE"))
        self.assertEqual(len(dave.pending()), COMMANDS - 1)


class AccountLimitTests(EntryPointTestCase):
    """`limits.account_per_minute`: requests of one account, and commands and sockets of one identity."""

    settings = {**ROOMY, "limits": {"account_per_minute": REQUESTS}}

    def test_requests(self) -> None:
        """By POST and by socket together."""
        line = RawWebSocket(self.daemon_client, "/didcomm")
        self.addCleanup(line.close)

        def by_socket() -> bytes:
            line.say(self.bob.pack(f"{PICKUP}/status-request", {}))
            return line.hear_raw()

        def by_post() -> bytes:
            return self.bob.ask(f"{PICKUP}/status-request", {}).body

        turn = cycle((by_post, by_socket))
        # The one that registered its DID has been charged to the account.
        answers = [self.told(next(turn)()) for _ in range(REQUESTS - 1)]
        self.assertEqual(answers, [f"{PICKUP}/status"] * (REQUESTS - 1))
        self.assertEqual([self.told(way()) for way in (by_post, by_socket)], ["e.m.req.rate-limited"] * 2)

    def told(self, raw: bytes) -> str:
        """The type of an answer; of a refusal, its code."""
        value = encoding.loads_object(raw)
        if "ciphertext" in value:
            value = encoding.loads_object(self.bob.open(raw).plaintext)
        return str(value["body"].get("code", value["type"]))

    def test_commands_and_sockets(self) -> None:
        """Whoever has used up its commands does not get a socket either."""
        dave = RawDecentrlClient(self.daemon_client, "dave")
        dave.register()
        statuses = [dave.ask("QUERY_PENDING_EVENTS").status for _ in range(REQUESTS + 1)]
        self.assertEqual(statuses, [200] * REQUESTS + [429])
        line = RawWebSocket(self.daemon_client)
        self.addCleanup(line.close)
        line.say(dave.greeting())
        self.assertEqual(line.hear()["code"], "RATE_LIMITED")


class SizeLimitTests(EntryPointTestCase):
    """`limits.max_message_bytes`, `limits.max_connections_per_ip` and the limits of queues."""

    settings = {
        "limits": {"max_message_bytes": SMALL, "max_connections_per_ip": SOCKETS},
        "queue": {"max_messages": ROOM},
        "decentrl": {"max_pending_events": ROOM},
    }

    def test_large_messages(self) -> None:
        """One byte too many is refused by POST in either protocol, and ends a socket; one less is read."""
        for path in ("/didcomm", "/"):
            for headers in ({}, {"X-Odd": "1"}, {"Content-Type": "application/json"}):
                statuses = [
                    self.daemon_client.ask("POST", path, b"x" * size, headers).status for size in (SMALL, SMALL + 1)
                ]
                self.assertNotEqual(statuses[0], 413, (path, headers))
                self.assertEqual(statuses[1], 413, (path, headers))
        for path in ("/didcomm", "/ws"):
            for size, code in ((SMALL + 1, 1009), (SMALL, None)):
                line = RawWebSocket(self.daemon_client, path, source=next(_addresses))
                line.say(b"x" * size)
                if code:
                    self.assertEqual(self.hung_up(line), code, path)
                else:
                    self.assertTrue(line.hear_raw(), path)
                line.close()

    def hung_up(self, line: RawWebSocket) -> int | None:
        """The code that a socket was closed with."""
        return line.rest()[1].code

    def test_many_sockets(self) -> None:
        """On both addresses together."""
        source, paths = next(_addresses), cycle(("/didcomm", "/ws"))
        for _ in range(SOCKETS):
            self.addCleanup(RawWebSocket(self.daemon_client, next(paths), source=source).close)
        for path in ("/didcomm", "/ws"):
            with self.assertRaises((AssertionError, PeerClosedSocket)):
                RawWebSocket(self.daemon_client, path, source=source)

    def test_full_queues(self) -> None:
        """By whichever way messages come, no more than that many wait."""
        for name in self.every_way(lambda: b"", lambda: b""):
            owner = DeviceWallet(self.daemon_client).enrol()
            inner = owner.forward(owner.letter("x"))
            nested = owner.forward(inner, to=owner.mediator.did)
            way = self.every_way(lambda inner=inner: inner, lambda nested=nested: nested)[name]  # type: ignore[misc]
            source = next(_addresses)
            for _ in range(ROOM + 2):
                way(source)
            self.assertEqual(owner.waiting(), ROOM, name)

    def test_full_mailboxes(self) -> None:
        """Events that wait are not pushed out by others: who comes too late is told so."""
        alice, dave = RawDecentrlClient(self.daemon_client, "alice"), RawDecentrlClient(self.daemon_client, "dave")
        dave.register()
        dave.befriend(alice)
        self.assertEqual([alice.tell(dave, "x").status for _ in range(ROOM + 1)], [200] * ROOM + [429])
        self.assertEqual(len(dave.pending()), ROOM)
