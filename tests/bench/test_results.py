"""Targets, baselines, charts, and discovery."""

from __future__ import annotations

import base64
import json
import os
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mediatord.bench.envelope_scenario import parse_openssl_rate
from mediatord.bench.processes import assign_cores, pin_to_cores
from mediatord.bench.results import (
    CLIENT_US,
    PER_SECOND,
    BarChart,
    LineChart,
    LoadResult,
    PerformanceTarget,
    ResultTable,
    render_svg,
    select_charts,
)
from mediatord.bench.storage_and_log_scenarios import add_accounts, add_messages, expire_messages
from mediatord.bench.wallet_group import find_mediator
from mediatord.wallet.didcomm_identity import WalletIdentity

SVG = "{http://www.w3.org/2000/svg}"
TARGETS = [PerformanceTarget("rate", 2.0, 3.0), PerformanceTarget("p99, ms", 25.0, 30.0, most=True)]
ROWS = {
    "1k  at 10%": {"offered/s": 100.0, "p50 ms": 1.0, "p99 ms": 3.0, "of g": 0.1},
    "1k  at 90%": {"offered/s": 900.0, "p50 ms": 2.0, "p99 ms": 90.0, "of g": 0.3},
    "1k  openssl": {"of g": 1.0},
}
TABLE = ResultTable(
    "Latency <by> load", ("offered/s", "p50 ms", "p99 ms", "of g"), ROWS, [PerformanceTarget("x, of g", 0.22, 0.1)]
)


def test_targets_are_lower_or_upper_bounds() -> None:
    """A rate must be reached, a latency not exceeded, and the table says which."""
    text = str(ResultTable("T", (), {}, TARGETS))
    assert "rate at least 2: 3.00, met" in text
    assert "p99, ms at most 25: 30.00, missed" in text


def test_refused_requests_count_for_generator_cost() -> None:
    """Only accepted requests count for the rate; the generator's CPU time is divided by all."""
    figures = LoadResult(Counter({"202": 10, "429": 90}), seconds=1.0, client_seconds=0.01, accepted=10).figures()
    assert figures[PER_SECOND] == 10.0
    assert figures[CLIENT_US] == pytest.approx(100.0)


def test_parses_openssl_output() -> None:
    """Operations per second from their line; anything else is no rate."""
    output = "+DTP:253::ecdh:1\n+R7:15085:253:0.69\n+F5:22:253:21862.318841:0.000046\n"
    assert parse_openssl_rate(output) == pytest.approx(21862.318841)
    for other in ("", "+F5:22:253", "+F5:a:b:c:d"):
        with pytest.raises(RuntimeError, match="gave no rate"):
            parse_openssl_rate(other)


def test_charts() -> None:
    """One chart of latencies with a point per load and percentile, one of bars without the baseline; valid XML."""
    curves, bars = select_charts([TABLE])
    assert isinstance(curves, LineChart)
    assert curves.curves == {"p50 ms": [(100.0, 1.0), (900.0, 2.0)], "p99 ms": [(100.0, 3.0), (900.0, 90.0)]}
    assert isinstance(bars, BarChart)
    assert (list(bars.values), bars.goal) == (["1k  at 10%", "1k  at 90%"], 0.22)
    drawn = ElementTree.fromstring(render_svg([curves, bars]))
    assert len(drawn.findall(f".//{SVG}circle")) == 4
    assert len(drawn.findall(f".//{SVG}polyline")) == 2
    assert "Latency <by> load" in [text.text for text in drawn.iter(f"{SVG}text")]
    first, second = (group.findall(f"{SVG}rect") for group in drawn.findall(f"{SVG}g"))
    assert (len(first), len(second)) == (0, 2)
    narrow, wide = (float(bar.attrib["width"]) for bar in second)
    assert wide == pytest.approx(3 * narrow, rel=0.01)


