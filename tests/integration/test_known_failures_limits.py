"""Limits that hold on one entry point and not on another: each limit on each entry point, and on all together."""

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
from tests.integration.raw_decentrl_client import RawDecentrlClient, RawWebSocket
from tests.integration.shared_daemon import SharedDaemonTestCase

FORWARDS, COMMANDS, REQUESTS = 7, 7, 9

# Sends one request from an address; returns whether it was admitted.
Sender = Callable[[str], bool]
_addresses = (f"127.0.{one // 250}.{one % 250 + 2}" for one in count(250))


class EntryPointTestCase(SharedDaemonTestCase):
    """Entry points of envelopes, each used from a chosen address."""

    def setUp(self) -> None:
        self.bob = DeviceWallet(self.daemon_client).enrol()
        self.lines: dict[str, RawWebSocket] = {}

    def http_sender(self, make: Callable[[], bytes], **headers: str) -> Sender:
        """POST; with an unusual header through twisted.web."""
        return lambda source: self.bob.post(make(), source=source, **headers).status != 429

    def socket_sender(self, make: Callable[[], bytes], path: str) -> Sender:
        """Send a frame; it was admitted if the response to a later request comes first."""

        def send(source: str) -> bool:
            socket = self.socket_of(source, path)
            socket.send(make())
            socket.send(self.bob.pack(f"{PICKUP}/status-request", {}))
            replies = [socket.receive_raw()]
            while b'"ciphertext"' not in replies[-1]:
                replies.append(socket.receive_raw())
            codes = [encoding.loads_object(reply)["body"]["code"] for reply in replies[:-1]]
            assert codes in ([], ["e.m.req.rate-limited"]), codes
            return not codes

        return send

    def socket_of(self, source: str, path: str) -> RawWebSocket:
        """The socket of an address, opened once."""
        key = f"{source}{path}"
        if key not in self.lines:
            self.lines[key] = RawWebSocket(self.daemon_client, path, source=source)
            self.addCleanup(self.lines[key].close)
        return self.lines[key]

    def entry_points(self, make: Callable[[], bytes], nested: Callable[[], bytes]) -> dict[str, Sender]:
        """All entry points. :param nested: makes an envelope that contains the other one."""
        return {
            "short way": self.http_sender(make),
            "long way": self.http_sender(make, **{"X-Odd": "1"}),
            "socket": self.socket_sender(make, "/didcomm"),
            "socket of both protocols": self.socket_sender(make, "/ws"),
            "nested": self.http_sender(nested),
            "nested on a socket": self.socket_sender(nested, "/didcomm"),
        }

    def assert_exact_limit(self, senders: dict[str, Sender], limit: int, *, one_address: bool = True) -> None:
        """
        Exactly `limit` are admitted by each entry point alone, and by all in turn, after which none admits more.
        """

        def sources() -> Any:
            fixed = next(_addresses)
            return iter(lambda: fixed if one_address else next(_addresses), None)

        for name, send in senders.items():
            self.change_identity()
            source = sources()
            self.assertEqual([send(next(source)) for _ in range(limit + 2)], [True] * limit + [False] * 2, name)
        self.change_identity()
        source, turn = sources(), cycle(senders.values())
        self.assertEqual([next(turn)(next(source)) for _ in range(limit)], [True] * limit)
        self.assertEqual({name: send(next(source)) for name, send in senders.items()}, dict.fromkeys(senders, False))

    def change_identity(self) -> None:
        """Charge another identity from now on."""


class AddressLimitTests(EntryPointTestCase):
    """`limits.ip_per_minute`: forwards from one address, of any sender."""

    settings = {**ROOMY, "limits": {"ip_per_minute": FORWARDS}}

    def test_forwards_are_limited_by_address(self) -> None:
        inner = self.bob.pack_forward(self.bob.pack_message("x"))
        nested = self.bob.pack_forward(inner, to=self.bob.mediator.did)
        self.assert_exact_limit(self.entry_points(lambda: inner, lambda: nested), FORWARDS)

    def test_undecryptable_messages_are_charged(self) -> None:
        """As forwards, on each entry point; then no entry point admits a forward."""
        inner = self.bob.pack_forward(self.bob.pack_message("x"))
        for send_invalid in (self.post_invalid, self.send_invalid_on_socket):
            source = next(_addresses)
            for _ in range(FORWARDS):
                send_invalid(source)
            for name, send in self.entry_points(lambda: inner, lambda: inner).items():
                self.assertFalse(send(source), name)

    def post_invalid(self, source: str) -> None:
        """POST an invalid message."""
        self.assertEqual(self.bob.post(b"{}", source=source).status, 400)

    def send_invalid_on_socket(self, source: str) -> None:
        """Send it on a new socket, as a socket is closed after several invalid messages."""
        socket = RawWebSocket(self.daemon_client, "/didcomm", source=source)
        self.addCleanup(socket.close)
        socket.send(b"{}")
        self.assertEqual(socket.receive()["body"]["code"], "e.p.msg")


