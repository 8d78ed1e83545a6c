"""Recording of acknowledged senders in MongoDB, without a server."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.fair_share import PROBATION_SECONDS, KnownSenders
from mediatord.store.mongo import removal

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


class AcknowledgedSenderTests(SynchronousTestCase):
    def test_cost_is_linear(self) -> None:
        """The cost grows with the messages and with the recipients, not with their product."""
        recipients: dict[Any, Any] = {CountingId(number): {} for number in range(RECIPIENTS)}
        documents = [
            {"recipient": CountingId(number), "sender": 1 + place}
            for place in range(MESSAGES)
            for number in range(RECIPIENTS)
        ]
        self.patch(CountingId, "compared", 0)
        first, later = [removal.RemovalRequest((), now=now) for now in (0.0, float(PROBATION_SECONDS))]
        works = [(first, documents), (later, documents[:RECIPIENTS])]
        changed = removal._update_senders(works, recipients)
        self.assertLessEqual(CountingId.compared, 2 * (len(documents) + 2 * RECIPIENTS))
        self.assertEqual(len(changed), RECIPIENTS)
        for text in changed.values():
            senders = KnownSenders(text)
            self.assertEqual((senders.known, senders.text().count("[") - 1), ({1}, MESSAGES))
