"""Faults of a daemon under load. When a fault is over, everything runs again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from tests.integration.message_load import PATIENCE_SECONDS
from tests.integration.retrying_clients import ReconnectingRecipient
from tests.torture.black_hole_proxy import parse_pushes
from tests.torture.daemon_fixture import DaemonFixture, MessageLoad, StoreName
from tests.torture.disk_trace import DiskState
from tests.torture.faulty_disk import DiskMode

# Longer than the daemon takes for one message.
WHOLE_MESSAGE_SECONDS = 0.05
# Largest clock step in seconds.
LARGEST_STEP = 600.0
_POLL_SECONDS = 0.05
# Free bytes before the disk becomes full, and at most afterwards.
_FREE_BEFORE_BYTES, _SPARE_BYTES = 8 << 20, 1 << 14
# Mark of a round whose file system was full. The daemon refuses nothing while its files have room for the messages:
# it writes the write-ahead log from its start again, and acknowledged messages leave free pages.
FULL_FILE_SYSTEM = "the file system is full"


@dataclass(slots=True)
class FaultContext:
    """
    A load during which a fault is injected.

    :param chance: source of random choices.
    :param load: the running load.
    :param recipients: the running recipients, stopped at the end.
    :ivar marks: observations for the summary.
    """

    fixture: DaemonFixture
    chance: random.Random
    load: MessageLoad
    recipients: list[ReconnectingRecipient]
    marks: list[str] = field(default_factory=list)

    async def wait_for_random_moment(self, most: float = 0.4) -> None:
        """
        A random moment in the processing of a message. :param most: share of messages that may be sent before it.
        """
        await deferToThread(
            self.load.senders.wait_for_answers, self.chance.randrange(int(most * self.load.message_count))
        )
        await self.pause(0, WHOLE_MESSAGE_SECONDS)

    async def pause(self, least: float, most: float) -> None:
        """Wait for a random number of seconds."""
        await deferLater(self.fixture.reactor, self.chance.uniform(least, most))


async def kill_daemon(context: FaultContext) -> None:
    """SIGKILL, then restart."""
    daemon = context.fixture.daemon
    await context.wait_for_random_moment()
    await deferToThread(daemon.kill)
    await deferToThread(daemon.start)


async def trace_disk(fixture: DaemonFixture) -> None:
    """Record writes and syncs from now on."""
    await deferToThread(fixture.daemon.stop)
    fixture.daemon.start_trace()
    await deferToThread(fixture.daemon.start)


async def cut_power(context: FaultContext) -> None:
    """Kill the daemon and drop unsynced writes; sometimes after a kill shortly before."""
    if context.chance.random() < 0.3:
        await kill_daemon(context)
    daemon = context.fixture.daemon
    await context.wait_for_random_moment()
    await deferToThread(daemon.kill)
    # A disk that ignores syncs keeps none of those writes.
    kept = context.chance.choice((0.0, 0.3, 0.7, 1.0)) if daemon.syncs else 0.0
    disk = DiskState(daemon.base, daemon.trace, context.chance, kept)
    unsynced = await deferToThread(disk.replace, daemon.directory)
    context.marks.append(f"{unsynced} writes not synced")
    daemon.stop_trace()
    await deferToThread(daemon.start)


async def kill_servers(context: FaultContext) -> None:
    """Kill all MongoDB servers at once; they recover from their journals."""
    servers = _servers(context)
    members = range(len(servers.members))
    await context.wait_for_random_moment()
    for member in members:
        servers.members[member].send_kill()
    for member in members:
        await deferToThread(servers.kill, member)
    await context.pause(0, 1)
    for member in members:
        await deferToThread(servers.start, member)


async def fill_disk(context: FaultContext) -> None:
    """Fill the file system, or make SQLite believe it is full."""
    if context.fixture.small and context.chance.random() < 0.5:
        context.marks.append(FULL_FILE_SYSTEM)
        with _DiskFiller(context.fixture.daemon.directory) as filler:
            # Fill most of it beforehand, so that little time is needed later.
            await deferToThread(filler.fill, _FREE_BEFORE_BYTES)
            await context.wait_for_random_moment(0.1)  # later messages must exceed the free space
            await deferToThread(_fill_completely, filler, context)
            await _wait_for_refusals(context)
    else:
        await context.wait_for_random_moment()
        await _set_disk_mode(context, DiskMode.FULL)


async def fail_writes(context: FaultContext) -> None:
    """Make writes fail with EROFS or EIO."""
    await context.wait_for_random_moment()
    await _set_disk_mode(context, context.chance.choice((DiskMode.READ_ONLY, DiskMode.BROKEN)))


async def lock_database(context: FaultContext) -> None:
    """Hold the database lock, for less or longer than writes wait."""
    await context.wait_for_random_moment()
    database = context.fixture.daemon.database
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=PATIENCE_SECONDS)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        await context.pause(0.2, 4)
        connection.execute("ROLLBACK")


async def stop_primary(context: FaultContext) -> None:
    """Suspend the primary, or kill and restart it."""
    servers = _servers(context)
    await context.wait_for_random_moment()
    primary = await deferToThread(servers.primary)
    if context.chance.random() < 0.5:
        await deferToThread(servers.freeze, primary)
        try:
            await context.pause(0.2, 5)
        finally:
            servers.thaw(primary)
    else:
        await deferToThread(servers.kill, primary)
        await context.pause(0, 3)
        await deferToThread(servers.start, primary)


async def step_down_primary(context: FaultContext) -> None:
    """Make the primary step down."""
    await context.wait_for_random_moment()
    await deferToThread(_servers(context).step_down)


async def step_clock(context: FaultContext) -> None:
    """Step the host's clock, and correct it, both while messages arrive."""
    await context.wait_for_random_moment(0.2)
    ahead = context.chance.choice((-1, 1)) * context.chance.uniform(30, LARGEST_STEP)
    context.marks.append(f"set by {ahead:.0f} s")
    await _set_clock(context, ahead)
    await context.wait_for_random_moment(0.2)
    await _set_clock(context, 0.0)


