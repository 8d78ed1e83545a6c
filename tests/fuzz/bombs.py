"""Bombs thrown at the front door of a mediator, and what they cost it: calls and bytes, which are counted."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.didcomm.jwe import encrypt_anoncrypt, encrypt_authcrypt
from tests.fuzz.fuzz_mediator import MeasuredCost, measure_cost, problem_code
from tests.fuzz.targets.http import statuses
from tests.http.in_memory_site import HTTPResponse, InMemorySite, InMemoryTransport
from tests.in_memory_mediator import PING, InMemoryWallet
from tests.integration.daemon import PLENTY
from tests.protocol.didcomm.foreign_jwe import JWEWriter

# Functions that a usual message has called, thrice: about 1000.
USUAL = 3_000
# Bytes of memory, and how many more for each that comes: it is there as HTTP, as JSON, decoded and decrypted.
ROOM = 600_000
COPIES = 20


class BombTestCase(SynchronousTestCase):
    """A mediator that allows any number of messages, and a wallet that has an account there."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, **PLENTY, listen=["tcp:0"])
        self.guest = InMemoryWallet(self.site_fixture).enrol()
        self.to = [(method.id, method.key) for method in self.site_fixture.document.key_agreement]

    def message(self, type_: str = PING, body: Any = None, **headers: Any) -> bytes:
        """Of the wallet to the mediator, in the clear."""
        value = {
            "id": "b-1",
            "type": type_,
            "body": body or {},
            "from": self.guest.did,
            "to": [self.site_fixture.did],
        }
        return json.dumps({**value, **headers}).encode()

    def anoncrypted(self, plaintext: bytes) -> bytes:
        """By nobody."""
        return encrypt_anoncrypt(plaintext, self.to)

    def authcrypted(self, plaintext: bytes) -> bytes:
        """By the wallet."""
        key = self.guest.identity.agreement
        return encrypt_authcrypt(plaintext, (key.kid, key.private), self.to)

    def foreign(self, plaintext: bytes = b"{}", **writing: Any) -> dict[str, Any]:
        """An envelope written in any way."""
        return JWEWriter(**writing).write(plaintext, self.to[0])

    def post(self, body: bytes, *, most_calls: int = USUAL, most: int = 0, **headers: str) -> HTTPResponse:
        """
        The answer to an envelope, which must not have cost more.

        :param most: bytes of memory; 20 times what was sent and some more unless given.
        """
        self.site_fixture.post(self.anoncrypted(b"{}"))  # what is only done once is done now
        responses: list[HTTPResponse] = []
        work = measure_cost(lambda: responses.append(self.site_fixture.post(body, **headers)))
        self.bounded(work, most_calls, most or ROOM + COPIES * len(body))
        return responses[0]

    def refused(self, body: bytes, status: int = 400, **options: Any) -> str:
        """The code that an envelope is refused with, in the clear."""
        waiting = self.guest.waiting()
        response = self.post(body, **options)
        self.assertEqual(response.status, status, response.body)
        self.assertEqual(self.guest.waiting(), waiting)
        return problem_code(response.body)

    def told(self, *pieces: bytes, most_calls: int, most: int) -> tuple[list[int], InMemoryTransport]:
        """The statuses of what is answered on one connection."""
        transport = self.site_fixture.connect()

        def feed() -> None:
            for piece in pieces:
                transport.feed(piece)
            self.site_fixture.run_due_calls()

        self.bounded(measure_cost(feed), most_calls, most)
        return statuses(transport.take_output()), transport

    def bounded(self, work: MeasuredCost, most_calls: int, most: int) -> None:
        """It has cost no more than that."""
        self.assertLess(work.calls, most_calls)
        self.assertLess(work.peak, most)
