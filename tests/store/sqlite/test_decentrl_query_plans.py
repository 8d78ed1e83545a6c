"""Query plans of the Decentrl part of the SQLite store."""

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

UNREGISTERED = "did:example:stranger"
ALL = PageRequest(0, 1000)


class QueryPlanTests(SynchronousTestCase):
    """Costs do not grow with the amount of data, except where stated."""

    def setUp(self) -> None:
        self.connection = open_database(make_database_path(self))
        self.addCleanup(self.connection.close)
        self.operations = SQLiteOperations(DecentrlQuotas())
        self.numbers = count()
        self.run_commands(*self.operations.prepare_parties())

    def run_commands(self, *commands: SQLOperation) -> None:
        outcomes = self.connection.commit_batch(commands)
        self.assertEqual([isinstance(outcome, Exception) for outcome in outcomes], [False] * len(commands))

    def explain(self, use: Callable[[], object]) -> list[str]:
        """Query plans of all statements of a call."""
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

    def find_scans(self, plans: Iterable[str]) -> set[str]:
        """Plan steps that read more rows than they return, except for rows of the statement itself."""
        own = r"SCAN (w|gone|changed|column\d|\(subquery-\d+\)|(\d+ )?CONSTANT ROWS?)$"
        return {
            plan
            for plan in plans
            if re.match("SCAN|MATERIALIZE|.*TEMP B-TREE|.*AUTOMATIC", plan)
            and not re.match(own, plan)
            and plan not in ("MATERIALIZE changed", "MATERIALIZE gone")
        }

    def run_all_commands(self) -> None:
        operations, connection = self.operations, self.connection
        events = [StoredEvent(f"e{number}", BOB, ALICE, "p", ("x", "y"), float(number)) for number in range(4)]
        public = [PublicEvent(f"x{number}", "e", ("x", "y"), float(number), "s", "blog") for number in range(3)]
        self.run_commands(
            operations.check_guard(operations.make_guard(ALICE, BOB)),
            operations.save_contract(make_contract("again", None, ALICE)),
            operations.save_contract(make_contract("c", ALICE, BOB), operations.make_guard(ALICE)),
            operations.add_request(
                ContractRequest("q", UNREGISTERED, ALICE, "", ""), operations.make_guard(None, ALICE)
            ),
            operations.deliver_event(PendingEvent("p", ALICE, BOB, "", NOON), operations.make_guard(None, ALICE)),
            operations.deliver_event(PendingEvent("p2", ALICE, CAROL, "", NOON), operations.make_guard(None, ALICE)),
            operations.acknowledge_events(ALICE, ["p", "unknown"], operations.make_guard(ALICE)),
            operations.save_events(ALICE, events[:2], operations.make_guard(ALICE)),
            operations.save_events(ALICE, events[2:], operations.make_guard(ALICE)),
            operations.update_tags(ALICE, [("e1", ("y", "z")), ("e2", ())], operations.make_guard(ALICE)),
            *(operations.publish_event(ALICE, item, operations.make_guard(ALICE)) for item in public),
            operations.unpublish_event(ALICE, "x1", operations.make_guard(ALICE)),
        )
        decentrl_queries.acknowledge_requests(connection, ALICE, ["q"])
        decentrl_queries.get_registration_expiry(connection, NOON, ALICE)
        coordination_queries.claim_nonces(
            connection, [coordination_queries.NonceClaim(b"a", NOON + 1, NOON, capacity=2)] * 2
        )
        coordination_queries.release_nonce(connection, b"a")
        coordination_queries.prune_nonces(connection, 9, NOON, 0)
        decentrl_queries.drop_expired_registrations(connection, 9, NOON + 2 * HOUR)

    def test_commands_read_no_extra_rows(self) -> None:
        """No command reads more rows than it needs."""
        scans = self.find_scans(self.explain(self.run_all_commands))
        # In order, up to a limit.
        self.assertEqual(scans, {"SCAN nonce", "SCAN nonce USING COVERING INDEX sqlite_autoindex_nonce_1"} & scans)

    def test_contracts_requests_and_pending_events(self) -> None:
        """A page of contracts, requests or pending events reads no more rows than it needs."""
        self.run_all_commands()

        def use() -> None:
            for wanted in (ContractFilter(), ContractFilter(expires_after=1.0, expires_before=NOON)):
                decentrl_queries.find_contracts(self.connection, ALICE, wanted, ALL)
            decentrl_queries.find_contract_requests(self.connection, BOB, ALL)
            for sender in (None, BOB):
                decentrl_queries.find_pending_page(self.connection, ALICE, sender, ALL)

        plans = self.explain(use)
        self.assertEqual(self.find_scans(plans), set())
        self.assertIn("SEARCH pending_event USING COVERING INDEX pending_event_of_recipient (recipient_id=?)", plans)

    def search_events(self, wanted: EventFilter, part: PageRequest = ALL) -> list[str]:
        reading = PageReadOptions(part, PageCursorCache())
        return self.explain(lambda: event_archive_queries.find_stored_events(self.connection, ALICE, wanted, reading))

    def test_single_criterion(self) -> None:
        """A page for one criterion is a range of one index in its order, and the total is looked up."""
        self.run_all_commands()
        for wanted in (
            EventFilter(),
            EventFilter(("x",)),
            EventFilter(participant=BOB),
            EventFilter(unprocessed_only=True),
        ):
            for part in (PageRequest(0, 1), PageRequest(1, 1), PageRequest(0, 9)):
                plans = self.search_events(wanted, part)
                self.assertEqual(self.find_scans(plans), set())
                ranges = [plan for plan in plans if re.search("labelled|SEARCH d", plan)]
                self.assertEqual(ranges, ["SEARCH d USING PRIMARY KEY (label_id=?)"])

    def test_timestamp_bounds(self) -> None:
        """Timestamps are bounded in the same index."""
        self.run_all_commands()
        plans = self.search_events(EventFilter(("x", "unknown"), after=0.0, before=2.0))
        self.assertEqual(self.find_scans(plans), set())
        # To count them and to read them.
        range_plan = "SEARCH d USING PRIMARY KEY (label_id=? AND timestamp>? AND timestamp<?)"
        self.assertEqual(plans.count(range_plan), 2)

    def test_next_page(self) -> None:
        """The next page starts where the last one ended, in the same index, from either end and with bounds."""
        self.run_all_commands()
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

        plans = self.explain(use)
        self.assertEqual(self.find_scans(plans), set())
        for side in "><":
            self.assertIn(f"SEARCH d USING PRIMARY KEY (label_id=? AND (timestamp,seq){side}(?,?))", plans)

    def test_several_criteria(self) -> None:
        """Further criteria are probed in the same index, and ranges are merged without sorting."""
        self.run_all_commands()
        plans = self.search_events(EventFilter(("x", "y"), unprocessed_only=True, participant=UNREGISTERED))
        self.assertEqual(self.find_scans(plans), set())
        plans = self.search_events(EventFilter(("x", "y", "z"), before=2.0))
        self.assertEqual(self.find_scans(plans), set())
        self.assertIn("MERGE (UNION)", plans)
        plans = self.search_events(EventFilter(("x",), before=1.0, unprocessed_only=True))
        self.assertIn("SEARCH p USING PRIMARY KEY (label_id=? AND timestamp=? AND seq=?)", plans)
        self.assertEqual(self.find_scans(plans), set())

    def test_public_events(self) -> None:
        """The same holds for public events."""
        self.run_all_commands()

        def use() -> None:
            for wanted in (
                PublicEventFilter(),
                PublicEventFilter(("x",), 0.0, 9.0),
                PublicEventFilter(("x", "y"), None, None, "blog"),
            ):
                event_archive_queries.find_public_events(
                    self.connection, ALICE, wanted, PageReadOptions(PageRequest(1, 1), PageCursorCache())
                )

        self.assertEqual(self.find_scans(self.explain(use)), set())
