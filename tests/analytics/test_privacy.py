"""What tables say about single DIDs."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from functools import reduce
from pathlib import Path
from random import Random
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from analytics.errors import AnalyticsError
from analytics.job import Job, Span
from analytics.jobs.latency_and_cost import COST_JOB
from analytics.jobs.node_comparison import NODES_JOB
from analytics.jobs.refusals import ERRORS_JOB, LIMITS_JOB, REPLAY_JOB
from analytics.jobs.senders_and_recipients import RECIPIENTS_JOB, RETENTION_JOB, TALKERS_JOB
from analytics.jobs.traffic_and_queues import QUEUES_JOB
from analytics.privacy import FORGOTTEN_PSEUDONYM, PseudonymKeyFile, pseudonymize_table
from analytics.schema import TABLES
from analytics.settings import Settings
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey
from tests.analytics.frames import at, brief, day, event, events, rows, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DID = "did:example:alice"
EPOCH_DAYS = 90
KEYED = "0123456789abcdef" * 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a key file that is not there, in a directory that is not there."""
    return tmp_path / "state" / "pseudonyms.json"


def test_names_of_an_epoch(path: Path) -> None:
    """The days of an epoch agree, also in another run; pseudonyms are what the daemon would make with this key."""
    names = PseudonymKeyFile(path, EPOCH_DAYS)
    name = names.make_pseudonym_function(day(0))(DID)
    (epoch,) = names.list_epochs()
    assert epoch.secret is not None
    assert name == Pseudonymizer("keyed", PseudonymKey(epoch.number, epoch.secret)).did(DID)
    assert epoch.last - epoch.first == timedelta(EPOCH_DAYS - 1)
    again = PseudonymKeyFile(path, EPOCH_DAYS)
    assert [again.make_pseudonym_function(on)(DID) for on in (epoch.first, epoch.last)] == [name, name]
    others = {
        again.make_pseudonym_function(on)(DID) for on in (epoch.first - timedelta(1), epoch.last + timedelta(1))
    }
    assert len(others | {name}) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert epoch.secret.hex() not in repr(epoch) + str(names.list_epochs())


def test_what_stays_as_it_is(path: Path) -> None:
    """Pseudonyms of the daemon are not made again, nor is what stands for nobody; all that looks similar is."""
    name = PseudonymKeyFile(path, EPOCH_DAYS).make_pseudonym_function(day(0))
    assert [name(KEYED), name("unknown")] == [KEYED, "unknown"]
    for identifier in (KEYED.upper(), KEYED + "0", KEYED + "\n", f"did:x:{KEYED}", "did:x:\udcff", ""):
        assert len(name(identifier)) == 32
        assert name(identifier) != identifier


def test_epochs_in_any_order(path: Path) -> None:
    """Whatever the order of days and the changes of the setting, a day has one epoch, and keeps it."""
    random = Random(3)
    first: dict[date, str] = {}
    for _ in range(120):
        on = day(random.randrange(-400, 400))
        name = PseudonymKeyFile(path, random.choice((1, 7, 30, 90))).make_pseudonym_function(on)(DID)
        assert first.setdefault(on, name) == name
    epochs = PseudonymKeyFile(path, EPOCH_DAYS).list_epochs()
    assert all(one.first <= one.last < other.first for one, other in zip(epochs, epochs[1:], strict=False))
    assert len({epoch.number for epoch in epochs}) == len(epochs) == len({epoch.secret for epoch in epochs})


def test_forgetting(path: Path) -> None:
    """The secret is gone from the file and from where it stood; other epochs and the directory stay as they were."""
    names = PseudonymKeyFile(path, EPOCH_DAYS)
    names.make_pseudonym_function(day(0))
    other = names.make_pseudonym_function(day(EPOCH_DAYS))(DID)
    epoch = next(epoch for epoch in names.list_epochs() if epoch.first <= day(0) <= epoch.last)
    assert epoch.secret is not None
    there = set(path.parent.iterdir())
    with path.open("rb") as old:
        names.destroy_key(epoch.number)
        assert not old.read().strip(b"\0")
    assert epoch.secret.hex() not in path.read_text()
    assert set(path.parent.iterdir()) == there
    again = PseudonymKeyFile(path, EPOCH_DAYS)
    assert [again.make_pseudonym_function(day(0))(identifier) for identifier in (DID, "did:x:b", KEYED)] == [
        FORGOTTEN_PSEUDONYM,
        FORGOTTEN_PSEUDONYM,
        KEYED,
    ]
    assert again.make_pseudonym_function(day(EPOCH_DAYS))(DID) == other
    again.destroy_key(epoch.number)
    assert again.make_pseudonym_function(epoch.last)(DID) == FORGOTTEN_PSEUDONYM
    with pytest.raises(AnalyticsError, match="no key epoch 9"):
        again.destroy_key(9)