class SenderLimitTests(EntryPointTestCase):
    """`limits.did_per_minute`: forwards and events of one sender, from any address."""

    settings = {**ROOMY, "limits": {"did_per_minute": FORWARDS}}

    def change_identity(self) -> None:
        self.sender = DeviceWallet(self.daemon_client)

    def pack_forward(self, to: str, *payloads: bytes) -> bytes:
        """An authcrypted forward of the sender."""
        message = build_forward(to, payloads, **from_header(self.sender.did))
        return authcrypt(message, self.sender.identity, self.bob.mediator)

    def test_forwards_are_limited_by_sender(self) -> None:
        payload = self.bob.pack_message("x")
        inner = self.bob.pack_forward(payload)
        senders = self.entry_points(
            lambda: self.pack_forward(self.bob.did, payload), lambda: self.pack_forward(self.bob.mediator.did, inner)
        )
        # A reply on the connection would be encrypted; refusals are recognised by their code in the clear.
        self.assert_exact_limit(senders, FORWARDS, one_address=False)

    def test_events_are_limited_by_sender(self) -> None:
        """Commands are accepted by POST only; those on a socket are ignored."""
        alice, dave = RawDecentrlClient(self.daemon_client, "alice"), RawDecentrlClient(self.daemon_client, "dave")
        alice.register()
        dave.register()
        dave.permit_sender(alice)
        # The registration was charged as well.
        statuses = [alice.send_event(dave, "x").status for _ in range(COMMANDS)]
        self.assertEqual(statuses, [200] * (COMMANDS - 1) + [429])
        socket = alice.open_socket()
        self.addCleanup(socket.close)
        socket.send(alice.command("by socket", to=dave.did, channel="TWO_WAY_PRIVATE"))
        self.assertEqual(len(dave.pending_events()), COMMANDS - 1)


class AccountLimitTests(EntryPointTestCase):
    """`limits.account_per_minute`: requests of one account, and commands and sockets of one identity."""

    settings = {**ROOMY, "limits": {"account_per_minute": REQUESTS}}

    def test_post_and_socket_requests_share_limit(self) -> None:
        """By POST and socket together."""
        socket = RawWebSocket(self.daemon_client, "/didcomm")
        self.addCleanup(socket.close)

        def by_socket() -> bytes:
            socket.send(self.bob.pack(f"{PICKUP}/status-request", {}))
            return socket.receive_raw()

        def by_post() -> bytes:
            return self.bob.request(f"{PICKUP}/status-request", {}).body

        senders = cycle((by_post, by_socket))
        # The registration of its DID was charged to the account.
        replies = [self.reply_type(next(senders)()) for _ in range(REQUESTS - 1)]
        self.assertEqual(replies, [f"{PICKUP}/status"] * (REQUESTS - 1))
        self.assertEqual([self.reply_type(send()) for send in (by_post, by_socket)], ["e.m.req.rate-limited"] * 2)

    def reply_type(self, raw: bytes) -> str:
        """Type of a reply; for a refusal, its code."""
        value = encoding.loads_object(raw)
        if "ciphertext" in value:
            value = encoding.loads_object(self.bob.open(raw).plaintext)
        return str(value["body"].get("code", value["type"]))

    def test_commands_and_sockets_share_limit(self) -> None:
        """After using up its commands an identity cannot open a socket."""
        dave = RawDecentrlClient(self.daemon_client, "dave")
        dave.register()
        statuses = [dave.request("QUERY_PENDING_EVENTS").status for _ in range(REQUESTS + 1)]
        self.assertEqual(statuses, [200] * REQUESTS + [429])
        socket = RawWebSocket(self.daemon_client)
        self.addCleanup(socket.close)
        socket.send(dave.authentication())
        self.assertEqual(socket.receive()["code"], "RATE_LIMITED")
