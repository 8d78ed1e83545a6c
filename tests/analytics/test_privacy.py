"""Pseudonyms and k-anonymity of published tables."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from pathlib import Path
from random import Random
from threading import Barrier
from typing import Any

import pytest

from analytics.errors import AnalyticsError
from analytics.job import Job, Span
from analytics.jobs.node_comparison import NODES_JOB
from analytics.jobs.refusals import ERRORS_JOB, LIMITS_JOB, REPLAY_JOB
from analytics.jobs.senders_and_recipients import RECIPIENTS_JOB, RETENTION_JOB, TALKERS_JOB
from analytics.jobs.traffic_and_latency import COST_JOB, QUEUES_JOB
from analytics.privacy import FORGOTTEN_PSEUDONYM, PseudonymKeyFile, pseudonymize_table
from analytics.schema import TABLES
from analytics.settings import Settings
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey
from tests.analytics.job_tables import DAY, at, day, event, run_job, select_columns

DID = "did:example:alice"
EPOCH_DAYS = 90
KEYED = "0123456789abcdef" * 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of a missing key file in a missing directory."""
    return tmp_path / "state" / "pseudonyms.json"


def test_pseudonyms_are_stable_within_epoch(path: Path) -> None:
    """Also in another run; they equal those that the daemon would compute with the key."""
    key_file = PseudonymKeyFile(path, EPOCH_DAYS)
    pseudonym = key_file.make_pseudonym_function(day(0))(DID)
    (epoch,) = key_file.list_epochs()
    assert epoch.secret is not None
    assert pseudonym == Pseudonymizer("keyed", PseudonymKey(epoch.number, epoch.secret)).did(DID)
    assert epoch.last - epoch.first == timedelta(EPOCH_DAYS - 1)
    reopened = PseudonymKeyFile(path, EPOCH_DAYS)
    assert [reopened.make_pseudonym_function(on_day)(DID) for on_day in (epoch.first, epoch.last)] == [
        pseudonym,
        pseudonym,
    ]
    others = {
        reopened.make_pseudonym_function(on_day)(DID)
        for on_day in (epoch.first - timedelta(1), epoch.last + timedelta(1))
    }
    assert len(others | {pseudonym}) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert epoch.secret.hex() not in repr(epoch) + str(key_file.list_epochs())


def test_keeps_existing_pseudonyms(path: Path) -> None:
    """And placeholders; similar identifiers are replaced."""
    pseudonym = PseudonymKeyFile(path, EPOCH_DAYS).make_pseudonym_function(day(0))
    assert [pseudonym(KEYED), pseudonym("unknown")] == [KEYED, "unknown"]
    for identifier in (KEYED.upper(), KEYED + "0", KEYED + "\n", f"did:x:{KEYED}", "did:x:\udcff", ""):
        assert len(pseudonym(identifier)) == 32
        assert pseudonym(identifier) != identifier


def test_each_day_keeps_its_epoch(path: Path) -> None:
    """Whatever the order of days and changes of the setting."""
    random = Random(3)
    first: dict[date, str] = {}
    for _ in range(120):
        on_day = day(random.randrange(-400, 400))
        pseudonym = PseudonymKeyFile(path, random.choice((1, 7, 30, 90))).make_pseudonym_function(on_day)(DID)
        assert first.setdefault(on_day, pseudonym) == pseudonym
    epochs = PseudonymKeyFile(path, EPOCH_DAYS).list_epochs()
    assert all(epoch.first <= epoch.last < other.first for epoch, other in zip(epochs, epochs[1:], strict=False))
    assert len({epoch.number for epoch in epochs}) == len(epochs) == len({epoch.secret for epoch in epochs})


def test_destroys_key_of_epoch(path: Path) -> None:
    """The secret is overwritten; other epochs and files stay."""
    key_file = PseudonymKeyFile(path, EPOCH_DAYS)
    key_file.make_pseudonym_function(day(0))
    other = key_file.make_pseudonym_function(day(EPOCH_DAYS))(DID)
    epoch = next(epoch for epoch in key_file.list_epochs() if epoch.first <= day(0) <= epoch.last)
    assert epoch.secret is not None
    files_before = set(path.parent.iterdir())
    with path.open("rb") as old:
        key_file.destroy_key(epoch.number)
        assert not old.read().strip(b"\0")
    assert epoch.secret.hex() not in path.read_text()
    assert set(path.parent.iterdir()) == files_before
    reopened = PseudonymKeyFile(path, EPOCH_DAYS)
    assert [reopened.make_pseudonym_function(day(0))(identifier) for identifier in (DID, "did:x:b", KEYED)] == [
        FORGOTTEN_PSEUDONYM,
        FORGOTTEN_PSEUDONYM,
        KEYED,
    ]
    assert reopened.make_pseudonym_function(day(EPOCH_DAYS))(DID) == other
    reopened.destroy_key(epoch.number)
    assert reopened.make_pseudonym_function(epoch.last)(DID) == FORGOTTEN_PSEUDONYM
    with pytest.raises(AnalyticsError, match="no key epoch 9"):
        reopened.destroy_key(9)