def test_runs_at_the_same_time(path: Path) -> None:
    """Of several that find no file, or no epoch for their day, all use the same in the end."""
    together = Barrier(8)

    def run(number: int) -> list[str]:
        names = PseudonymKeyFile(path, 30)
        together.wait()
        return [names.make_pseudonym_function(day(30 * epoch))(DID) for epoch in range(6)]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(run, range(8)))
    assert all(names == found[0] for names in found)
    assert len(PseudonymKeyFile(path, 30).list_epochs()) == 6


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"epochs": 3}', b'{"epochs": [{"epoch": 1, "first_day": "x", "last_day": "y", "secret": null}]}'],
)
def test_damaged_file(path: Path, content: bytes) -> None:
    """A file that is something else is refused in one line, and left alone."""
    path.parent.mkdir()
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(AnalyticsError, match="is not a file of pseudonym keys"):
        PseudonymKeyFile(path, EPOCH_DAYS).make_pseudonym_function(day(0))
    assert path.read_bytes() == content


def test_short_secret_and_open_file(path: Path) -> None:
    """Neither a key that could be guessed nor one that others can read is used."""
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


def test_no_place_for_the_file(tmp_path: Path) -> None:
    """A directory that cannot be made is one line."""
    (tmp_path / "file").touch()
    with pytest.raises(AnalyticsError, match="is not writable: Not a directory"):
        PseudonymKeyFile(tmp_path / "file" / "state" / "keys", EPOCH_DAYS).make_pseudonym_function(day(0))


def test_too_few_individuals(spark: SparkSession, path: Path) -> None:
    """
    A day with fewer than k has one row with their sums; the other days are as they are, ranked as they were.

    No plan shows an identifier.
    """
    worst = {"codes": 2, "worst": "not-found"}
    frame = table(
        spark,
        "error_senders",
        {"rank": 2, "sender": "did:x:b", "n": 3, **worst},
        {"rank": 1, "sender": "did:x:a", "n": 4, **worst},
        *({"dt": day(1), "rank": 3 - n, "sender": f"did:x:{n}", "n": n, **worst} for n in range(3)),
    )
    names = PseudonymKeyFile(path, EPOCH_DAYS)
    shown = _disclosed("error_senders", frame, names, k=3)
    name = names.make_pseudonym_function(day(1))
    assert brief(rows("error_senders", shown), "dt", "rank", "sender", "n", "codes", "worst") == [
        (day(0), 1, "fewer than 3", 7, None, "not-found"),
        *((day(1), rank, name(f"did:x:{3 - rank}"), 3 - rank, 2, "not-found") for rank in (1, 2, 3)),
    ]
    assert "did:x" not in shown._jdf.queryExecution().toString()
    everything = rows("error_senders", _disclosed("error_senders", frame, names, k=1))
    assert [row["sender"] for row in everything[:2]] == [
        names.make_pseudonym_function(day(0))(f"did:x:{letter}") for letter in "ab"
    ]
    none = _disclosed("error_senders", table(spark, "error_senders"), names, k=3)
    assert rows("error_senders", none) == []


