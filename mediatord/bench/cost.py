"""What accounts and messages cost in the long run: space in the database and in the event log, and CPU."""

from __future__ import annotations

import gzip
import http.client
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from mediatord.bench.accounting import Accounting
from mediatord.bench.crowd import Crowd, forwards, gather, read_answer, request_of
from mediatord.bench.database import DATABASE, stored_rows
from mediatord.bench.drive import Server, post_so_many
from mediatord.bench.figures import Figures, Table, ratio, size_name
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, Plan
from mediatord.bench.processes import cpu_seconds
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE, Message
from mediatord.wallet.identity import Identity
from mediatord.wallet.mediation import read_delivery
from mediatord.wallet.throwaway import throw_away_daemon

_PICKUP = "https://didcomm.org/messagepickup/3.0"
_ACCOUNTS = 500
# Of what memory is watched over: pages are filled evenly long before that.
_SHARE = 10
_AT_ONCE = 10
_PAYLOAD, _DATABASE, _LOG, _PACKED, _CPU = "payload B", "database B", "log B", "gzipped log B", "us CPU"
_SETTINGS = {**DAEMON_SETTINGS, "MEDIATORD_LOG__ROTATE__COMPRESS": "false"}


def measure_cost(plan: Plan) -> Table:
    """For each account; for each message accepted, and for each fetched and acknowledged."""
    count = max(_ACCOUNTS, plan.messages // _SHARE)
    rows: dict[str, Figures] = {}
    with throw_away_daemon(_SETTINGS) as daemon, TemporaryDirectory(prefix="mediatord-bench-") as place:
        disk = _Disk(daemon.directory)
        before = disk.database_bytes()
        crowd = gather(daemon.url, _ACCOUNTS)
        rows["an account"] = {_DATABASE: (disk.database_bytes() - before) / _ACCOUNTS}
        server = Server.at(crowd.mediator.http_uri, daemon.pid)
        accounting = Accounting(server, lambda: stored_rows(daemon.directory / DATABASE))
        for size in plan.sizes:
            bodies = Path(place) / "bodies"
            write_bodies(bodies, forwards(crowd, size, max(DISTINCT_MESSAGES, _ACCOUNTS)))
            before = disk.database_bytes()
            disk.new_lines()
            load = post_so_many(server, bodies, plan.clients, count)
            accounting.check(load)
            rows[f"{size_name(size)}  accepted"] = {
                _PAYLOAD: disk.mean_payload(),
                _DATABASE: (disk.database_bytes() - before) / count,
                **disk.lines_of(count),
                _CPU: 1e6 * load.cpu_seconds / count,
            }
            begun = cpu_seconds(daemon.pid)
            fetched = _empty(crowd)
            spent = cpu_seconds(daemon.pid) - begun
            rows[f"{size_name(size)}  fetched"] = {**disk.lines_of(fetched), _CPU: 1e6 * ratio(spent, fetched)}
            # Pages that are free are used again, so the next size begins with none of this one's.
            accounting.accepted = accounting.stored = stored_rows(daemon.directory / DATABASE)
    length = sum(len(wallet.did) for wallet in crowd.wallets) // _ACCOUNTS
    notes = (
        f"{count} messages of each size for {_ACCOUNTS} accounts with a recipient DID each, "
        f"fetched {_AT_ONCE} at a time.",
        f"The database is SQLite's, all its indexes included; DIDs are did:peer:2 of {length} characters.",
    )
    columns = (_PAYLOAD, _DATABASE, _LOG, _PACKED, _CPU)
    return Table("Cost of a message", columns, rows, notes=notes, failures=tuple(accounting.failures))


class _Disk:
    """What a daemon has written below its directory."""

    def __init__(self, directory: Path) -> None:
        self._database = directory / DATABASE
        self._log = directory / "log"
        self._read = 0

    def database_bytes(self) -> int:
        """Pages in use, whether they are in the database yet or in its write-ahead log."""
        pages, free, size = (self._ask(f"PRAGMA {name}") for name in ("page_count", "freelist_count", "page_size"))
        return int((pages - free) * size)

    def mean_payload(self) -> float:
        """Bytes of those that wait."""
        return self._ask("SELECT avg(size) FROM message")

    def new_lines(self) -> bytes:
        """Of the event log, since it was asked last."""
        text = b"".join(path.read_bytes() for path in sorted(self._log.glob("*.jsonl"), key=_age))
        lines, self._read = text[self._read :], len(text)
        return lines

    def lines_of(self, count: int) -> Figures:
        """What so many messages have added."""
        lines = self.new_lines()
        return {_LOG: ratio(len(lines), count), _PACKED: ratio(len(gzip.compress(lines)), count)}

    def _ask(self, question: str) -> float:
        with closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)) as connection:
            (answer,) = connection.execute(question).fetchone()
            return float(answer)


def _age(path: Path) -> tuple[bool, str]:
    """Closed segments by their names, the open one last."""
    return path.name == "events.jsonl", path.name


def _empty(crowd: Crowd) -> int:
    """Fetch and acknowledge all that waits; how many that were."""
    target = urlsplit(crowd.mediator.http_uri)
    with closing(http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)) as connection:

        def ask(wallet: Identity, name: str, body: dict[str, object]) -> Message:
            packed = request_of(wallet, crowd.mediator, f"{_PICKUP}/{name}", body)
            connection.request("POST", target.path, packed, {"Content-Type": ENCRYPTED_TYPE})
            return read_answer(connection.getresponse().read(), wallet)

        fetched = 0
        for wallet in crowd.wallets:
            while True:
                answer = ask(wallet, "delivery-request", {"limit": _AT_ONCE})
                if not answer.type.uri.endswith("/delivery"):
                    break
                ids = [one.id for one in read_delivery(answer)]
                ask(wallet, "messages-received", {"message_id_list": ids})
                fetched += len(ids)
    return fetched