def test_concurrent_runs_agree_on_keys(path: Path) -> None:
    """Of several runs that find no file or no epoch, all use the same keys in the end."""
    barrier = Barrier(8)

    def run(number: int) -> list[str]:
        key_file = PseudonymKeyFile(path, 30)
        barrier.wait()
        return [key_file.make_pseudonym_function(day(30 * epoch))(DID) for epoch in range(6)]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(run, range(8)))
    assert all(key_file == found[0] for key_file in found)
    assert len(PseudonymKeyFile(path, 30).list_epochs()) == 6


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"epochs": 3}', b'{"epochs": [{"epoch": 1, "first_day": "x", "last_day": "y", "secret": null}]}'],
)
def test_rejects_damaged_key_file(path: Path, content: bytes) -> None:
    """In one line; the file is not changed."""
    path.parent.mkdir()
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(AnalyticsError, match="is not a file of pseudonym keys"):
        PseudonymKeyFile(path, EPOCH_DAYS).make_pseudonym_function(day(0))
    assert path.read_bytes() == content


def test_rejects_short_secret_and_accessible_file(path: Path) -> None:
    PseudonymKeyFile(path, EPOCH_DAYS).make_pseudonym_function(day(0))
    path.chmod(0o640)
    with pytest.raises(AnalyticsError, match="accessible to other users"):
        PseudonymKeyFile(path, EPOCH_DAYS).make_pseudonym_function(day(0))
    path.chmod(0o600)
    content = json.loads(path.read_text())
    content["epochs"][0]["secret"] = "00" * 8
    path.write_text(json.dumps(content))
    with pytest.raises(AnalyticsError, match="is not a file of pseudonym keys"):
        PseudonymKeyFile(path, EPOCH_DAYS).make_pseudonym_function(day(0))


def test_unwritable_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AnalyticsError, match="is not writable: Not a directory"):
        PseudonymKeyFile(tmp_path / "file" / "state" / "keys", EPOCH_DAYS).make_pseudonym_function(day(0))


def test_merges_fewer_than_k_individuals(path: Path) -> None:
    """Such a day has one row with the sums; other days and their ranks stay."""
    worst = {"codes": 2, "worst": "not-found"}
    rows = [
        {"dt": day(0), "rank": 2, "sender": "did:x:b", "n": 3, **worst},
        {"dt": day(0), "rank": 1, "sender": "did:x:a", "n": 4, **worst},
        *({"dt": day(1), "rank": 3 - n, "sender": f"did:x:{n}", "n": n, **worst} for n in range(3)),
    ]
    key_file = PseudonymKeyFile(path, EPOCH_DAYS)
    published = _pseudonymize("error_senders", rows, key_file, k=3)
    pseudonym = key_file.make_pseudonym_function(day(1))
    assert select_columns(published, "dt", "rank", "sender", "n", "codes", "worst") == [
        (day(0), 1, "fewer than 3", 7, None, "not-found"),
        *((day(1), rank, pseudonym(f"did:x:{3 - rank}"), 3 - rank, 2, "not-found") for rank in (1, 2, 3)),
    ]
    unmerged = _pseudonymize("error_senders", rows, key_file, k=1)
    assert [row["sender"] for row in unmerged[:2]] == [
        key_file.make_pseudonym_function(day(0))(f"did:x:{letter}") for letter in "ab"
    ]
    assert _pseudonymize("error_senders", [], key_file, k=3) == []


