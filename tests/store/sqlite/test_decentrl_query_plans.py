"""How SQLite finds what Decentrl asks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import count

from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.caches import PageCursorCache
from mediatord.store.interfaces.decentrl import (
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    StoredEvent,
)
from mediatord.store.sqlite import coordination_queries, decentrl_queries, event_archive_queries
from mediatord.store.sqlite.connection import SQLOperation
from mediatord.store.sqlite.database_file import open_database
from mediatord.store.sqlite.event_archive_queries import PageReadOptions
from tests.store.builders import ALICE, BOB, HOUR, NOON, make_database_path
from tests.store.sqlite.operations import CAROL, SQLiteOperations, make_contract

STRANGER = "did:example:stranger"
ALL = PageRequest(0, 1000)


class PlanTests(SynchronousTestCase):
    """That no statement grows with what is kept, but where that is said."""

    def setUp(self) -> None:
        self.connection = open_database(make_database_path(self))
        self.addCleanup(self.connection.close)
        self.orders = SQLiteOperations(DecentrlQuotas())
        self.numbers = count()
        self.do(*self.orders.settled())

    def do(self, *commands: SQLOperation) -> None:
        outcomes = self.connection.commit_batch(commands)
        self.assertEqual([isinstance(outcome, Exception) for outcome in outcomes], [False] * len(commands))

    def plans(self, use: Callable[[], object]) -> list[str]:
        """How SQLite goes about all that this asks of it."""
        statements: list[str] = []
        self.connection.set_trace_callback(statements.append)
        use()
        self.connection.set_trace_callback(None)
        return [
            detail
            for statement in statements
            if re.match(r"\s*(SELECT|UPDATE|DELETE|WITH|INSERT)", statement)
            for *_, detail in self.connection.execute(f"EXPLAIN QUERY PLAN {statement}")
        ]

    def scans(self, plans: Iterable[str]) -> set[str]:
        """Whatever reads more than it looks for, apart from rows that are in the statement itself."""
        own = r"SCAN (w|gone|changed|column\d|\(subquery-\d+\)|(\d+ )?CONSTANT ROWS?)$"
        return {
            plan
            for plan in plans
            if re.match("SCAN|MATERIALIZE|.*TEMP B-TREE|.*AUTOMATIC", plan)
            and not re.match(own, plan)
            and plan not in ("MATERIALIZE changed", "MATERIALIZE gone")
        }

    def use_everything(self) -> None:
        orders, connection = self.orders, self.connection
        events = [StoredEvent(f"e{number}", BOB, ALICE, "p", ("x", "y"), float(number)) for number in range(4)]
        public = [PublicEvent(f"x{number}", "e", ("x", "y"), float(number), "s", "blog") for number in range(3)]
        self.do(
            orders.admit(orders.guard(ALICE, BOB)),
            orders.contract(make_contract("again", None, ALICE)),
            orders.contract(make_contract("c", ALICE, BOB), orders.guard(ALICE)),
            orders.request(ContractRequest("q", STRANGER, ALICE, "", ""), orders.guard(None, ALICE)),
            orders.deliver(PendingEvent("p", ALICE, BOB, "", NOON), orders.guard(None, ALICE)),
            orders.deliver(PendingEvent("p2", ALICE, CAROL, "", NOON), orders.guard(None, ALICE)),
            orders.acknowledge(ALICE, ["p", "unknown"], orders.guard(ALICE)),
            orders.save(ALICE, events[:2], orders.guard(ALICE)),
            orders.save(ALICE, events[2:], orders.guard(ALICE)),
            orders.tag(ALICE, [("e1", ("y", "z")), ("e2", ())], orders.guard(ALICE)),
            *(orders.publish(ALICE, one, orders.guard(ALICE)) for one in public),
            orders.unpublish(ALICE, "x1", orders.guard(ALICE)),
        )
        decentrl_queries.acknowledge_requests(connection, ALICE, ["q"])
        decentrl_queries.get_registration_expiry(connection, NOON, ALICE)
        coordination_queries.claim_nonces(
            connection, [coordination_queries.NonceClaim(b"a", NOON + 1, NOON, capacity=2)] * 2
        )
        coordination_queries.release_nonce(connection, b"a")
        coordination_queries.prune_nonces(connection, NOON, 0)
        decentrl_queries.drop_expired_registrations(connection, NOON + 2 * HOUR)

    def test_commands(self) -> None:
        """No command reads more rows than it has to do with."""
        scans = self.scans(self.plans(self.use_everything))
        # In order, up to a limit.
        self.assertEqual(scans, {"SCAN nonce", "SCAN nonce USING COVERING INDEX sqlite_autoindex_nonce_1"} & scans)

    def test_mail(self) -> None:
        """Nor does a page of contracts, of requests, or of events that wait."""
        self.use_everything()

        def use() -> None:
            for wanted in (ContractFilter(), ContractFilter(expires_after=1.0, expires_before=NOON)):
                decentrl_queries.find_contracts(self.connection, ALICE, wanted, ALL)
            decentrl_queries.find_contract_requests(self.connection, BOB, ALL)
            for sender in (None, BOB):
                decentrl_queries.find_pending_page(self.connection, ALICE, sender, ALL)

        plans = self.plans(use)
        self.assertEqual(self.scans(plans), set())
        self.assertIn("SEARCH pending_event USING COVERING INDEX pending_event_of_recipient (recipient_id=?)", plans)

    def search(self, wanted: EventFilter, part: PageRequest = ALL) -> list[str]:
        reading = PageReadOptions(part, PageCursorCache())
        return self.plans(lambda: event_archive_queries.find_stored_events(self.connection, ALICE, wanted, reading))

    def test_one_label(self) -> None:
        """A page of what one thing is asked for is a range of one index, in its order, and its total is looked up."""
        self.use_everything()
        for wanted in (
            EventFilter(),
            EventFilter(("x",)),
            EventFilter(participant=BOB),
            EventFilter(unprocessed_only=True),
        ):
            for part in (PageRequest(0, 1), PageRequest(1, 1), PageRequest(0, 9)):
                plans = self.search(wanted, part)
                self.assertEqual(self.scans(plans), set())
                ranges = [plan for plan in plans if re.search("labelled|SEARCH d", plan)]
                self.assertEqual(ranges, ["SEARCH d USING PRIMARY KEY (label_id=?)"])

    def test_bounds(self) -> None:
        """Times are found in the same index."""
        self.use_everything()
        plans = self.search(EventFilter(("x", "unknown"), after=0.0, before=2.0))
        self.assertEqual(self.scans(plans), set())
        # To count them and to read them.
        range_plan = "SEARCH d USING PRIMARY KEY (label_id=? AND timestamp>? AND timestamp<?)"
        self.assertEqual(plans.count(range_plan), 2)

    def test_reading_on(self) -> None:
        """Who reads on begins where the page before has ended, in the same index, from either end and with bounds."""
        self.use_everything()
        page_cursors = PageCursorCache()

        def use() -> None:
            for offset in (0, 1):
                reading = PageReadOptions(PageRequest(offset, 1), page_cursors)
                event_archive_queries.find_stored_events(
                    self.connection, ALICE, EventFilter(after=-1.0, before=9.0), reading
                )
                event_archive_queries.find_public_events(
                    self.connection, ALICE, PublicEventFilter((), -1.0, 9.0), reading
                )

        plans = self.plans(use)
        self.assertEqual(self.scans(plans), set())
        for side in "><":
            self.assertIn(f"SEARCH d USING PRIMARY KEY (label_id=? AND (timestamp,seq){side}(?,?))", plans)

    def test_several_labels(self) -> None:
        """What is asked for besides is probed for in the same index, and ranges are merged without being sorted."""
        self.use_everything()
        plans = self.search(EventFilter(("x", "y"), unprocessed_only=True, participant=STRANGER))
        self.assertEqual(self.scans(plans), set())
        plans = self.search(EventFilter(("x", "y", "z"), before=2.0))
        self.assertEqual(self.scans(plans), set())
        self.assertIn("MERGE (UNION)", plans)
        plans = self.search(EventFilter(("x",), before=1.0, unprocessed_only=True))
        self.assertIn("SEARCH p USING PRIMARY KEY (label_id=? AND timestamp=? AND seq=?)", plans)
        self.assertEqual(self.scans(plans), set())

    def test_public(self) -> None:
        """So it is with public events."""
        self.use_everything()

        def use() -> None:
            for wanted in (
                PublicEventFilter(),
                PublicEventFilter(("x",), 0.0, 9.0),
                PublicEventFilter(("x", "y"), None, None, "blog"),
            ):
                event_archive_queries.find_public_events(
                    self.connection, ALICE, wanted, PageReadOptions(PageRequest(1, 1), PageCursorCache())
                )

        self.assertEqual(self.scans(self.plans(use)), set())
