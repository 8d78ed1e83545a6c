"""Full queues of a real daemon: who fills one pushes out mail of its own, or is refused, and the books close."""

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

ROOM, FLOOD = 10, 30
# What the proxy in front says of clients.
FRIEND, FLOODER, THIRD = "198.51.100.1", "198.51.100.2", "198.51.100.3"
REFUSED = (429, "600", "e.m.me.res.storage")
TAKEN = (202, None, None)

Answer = tuple[int, str | None, str | None]


class FullQueueTests(TestCase):
    """With the store that the daemon has by default."""

    backend = "sqlite"

    async def start(self, **queue: Any) -> None:
        settings = {"storage": {"backend": self.backend}, "trusted_proxies": ["127.0.0.1"]}
        self.daemon = prepare_daemon({**settings, "queue": {"max_messages": ROOM, **queue}})
        self.addCleanup(self.daemon.clean)
        await deferToThread(self.daemon.start)
        self.bob = await enrol_wallet(self.daemon, reactor)

    async def send(self, prefix: str, count: int, peer: str, sender: WalletIdentity | None = None) -> list[Answer]:
        """So many letters from an address; of anybody, or of one who proves it."""
        return await deferToThread(self.post, [f"{prefix}-{n}" for n in range(count)], peer, sender)

    def post(self, markers: list[str], peer: str, sender: WalletIdentity | None) -> list[Answer]:
        """Status, Retry-After and problem code of each answer."""
        connection = HTTPConnection("127.0.0.1", self.daemon.port, timeout=PATIENCE_SECONDS)
        headers = {"Content-Type": ENCRYPTED_MEDIA_TYPE, "X-Forwarded-For": peer}
        answers: list[Answer] = []
        for marker in markers:
            connection.request("POST", "/didcomm", sealed(self.bob, marker, sender), headers)
            response = connection.getresponse()
            body = response.read()
            code = json.loads(body)["body"]["code"] if body and sender is None else None
            answers.append((response.status, response.getheader("Retry-After"), code))
        connection.close()
        return answers

    async def check(self, expected: list[str], **entries: int) -> None:
        """Just these letters wait, in this order; once they are fetched the books say so, and so does the log."""
        self.assertEqual(list(await drain_queue(self.bob)), expected)
        shown = await deferToThread(self.status)
        self.assertEqual([books["difference"] for books in shown["ledger"].values()], [0, 0])
        await deferToThread(self.daemon.stop)
        lines = read_lines(self.daemon.log_directory)
        ledgers = [line for line in lines if line["event"] == "ledger" and line["proto"] == "didcomm"]
        self.assertEqual((ledgers[-1]["difference"], ledgers[-1]["waiting"]), (0, 0))
        kept = {}
        for event, entry in (("msg.accept", "accepted"), ("msg.ack", "acknowledged"), ("msg.evict", "evicted")):
            # Whoever asks for its state has the daemon send messages to itself.
            own = sum(line.get(f"own_{entry}", 0) for line in ledgers)
            kept[entry] = ledgers[-1][f"all_{entry}"] - own
            self.assertEqual(sum(line["event"] == event for line in lines), kept[entry], entry)
        self.assertEqual({**kept, **entries, "acknowledged": len(expected)}, kept)

    def status(self) -> Any:
        """What `mediatord status` says, which finds nothing wrong once the daemon's first probe has ended."""
        command = [sys.executable, "-m", "mediatord", "status", "--url", self.daemon.url, "--over", "0", "--json"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            shown = json.loads(done.stdout or '{"ready": ""}')
            # On a busy machine the probe of a daemon that was not asked before may take longer than an answer waits.
            if not shown["ready"].startswith("error") or time.monotonic() > deadline:
                break
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return shown

    async def test_one_sender_has_a_fifo(self) -> None:
        """The oldest makes room for the newest."""
        await self.start()
        self.assertEqual(await self.send("only", ROOM + 5, FRIEND), [TAKEN] * (ROOM + 5))
        await self.check([f"only-{n}" for n in range(5, ROOM + 5)], accepted=ROOM + 5, evicted=5)

    async def test_a_flood_from_an_address(self) -> None:
        """It pushes out what it sent itself; the mail of another address stays, old as it is."""
        await self.start()
        await self.send("friend", 3, FRIEND)
        self.assertEqual(await self.send("flood", FLOOD, FLOODER), [TAKEN] * FLOOD)
        kept = [f"flood-{n}" for n in range(FLOOD - ROOM + 3, FLOOD)]
        await self.check([f"friend-{n}" for n in range(3)] + kept, accepted=FLOOD + 3, evicted=FLOOD + 3 - ROOM)

    async def test_a_flood_of_a_did(self) -> None:
        """The same where both come from one address, as long as the sender proves who it is."""
        await self.start()
        await self.send("friend", 3, FRIEND, WalletIdentity.generate())
        answers = await self.send("flood", FLOOD, FRIEND, WalletIdentity.generate())
        self.assertEqual({status for status, *_ in answers}, {202})
        kept = [f"flood-{n}" for n in range(FLOOD - ROOM + 3, FLOOD)]
        await self.check([f"friend-{n}" for n in range(3)] + kept, accepted=FLOOD + 3, evicted=FLOOD + 3 - ROOM)

    async def test_no_share(self) -> None:
        """Where one sender may have all of it and there are no ranks, the oldest goes, whosever it is."""
        await self.start(sender_share=1, reserved_for_known=0)
        await self.send("friend", 3, FRIEND)
        await self.send("flood", FLOOD, FLOODER)
        await self.check([f"flood-{n}" for n in range(FLOOD - ROOM, FLOOD)], evicted=FLOOD + 3 - ROOM)

    async def test_refusing(self) -> None:
        """429 for what is beyond the part of a sender, and for all once it is full; what waits stays, all of it."""
        await self.start(when_full="refuse")
        half = ROOM // 2
        self.assertEqual(await self.send("friend", 3, FRIEND), [TAKEN] * 3)
        self.assertEqual(await self.send("flood", FLOOD, FLOODER), [TAKEN] * half + [REFUSED] * (FLOOD - half))
        self.assertEqual(await self.send("more", 3, THIRD), [TAKEN] * 2 + [REFUSED])
        (packed,) = await self.send("proven", 1, THIRD, WalletIdentity.generate())
        self.assertEqual(packed[:2], REFUSED[:2])
        expected = [f"friend-{n}" for n in range(3)] + [f"flood-{n}" for n in range(half)] + ["more-0", "more-1"]
        await self.check(expected, accepted=ROOM, evicted=0)


class MemoryFullQueueTests(FullQueueTests):
    backend = "memory"


def sealed(recipient: DIDCommWallet, marker: str, sender: WalletIdentity | None) -> bytes:
    """A letter in a forward of nobody, or of a sender that proves who it is."""
    letter = anoncrypt(
        compose_message(BASIC_MESSAGE, {"content": marker}, to=[recipient.did]), recipient.identity.document
    )
    mediator = recipient.mediator
    message = build_forward(recipient.did, [letter], to=[mediator.did])
    if sender is None:
        return anoncrypt(message, mediator.document)
    return authcrypt({**message, "from": sender.did}, sender, mediator.document)