def test_slower_is_higher() -> None:
    """In the chart of latencies, on a logarithmic scale."""
    points = {"p99": [(1.0, 1.0), (2.0, 10.0), (3.0, 100.0)]}
    drawn = ElementTree.fromstring(render_svg([LineChart("T", "x", "ms", points)]))
    heights = [float(item.attrib["cy"]) for item in drawn.findall(f".//{SVG}circle")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert heights[0] > heights[1]


def test_discovers_mediator_by_invitation_or_did() -> None:
    """By an out-of-band invitation or a DID; anything else is refused in a sentence."""
    mediator = WalletIdentity.generate(endpoint="http://127.0.0.1:1/didcomm")
    invitation = {"type": "https://didcomm.org/out-of-band/2.0/invitation", "from": mediator.did}
    packed = base64.urlsafe_b64encode(json.dumps(invitation).encode()).decode().rstrip("=")
    assert find_mediator(f"https://example.org/path?_oob={packed}").did == mediator.did
    assert find_mediator("https://example.org/", mediator.did).http_uri == "http://127.0.0.1:1/didcomm"
    with pytest.raises(RuntimeError, match="use --target-did to give its DID"):
        find_mediator("https://example.org/", "did:key:z6MkNonsense")


def test_assigns_cores() -> None:
    """Servers and clients get different cores if there are two; the affinity is restored."""
    before = os.sched_getaffinity(0)
    cores = assign_cores()
    assert cores.server | cores.clients == before
    assert cores.apart == (len(before) > 1)
    with pin_to_cores(cores.server):
        assert os.sched_getaffinity(0) == cores.server
    assert os.sched_getaffinity(0) == before


def test_fills_databases_with_copies(tmp_path: Path) -> None:
    """Whatever the columns, copies differ in names and numbers only, and messages go to all recipients in turn."""
    database = tmp_path / "database"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript(
            """
            CREATE TABLE account (
                id INTEGER PRIMARY KEY, did TEXT UNIQUE, did_key BLOB UNIQUE, recipients INTEGER, new_column TEXT
            );
            CREATE TABLE recipient (id INTEGER PRIMARY KEY, account_id INTEGER, did TEXT UNIQUE, registered INTEGER);
            CREATE TABLE message (
                seq INTEGER PRIMARY KEY, id TEXT UNIQUE, recipient_id INTEGER, account_id INTEGER,
                size INTEGER, received_at REAL, expires_at REAL, payload BLOB
            );
            CREATE TABLE queue (account_id INTEGER, recipient_id INTEGER, messages INTEGER, bytes INTEGER);
            CREATE TABLE ledger (protocol TEXT, accepted INTEGER);
            INSERT INTO ledger VALUES ('didcomm', 1), ('decentrl', 0);
            INSERT INTO message VALUES (1, '0123456789abcdef0123456789abcdef', 1, 1, 2, 5.0, 9.0, x'00ff');
            """
        )
        did = f"did:peer:2.{'x' * 90}"
        connection.execute("INSERT INTO account VALUES (1, ?, x'00', 1, 'kept')", [did])
        connection.execute("INSERT INTO recipient VALUES (1, 1, ?, 1)", [did])
    add_accounts(database, 9)
    add_messages(database, 30)
    expire_messages(database, 7)
    with closing(sqlite3.connect(database)) as connection:
        accounts = connection.execute("SELECT did, recipients, new_column FROM account").fetchall()
        assert len(accounts) == 10
        assert {(len(one), kept) for one, _, kept in accounts} == {(len(did), "kept")}
        joined = "SELECT count(*) FROM recipient JOIN account USING (did) WHERE account.id = account_id"
        assert connection.execute(joined).fetchone() == (10,)
        counts = connection.execute("SELECT count(*), account_id = recipient_id FROM message GROUP BY account_id")
        assert counts.fetchall() == [(4, 1), *[(3, 1)] * 9]
        queues = connection.execute(
            "SELECT messages, bytes, account_id = recipient_id FROM queue ORDER BY account_id"
        )
        assert queues.fetchall() == [(4, 8, 1), *[(3, 6, 1)] * 9]
        assert connection.execute("SELECT * FROM ledger").fetchall() == [("didcomm", 31), ("decentrl", 0)]
        assert connection.execute("SELECT count(*) FROM message WHERE expires_at = 5.0").fetchone() == (7,)
