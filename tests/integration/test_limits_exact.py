"""Limits of a daemon, counted from outside: exact to one message by whichever way it comes, and anew in a minute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import cycle
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.bench.raw_clients import WebSocketClient
from mediatord.bench.wallet_group import build_inner_envelope, enrol_group
from mediatord.protocol import encoding
from mediatord.wallet.didcomm_client import PICKUP
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import authcrypt, build_forward
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS, prepare_daemon
from tests.integration.raw_decentrl_client import DaemonClient, send_request_on
from tests.integration.test_workers import LOOK_SECONDS, await_workers
from tests.skewed_clock import ClockedDaemon, SkewedClock

ADDRESS, SENDER, ACCOUNT = 20, 7, 11
RATE_LIMITED = "e.m.req.rate-limited"
# What is tried beyond a limit.
MORE = 3
TRUSTED = "127.0.0.77"


class LimitsTestCase(SynchronousTestCase):
    """A daemon whose clock can be set, and one wallet with an account."""

    settings: dict[str, Any] = {
        "limits": {
            "ip_per_minute": ADDRESS,
            "did_per_minute": SENDER,
            "account_per_minute": ACCOUNT,
            "trusted_peers": [TRUSTED],
            "trusted_per_minute": 10 * SENDER,
        }
    }

    def setUp(self) -> None:
        self.clock = SkewedClock()
        self.addCleanup(self.clock.remove)
        self.daemon = ClockedDaemon(self.clock, self.settings)
        self.addCleanup(self.daemon.clean)
        self.daemon.start()
        self.group = enrol_group(self.daemon.url, 1, short=True)
        (self.bob,) = self.group.wallets
        self.daemon_client = DaemonClient(self.daemon)
        self.ahead = 0.0

    def a_minute_passes(self) -> None:
        """For the daemon, which says that its clock was set."""
        said = len(self.daemon.output())
        self.ahead += 60.0
        self.clock.set(self.ahead)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "the system clock was set" not in self.daemon.output()[said:]:
            assert time.monotonic() < deadline, self.daemon.output()
            time.sleep(LOOK_SECONDS)

    def anonymous(self, count: int) -> list[bytes]:
        """Forwards to Bob, of nobody."""
        return [body for body, _ in self.group.forwards(300, count)]

    def signed(self, sender: WalletIdentity, count: int) -> list[bytes]:
        """Forwards to Bob, of one sender."""
        mediator, letter = self.group.mediator, build_inner_envelope(self.bob.identity, 300)
        messages = [
            build_forward(self.bob.did, [letter], to=[mediator.did]) | {"from": sender.did} for _ in range(count)
        ]
        return [authcrypt(message, sender, mediator.document) for message in messages]

    def asking(self, count: int) -> list[bytes]:
        """Requests of Bob about his own mail."""
        return [self.bob.pack(f"{PICKUP}/status-request")[1] for _ in range(count)]

    def posted(self, messages: Sequence[bytes], source: str) -> list[int]:
        """The statuses of what is posted from an address."""
        with closing(self.daemon_client.connection(source)) as connection:
            return [send_request_on(connection, "POST", "/didcomm", raw).status for raw in messages]

    def said(self, messages: Sequence[bytes], source: str) -> int:
        """How many forwards are admitted on a socket from an address: what is refused is answered in the clear."""
        with self.socket(source) as socket:
            for raw in (*messages, *self.asking(1)):
                socket.send(raw)
            frames = socket.take()
            while not any(map(is_sealed, frames)):
                frames += socket.take()
            self.assertEqual({code_of(frame) for frame in frames[:-1]} or {RATE_LIMITED}, {RATE_LIMITED})
            return len(messages) - len(frames[:-1])

    def asked(self, messages: Sequence[bytes], source: str) -> int:
        """How many requests are admitted on a socket from an address: each has an answer."""
        with self.socket(source) as socket:
            answered = 0
            for raw in messages:
                socket.send(raw)
                frame = socket.receive()
                answered += is_sealed(frame)
                self.assertTrue(is_sealed(frame) or code_of(frame) == RATE_LIMITED)
            return answered

    def socket(self, source: str) -> closing[WebSocketClient]:
        """One that is open."""
        return closing(WebSocketClient(f"ws://127.0.0.1:{self.daemon.port}/didcomm", source=source))


def is_sealed(frame: bytes) -> bool:
    """Whether it is an envelope."""
    return "ciphertext" in encoding.loads_object(frame)


def code_of(frame: bytes) -> str:
    """Of a problem report."""
    return str(encoding.loads_object(frame)["body"]["code"])


class ExactTests(LimitsTestCase):
    def test_one_address(self) -> None:
        """So many forwards, then none on either way in; after a minute so many again, and then none."""
        posted = self.posted(self.anonymous(ADDRESS + MORE), "127.0.0.2")
        self.assertEqual(posted, [202] * ADDRESS + [429] * MORE)
        self.assertEqual(self.said(self.anonymous(MORE), "127.0.0.2"), 0)
        self.a_minute_passes()
        self.assertEqual(self.said(self.anonymous(ADDRESS + MORE), "127.0.0.2"), ADDRESS)
        self.assertEqual(self.posted(self.anonymous(MORE), "127.0.0.2"), [429] * MORE)
        self.assertEqual(self.posted(self.anonymous(1), "127.0.0.3"), [202])

    def test_one_sender(self) -> None:
        """Likewise, from whichever addresses and by whichever ways."""
        carol = WalletIdentity.generate()
        for _ in range(2):
            self.assertEqual(self.posted(self.signed(carol, SENDER - 2), "127.0.0.2"), [202] * (SENDER - 2))
            self.assertEqual(self.said(self.signed(carol, 2 + MORE), "127.0.0.3"), 2)
            self.assertEqual(self.posted(self.signed(carol, MORE), "127.0.0.4"), [429] * MORE)
            self.a_minute_passes()
        self.assertEqual(self.posted(self.signed(WalletIdentity.generate(), 1), "127.0.0.4"), [202])

    def test_one_account(self) -> None:
        """Likewise."""
        for _ in range(2):
            self.a_minute_passes()
            self.assertEqual(self.asked(self.asking(5), "127.0.0.2"), 5)
            rest = ACCOUNT - 5
            self.assertEqual(self.posted(self.asking(rest + MORE), "127.0.0.3"), [200] * rest + [429] * MORE)
            self.assertEqual(self.asked(self.asking(MORE), "127.0.0.4"), 0)

    def test_another_mediator(self) -> None:
        """A trusted peer passes on ten times what one wallet may send, of itself and of others; its neighbour not."""
        relay, count = WalletIdentity.generate(), 5 * SENDER
        self.assertEqual(self.posted(self.signed(relay, count), TRUSTED), [202] * count)
        self.assertEqual(self.said(self.anonymous(count + MORE), TRUSTED), count)
        self.assertEqual(self.posted(self.signed(relay, SENDER + 1), "127.0.0.78"), [202] * SENDER + [429])
        rest = ADDRESS - SENDER - 1
        self.assertEqual(self.posted(self.anonymous(rest + 1), "127.0.0.78"), [202] * rest + [429])


class WorkersTests(SynchronousTestCase):
    def test_two_processes(self) -> None:
        """Together they admit what one would, within 5 %, over connections that either has."""
        limit = 200
        daemon: Daemon = prepare_daemon(
            {"workers": 2, "limits": {"ip_per_minute": limit, "trusted_peers": [TRUSTED]}}
        )
        self.addCleanup(daemon.clean)
        daemon.start()
        await_workers(daemon, 2)
        daemon_client, taken = DaemonClient(daemon), 0
        with ExitStack() as stack:
            connections = [stack.enter_context(closing(daemon_client.connection("127.0.0.9"))) for _ in range(16)]
            for connection, _ in zip(cycle(connections), range(2 * limit), strict=False):
                answered = send_request_on(
                    connection, "POST", "/didcomm", b"no envelope", {"Content-Type": "text/plain"}
                )
                taken += answered.status != 429
        self.assertTrue(0.95 * limit <= taken <= 1.05 * limit, taken)
