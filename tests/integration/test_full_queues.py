"""Full queues of a real daemon: a flooding sender evicts its own messages or is refused, and the ledger balances."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from http.client import HTTPConnection
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.wallet.didcomm_client import DIDCommWallet
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import BASIC_MESSAGE, anoncrypt, authcrypt, build_forward, compose_message
from tests.integration.message_load import PATIENCE_SECONDS, drain_queue, enrol_wallet, prepare_daemon
from tests.observability.counter_oracle import read_lines

reactor: Any = _reactor

CAPACITY, FLOOD = 10, 30
# Client addresses reported by the proxy.
USUAL, FLOODER, THIRD = "198.51.100.1", "198.51.100.2", "198.51.100.3"
REFUSED = (429, "600", "e.m.me.res.storage")
ACCEPTED = (202, None, None)

Outcome = tuple[int, str | None, str | None]


class FullQueueTests(TestCase):
    """With the default store."""

    backend = "sqlite"

    async def start_daemon(self, **queue: Any) -> None:
        settings = {"storage": {"backend": self.backend}, "trusted_proxies": ["127.0.0.1"]}
        self.daemon = prepare_daemon({**settings, "queue": {"max_messages": CAPACITY, **queue}})
        self.addCleanup(self.daemon.clean)
        await deferToThread(self.daemon.start)
        self.bob = await enrol_wallet(self.daemon, reactor)

    async def send(self, prefix: str, count: int, peer: str, sender: WalletIdentity | None = None) -> list[Outcome]:
        """Send messages from an address, anonymously or as this sender."""
        return await deferToThread(self.post, [f"{prefix}-{n}" for n in range(count)], peer, sender)

    def post(self, markers: list[str], peer: str, sender: WalletIdentity | None) -> list[Outcome]:
        """Status, Retry-After and problem code of each response."""
        connection = HTTPConnection("127.0.0.1", self.daemon.port, timeout=PATIENCE_SECONDS)
        headers = {"Content-Type": ENCRYPTED_MEDIA_TYPE, "X-Forwarded-For": peer}
        outcomes: list[Outcome] = []
        for marker in markers:
            connection.request("POST", "/didcomm", pack_forward(self.bob, marker, sender), headers)
            response = connection.getresponse()
            body = response.read()
            code = json.loads(body)["body"]["code"] if body and sender is None else None
            outcomes.append((response.status, response.getheader("Retry-After"), code))
        connection.close()
        return outcomes

    async def assert_queued(self, expected: list[str], **entries: int) -> None:
        """Exactly these messages are queued, in this order; once they are fetched, ledger and log agree."""
        self.assertEqual(list(await drain_queue(self.bob)), expected)
        status = await deferToThread(self.read_status)
        self.assertEqual([ledger["difference"] for ledger in status["ledger"].values()], [0, 0])
        await deferToThread(self.daemon.stop)
        lines = read_lines(self.daemon.log_directory)
        ledgers = [line for line in lines if line["event"] == "ledger" and line["proto"] == "didcomm"]
        self.assertEqual((ledgers[-1]["difference"], ledgers[-1]["waiting"]), (0, 0))
        counts = {}
        for event, entry in (("msg.accept", "accepted"), ("msg.ack", "acknowledged"), ("msg.evict", "evicted")):
            # Status requests trigger probes, which the daemon sends to itself.
            own_count = sum(line.get(f"own_{entry}", 0) for line in ledgers)
            counts[entry] = ledgers[-1][f"all_{entry}"] - own_count
            self.assertEqual(sum(line["event"] == event for line in lines), counts[entry], entry)
        self.assertEqual({**counts, **entries, "acknowledged": len(expected)}, counts)

    def read_status(self) -> Any:
        """Output of `mediatord status`, which reports no problem once the first probe has ended."""
        command = [sys.executable, "-m", "mediatord", "status", "--url", self.daemon.url, "--over", "0", "--json"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            status = json.loads(result.stdout or '{"ready": ""}')
            # On a busy machine the first probe may take longer than a response waits for it.
            if not status["ready"].startswith("error") or time.monotonic() > deadline:
                break
        self.assertEqual((result.returncode, result.stderr), (0, ""), result.stdout)
        return status

    async def test_flood_from_address_evicts_its_own_messages(self) -> None:
        """Older messages from another address stay."""
        await self.start_daemon()
        await self.send("friend", 3, USUAL)
        self.assertEqual(await self.send("flood", FLOOD, FLOODER), [ACCEPTED] * FLOOD)
        remaining = [f"flood-{n}" for n in range(FLOOD - CAPACITY + 3, FLOOD)]
        await self.assert_queued(
            [f"friend-{n}" for n in range(3)] + remaining, accepted=FLOOD + 3, evicted=FLOOD + 3 - CAPACITY
        )

    async def test_refuses_messages_when_configured(self) -> None:
        """429 beyond a sender's share, and for all when the queue is full; queued messages stay."""
        await self.start_daemon(when_full="refuse")
        half = CAPACITY // 2
        self.assertEqual(await self.send("friend", 3, USUAL), [ACCEPTED] * 3)
        self.assertEqual(await self.send("flood", FLOOD, FLOODER), [ACCEPTED] * half + [REFUSED] * (FLOOD - half))
        self.assertEqual(await self.send("more", 3, THIRD), [ACCEPTED] * 2 + [REFUSED])
        (outcome,) = await self.send("proven", 1, THIRD, WalletIdentity.generate())
        self.assertEqual(outcome[:2], REFUSED[:2])
        expected = [f"friend-{n}" for n in range(3)] + [f"flood-{n}" for n in range(half)] + ["more-0", "more-1"]
        await self.assert_queued(expected, accepted=CAPACITY, evicted=0)


def pack_forward(recipient: DIDCommWallet, marker: str, sender: WalletIdentity | None) -> bytes:
    """A forward of an anonymous or authenticated sender."""
    message_envelope = anoncrypt(
        compose_message(BASIC_MESSAGE, {"content": marker}, to=[recipient.did]), recipient.identity.document
    )
    mediator = recipient.mediator
    message = build_forward(recipient.did, [message_envelope], to=[mediator.did])
    if sender is None:
        return anoncrypt(message, mediator.document)
    return authcrypt({**message, "from": sender.did}, sender, mediator.document)
