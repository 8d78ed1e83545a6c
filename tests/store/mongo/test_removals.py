"""Recording of acknowledged senders in MongoDB, without a server."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.fair_share import PROBATION_SECONDS, KnownSenders
from mediatord.store.mongo import removal
from mediatord.store.mongo.driver.collection import Collection
from mediatord.store.mongo.driver.transactions import Transaction

RECIPIENTS, MESSAGES = 40, 10


class CountingId:
    """An id of a recipient that counts comparisons."""

    compared = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        CountingId.compared += 1
        return isinstance(other, CountingId) and self.number == other.number


class RecipientTransaction:
    """A transaction that finds recipients, and records writes."""

    def __init__(self, ids: list[CountingId]) -> None:
        self.ids = ids
        self.requests: list[Any] = []

    async def query(self, _: object) -> list[dict[str, Any]]:
        """Return all of them, with equal but not identical ids."""
        return [{"_id": CountingId(id.number)} for id in self.ids]

    def write_at_end(self, requests: list[Any]) -> None:
        """Record writes."""
        self.requests += requests


class AcknowledgedSenderTests(SynchronousTestCase):
    def test_cost_is_linear(self) -> None:
        """The cost grows with the messages and with the recipients, not with their product."""
        ids = [CountingId(number) for number in range(RECIPIENTS)]
        transaction = RecipientTransaction(ids)
        noted: list[list[Any]] = []

        def note(_: Collection, updates: list[Any]) -> list[Any]:
            noted.append(updates)
            return []

        self.patch(Collection, "update_each", note)
        documents = [
            {"recipient": CountingId(number), "sender": 1 + place}
            for place in range(MESSAGES)
            for number in range(RECIPIENTS)
        ]
        self.patch(CountingId, "compared", 0)
        works = [(0.0, documents), (float(PROBATION_SECONDS), documents[:RECIPIENTS])]
        self.successResultOf(
            Deferred.fromCoroutine(removal._record_senders(cast(Transaction, transaction), cast(Any, works)))
        )
        self.assertLessEqual(CountingId.compared, 2 * (len(documents) + 2 * RECIPIENTS))
        (updates,) = noted
        self.assertEqual(len(updates), RECIPIENTS)
        for update in updates:
            senders = KnownSenders(update["u"]["$set"]["senders"])
            self.assertEqual((senders.known, senders.text().count("[") - 1), ({1}, MESSAGES))
