"""Server sessions."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.mongo.driver.transactions import ServerSessionPool, Transaction, list_session_ids
from tests.store.mongo.mongo_test_case import THINGS, MongoTestCase

HOUR = 3600.0


class SessionPoolTests(SynchronousTestCase):
    """Number of sessions."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.sessions = ServerSessionPool(self.clock)

    def test_reuses_idle_session(self) -> None:
        """An idle session is reused with a higher transaction number."""
        first = self.sessions.check_out()
        number = first.begin()["txnNumber"]
        self.sessions.return_session(first)
        self.clock.advance(HOUR)
        self.assertIs(self.sessions.check_out(), first)
        self.assertGreater(first.begin()["txnNumber"], number)

    def test_reuses_quarantined_session_later(self) -> None:
        """A quarantined session is reused later."""
        first = self.sessions.check_out()
        self.sessions.quarantine_session(first)
        self.assertIsNot(self.sessions.check_out(), first)
        self.clock.advance(60)
        self.assertIs(self.sessions.check_out(), first)

    def test_sessions_in_use_can_be_ended_by_others(self) -> None:
        """All sessions in use are among those that another process would end."""
        for _ in range(30):
            sessions = [self.sessions.check_out() for _ in range(32)]
            for session in sessions[::2]:
                self.sessions.return_session(session)
            for session in sessions[1::2]:
                self.sessions.quarantine_session(session)
            self.clock.advance(HOUR)
        session_ids = list_session_ids(self.sessions.owner)
        self.assertEqual(
            [session_id for session_id in self.sessions.session_ids if session_id not in session_ids], []
        )

    def test_keeps_sessions_that_others_can_end(self) -> None:
        """After a peak the sessions that another process would end are used again."""
        session_ids = list_session_ids(self.sessions.owner)
        for _ in range(20):
            sessions = [self.sessions.check_out() for _ in range(300)]
            self.assertEqual(len({bytes(session.id["id"]) for session in sessions}), 300)
            for session in sessions[::2]:
                self.sessions.return_session(session)
            for session in sessions[1::2]:
                self.sessions.quarantine_session(session)
            self.clock.advance(60)
        sessions = [self.sessions.check_out() for _ in range(256)]
        self.assertEqual([session.id for session in sessions if session.id not in session_ids], [])

    def test_lists_sessions_that_may_be_active(self) -> None:
        """All sessions are listed that may be active."""
        sessions = [self.sessions.check_out() for _ in range(5_000)]
        for session in sessions[:3_000]:
            self.sessions.return_session(session)
        for session in sessions[3_000:]:
            self.sessions.quarantine_session(session)
        self.assertEqual(self.sessions.session_ids, [session.id for session in sessions])


class OwnerTests(MongoTestCase):
    async def test_returns_to_former_owner_id(self) -> None:
        """A process can return to a former owner id."""
        server = await self.open_client()

        async def insert(transaction: Transaction) -> None:
            await transaction.write(THINGS.insert([{}]))

        for owner in ("a", "a", "b", "a"):
            server.set_session_owner(f"{self.database} {owner}")
            await server.transact("insert", insert)
        found: list[Any] = list(self.documents["things"].find())
        self.assertEqual(len(found), 4)