def test_counts_individuals_not_rows(path: Path) -> None:
    """
    Columns that differ between merged rows are null; days to a loss are those of the first row. Unknown values stay
    null.
    """
    key_file = PseudonymKeyFile(path, EPOCH_DAYS)
    hits = [{"rank": rank, "who": "did:x:a", "limit": f"l{rank}", "hits": 5, "bursts": 2} for rank in (1, 2, 3)]
    merged = _pseudonymize("limits_top", hits, key_file, k=3)
    assert select_columns(merged, "rank", "who", "limit", "hits", "bursts") == [(1, "fewer than 3", None, 15, 6)]
    risk = [
        {"rank": rank, "rcpt": f"did:x:{rank}", "at_risk": 1, "waiting": 2, "per_day": 0.5}
        | {"bytes": 3, "days_to_cap": days, "days_to_ttl": None}
        for rank, days in ((1, 4.5), (2, None), (3, 1.5))
    ]
    (row,) = _pseudonymize("queue_risk", risk, key_file, k=4)
    assert row == {
        "dt": day(0), "rank": 1, "rcpt": "fewer than 4", "at_risk": 3, "waiting": 6, "bytes": 9, "per_day": 1.5,
        "days_to_cap": 1.5, "days_to_ttl": None,
    }  # fmt: skip
    first_day = [epoch | {"per_day": None} for epoch in risk]
    (row,) = _pseudonymize("queue_risk", first_day, key_file, k=4)
    assert (row["waiting"], row["per_day"]) == (6, None)


def test_merges_individuals_with_few_partners(path: Path) -> None:
    """Individuals with fewer than k partners become the last row, `others`; with k = 1 all are shown."""
    partners = {1: 2, 2: 3, 3: 9, 4: 1, 5: 0}
    rows = [
        {"rank": rank, "sender": f"did:x:{rank}", "n": 10 - rank, "bytes": rank, "partners": count}
        for rank, count in partners.items()
    ]
    key_file = PseudonymKeyFile(path, EPOCH_DAYS)
    pseudonym = key_file.make_pseudonym_function(day(0))
    published = _pseudonymize("top_senders", rows, key_file, k=3)
    assert select_columns(published, "rank", "sender", "n", "bytes", "partners") == [
        (1, pseudonym("did:x:2"), 8, 2, 3),
        (2, pseudonym("did:x:3"), 7, 3, 9),
        (3, "others", 20, 10, None),
    ]
    unmerged = _pseudonymize("top_senders", rows, key_file, k=1)
    assert [row["sender"] for row in unmerged] == [pseudonym(f"did:x:{rank}") for rank in partners]


def test_published_tables_contain_no_identifier(path: Path) -> None:
    """With plain DIDs in the logs and k = 1; only private tables contain them."""
    log = [line for number in range(6) for line in _make_events_with_did(number)]
    waiting = {"msg": DID, "rcpt": DID, "node": "a", "accepted_at": at(), "size": 1, "ttl_s": 9}
    tables: dict[str, list[dict[str, Any]]] = {"open": [waiting], "sockets_daily": [{"node": "a", "opened": 1}]}
    key_file, published = PseudonymKeyFile(path, EPOCH_DAYS), {}
    for job in _JOBS:
        for name, rows in run_job(job, Span(day(0), day(0)), log, Settings(k_anonymity=1), tables).items():
            if TABLES[name].private:
                tables[name] = rows
            else:
                published[name] = [str(row) for row in _pseudonymize(name, rows, key_file, k=1)]
    assert published.keys() == {name for job in _JOBS for name in job.writes if not TABLES[name].private}
    found = [row for rows in published.values() for row in rows]
    assert [row for row in found if "did:" in row] == []
    assert sum(len(re.findall("'[0-9a-f]{32}'", row)) for row in found) == 6 * 4 + 1


_JOBS: tuple[Job, ...] = (
    QUEUES_JOB,
    ERRORS_JOB,
    LIMITS_JOB,
    REPLAY_JOB,
    TALKERS_JOB,
    RECIPIENTS_JOB,
    RETENTION_JOB,
    NODES_JOB,
    COST_JOB,
)


def _make_events_with_did(number: int) -> list[dict[str, Any]]:
    """Events with a DID in every field that can hold one."""
    did = f"{DID}{number}"
    identifiers: dict[str, Any] = dict.fromkeys(("sender", "rcpt", "who", "did", "msg", "req", "conn", "peer"), did)
    return [
        event("req.done", proto="didcomm", mtype="forward", status=400, code="x", dur_ms=1.0, size=1, **identifiers),
        *(event(name, size=1, **identifiers) for name in ("msg.accept", "msg.ack", "gauge")),
        event("limit.hit", limit="sends", **identifiers),
        event("replay.drop", code="x", age_ms=1, **identifiers),
    ]


def _pseudonymize(
    name: str, rows: Iterable[dict[str, Any]], key_file: PseudonymKeyFile, *, k: int
) -> list[dict[str, Any]]:
    """:param rows: the default day is :data:`DAY`."""
    return pseudonymize_table(TABLES[name], [{"dt": DAY, **row} for row in rows], Settings(k_anonymity=k), key_file)