def test_one_party_many_times(spark: SparkSession, path: Path) -> None:
    """
    Individuals count, not rows; what differs among those merged is null, days to a loss are the first's. What is not
    known of any of them is no number.
    """
    names = PseudonymKeyFile(path, EPOCH_DAYS)
    hits = [{"rank": rank, "who": "did:x:a", "limit": f"l{rank}", "hits": 5, "bursts": 2} for rank in (1, 2, 3)]
    merged = rows("limits_top", _disclosed("limits_top", table(spark, "limits_top", *hits), names, k=3))
    assert brief(merged, "rank", "who", "limit", "hits", "bursts") == [(1, "fewer than 3", None, 15, 6)]
    risk = [
        {"rank": rank, "rcpt": f"did:x:{rank}", "at_risk": 1, "waiting": 2, "per_day": 0.5}
        | {"bytes": 3, "days_to_cap": days}
        for rank, days in ((1, 4.5), (2, None), (3, 1.5))
    ]
    (row,) = rows("queue_risk", _disclosed("queue_risk", table(spark, "queue_risk", *risk), names, k=4))
    assert row == {
        "dt": day(0), "rank": 1, "rcpt": "fewer than 4", "at_risk": 3, "waiting": 6, "bytes": 9, "per_day": 1.5,
        "days_to_cap": 1.5, "days_to_ttl": None,
    }  # fmt: skip
    first_day = [one | {"per_day": None} for one in risk]
    (row,) = rows("queue_risk", _disclosed("queue_risk", table(spark, "queue_risk", *first_day), names, k=4))
    assert (row["waiting"], row["per_day"]) == (6, None)


def test_too_few_partners(spark: SparkSession, path: Path) -> None:
    """Who talks to fewer than k is one of `others`, the last row, whatever their rank was; k of 1 shows everybody."""
    partners = {1: 2, 2: 3, 3: 9, 4: 1, 5: 0}
    frame = table(
        spark,
        "top_senders",
        *(
            {"rank": rank, "sender": f"did:x:{rank}", "n": 10 - rank, "bytes": rank, "partners": count}
            for rank, count in partners.items()
        ),
    )
    names = PseudonymKeyFile(path, EPOCH_DAYS)
    name = names.make_pseudonym_function(day(0))
    shown = rows("top_senders", _disclosed("top_senders", frame, names, k=3))
    assert brief(shown, "rank", "sender", "n", "bytes", "partners") == [
        (1, name("did:x:2"), 8, 2, 3),
        (2, name("did:x:3"), 7, 3, 9),
        (3, "others", 20, 10, None),
    ]
    everybody = rows("top_senders", _disclosed("top_senders", frame, names, k=1))
    assert [row["sender"] for row in everybody] == [name(f"did:x:{rank}") for rank in partners]


def test_no_identifier_in_any_table(spark: SparkSession, path: Path) -> None:
    """Logs with plain DIDs, and the least privacy that can be set: no table but private ones holds one."""
    span = Span(day(0), day(0))
    log = events(spark, *(line for number in range(6) for line in _plain(number)))
    frames = {name: table(spark, name) for name in TABLES} | {
        "events": log,
        "open": table(
            spark, "open", {"msg": DID, "rcpt": DID, "node": "a", "accepted_at": at(), "size": 1, "ttl_s": 9}
        ),
        "sockets_daily": table(spark, "sockets_daily", {"node": "a", "opened": 1}),
    }
    names, shown = PseudonymKeyFile(path, EPOCH_DAYS), []
    for job in _JOBS:
        for name, frame in job.transform(frames, Settings(k_anonymity=1), span).items():
            if TABLES[name].private:
                frames[name] = frame
            else:
                as_text = F.to_json(F.struct("*")).alias("row")
                shown.append(_disclosed(name, frame, names, k=1).select(F.lit(name).alias("table"), as_text))
    found = reduce(DataFrame.union, shown).collect()
    assert {row["table"] for row in found} == {
        name for job in _JOBS for name in job.writes if not TABLES[name].private
    }
    assert [row for row in found if "did:" in row["row"]] == []
    pseudonym = re.compile('"[0-9a-f]{32}"')
    assert sum(len(pseudonym.findall(row["row"])) for row in found) == 6 * 4 + 1


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


def _plain(number: int) -> list[Mapping[str, Any]]:
    """Lines with a DID wherever there may be one."""
    did = f"{DID}{number}"
    named: dict[str, Any] = dict.fromkeys(("sender", "rcpt", "who", "did", "msg", "req", "conn", "peer"), did)
    return [
        event("req.done", proto="didcomm", mtype="forward", status=400, code="x", dur_ms=1.0, size=1, **named),
        *(event(name, size=1, **named) for name in ("msg.accept", "msg.ack", "gauge")),
        event("limit.hit", limit="sends", **named),
        event("replay.drop", code="x", age_ms=1, **named),
    ]


def _disclosed(name: str, frame: DataFrame, names: PseudonymKeyFile, *, k: int) -> DataFrame:
    return pseudonymize_table(TABLES[name], frame, Settings(k_anonymity=k), names)