async def break_connections(context: FaultContext) -> None:
    """
    Make the wallets' sockets half open, in both directions or in one. The wallets connect again and get the messages
    under the same ids.
    """
    fixture = context.fixture
    await context.wait_for_random_moment()
    with fixture.relay.black_hole(fixture.daemon.port, one_way=context.chance.random() < 0.5):
        await context.wait_for_random_moment(0.2)
        new_recipients = fixture.make_recipients(context.load.ledger)
        for recipient in new_recipients:
            recipient.start()
        context.recipients += new_recipients
        await deferToThread(context.load.senders.join)
        await _wait_until_drained(context)
    pushed = [push for data in fixture.relay.swallowed for push in parse_pushes(data, fixture.wallets)]
    for wallet, delivered in pushed:
        context.load.ledger.record_unread_push(wallet, delivered)
    context.marks.append(f"{len(pushed)} pushes swallowed")


async def restart_daemon(context: FaultContext) -> None:
    """SIGTERM, then restart."""
    daemon = context.fixture.daemon
    await context.wait_for_random_moment()
    await deferToThread(daemon.stop)
    await deferToThread(daemon.start)


async def reload_daemon(context: FaultContext) -> None:
    """SIGHUP several times: reload the configuration and rotate the log."""
    for _ in range(context.chance.randrange(1, 4)):
        await context.wait_for_random_moment(0.2)
        os.kill(context.fixture.daemon.pid, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class FaultKind:
    """
    One kind of fault.

    :param inject: injects it, and returns when it is over.
    :param prepare: called before the load starts.
    :param relayed: whether the wallets connect through the proxy.
    :param refuses: whether messages may be refused meanwhile; half of them are sent only then.
    """

    inject: Callable[[FaultContext], Awaitable[None]]
    prepare: Callable[[DaemonFixture], Awaitable[None]] | None = None
    relayed: bool = False
    refuses: bool = False


_EVERYWHERE = {
    "clock": FaultKind(step_clock),
    "halfopen": FaultKind(break_connections, relayed=True),
    "reload": FaultKind(reload_daemon),
}
_DURABLE = {"kill9": FaultKind(kill_daemon), "term": FaultKind(restart_daemon)}
KINDS: dict[StoreName, dict[str, FaultKind]] = {
    "sqlite": {
        **_EVERYWHERE,
        **_DURABLE,
        "powercut": FaultKind(cut_power, trace_disk),
        "diskfull": FaultKind(fill_disk, refuses=True),
        "readonly": FaultKind(fail_writes, refuses=True),
        "stopped": FaultKind(lock_database),
    },
    "mongodb": {
        **_EVERYWHERE,
        **_DURABLE,
        "powercut": FaultKind(kill_servers),
        "stopped": FaultKind(stop_primary),
        "stepdown": FaultKind(step_down_primary),
    },
    "memory": dict(_EVERYWHERE),
}


async def _set_disk_mode(context: FaultContext, mode: DiskMode) -> None:
    disk_control = context.fixture.daemon.disk_control
    disk_control.mode = mode
    try:
        await _wait_for_refusals(context)
    finally:
        disk_control.mode = DiskMode.WELL


async def _wait_for_refusals(context: FaultContext) -> None:
    context.load.senders.send_held()
    await deferToThread(context.load.senders.wait_for_refused, context.chance.randrange(1, 25))


class _DiskFiller:
    """A file that fills a file system until it is closed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "filler"
        self._file = open(self._path, "wb", buffering=0)

    def fill(self, spare: int) -> None:
        """Use all space. :param spare: bytes to leave free."""
        with contextlib.suppress(OSError):
            while True:
                self._file.write(bytes(1 << 20))
        self._file.seek(max(0, self._file.tell() - spare))
        self._file.truncate()

    def __enter__(self) -> _DiskFiller:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink()


def _fill_completely(filler: _DiskFiller, context: FaultContext) -> None:
    filler.fill(0)
    # The next commits would fit into the existing write-ahead log. After truncation it needs space that is no longer
    # there.
    with contextlib.closing(sqlite3.connect(context.fixture.daemon.database, timeout=PATIENCE_SECONDS)) as connection:
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    filler.fill(context.chance.randrange(_SPARE_BYTES))


async def _set_clock(context: FaultContext, ahead: float) -> None:
    """Return when the daemon has noticed the step."""
    daemon, reactor = context.fixture.daemon, context.fixture.reactor
    read_until = len(daemon.output())
    daemon.clock.ahead = ahead
    deadline = reactor.seconds() + PATIENCE_SECONDS
    while "the system clock was set" not in daemon.output()[read_until:]:
        assert reactor.seconds() < deadline, "the daemon did not notice the clock step"
        await deferLater(reactor, _POLL_SECONDS)


async def _wait_until_drained(context: FaultContext) -> None:
    """Return when every accepted message was pushed and acknowledged, and none is queued."""
    reactor = context.fixture.reactor
    deadline = reactor.seconds() + PATIENCE_SECONDS
    while remaining := await deferToThread(context.fixture.count_queued) or context.load.ledger.undelivered():
        assert reactor.seconds() < deadline, f"accepted messages are not delivered: {remaining}"
        await deferLater(reactor, _POLL_SECONDS)


def _servers(context: FaultContext) -> Any:
    assert context.fixture.servers is not None, "there are no servers"
    return context.fixture.servers
