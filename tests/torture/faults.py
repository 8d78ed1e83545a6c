"""What happens to a daemon under load. When a fault is over, everything runs again."""

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

# Longer than anything that the daemon does for one message.
WHOLE_MESSAGE_SECONDS = 0.05
# By how much a clock is set, at most.
LARGEST_STEP = 600.0
_LOOK_SECONDS = 0.05
# Left on a small file system until it is to be full, and then at most.
_ROOM_BEFORE_BYTES, _SPARE_BYTES = 8 << 20, 1 << 14


@dataclass(slots=True)
class FaultContext:
    """
    A load in the middle of which something is to happen.

    :param chance: decides what.
    :param load: is under way.
    :param recipients: listen; they are stopped when all is over.
    :ivar marks: what was seen, for the summary.
    """

    stage: DaemonFixture
    chance: random.Random
    load: MessageLoad
    recipients: list[ReconnectingRecipient]
    marks: list[str] = field(default_factory=list)

    async def moment(self, most: float = 0.4) -> None:
        """Any moment in the life of a message. :param most: before this part of the messages is sent."""
        await deferToThread(
            self.load.senders.wait_for_answers, self.chance.randrange(int(most * self.load.message_count))
        )
        await self.pause(0, WHOLE_MESSAGE_SECONDS)

    async def pause(self, least: float, most: float) -> None:
        """Some time, in seconds."""
        await deferLater(self.stage.reactor, self.chance.uniform(least, most))


async def kill9(scene: FaultContext) -> None:
    """The daemon dies."""
    daemon = scene.stage.daemon
    await scene.moment()
    await deferToThread(daemon.kill)
    await deferToThread(daemon.start)


async def trace_disk(stage: DaemonFixture) -> None:
    """From now on it is known what is on disk and what is not."""
    await deferToThread(stage.daemon.stop)
    stage.daemon.start_trace()
    await deferToThread(stage.daemon.start)


async def powercut(scene: FaultContext) -> None:
    """The host dies; now and then the daemon has died shortly before."""
    if scene.chance.random() < 0.3:
        await kill9(scene)
    daemon = scene.stage.daemon
    await scene.moment()
    await deferToThread(daemon.kill)
    # Of what a disk has forgotten to sync nothing is left.
    kept = scene.chance.choice((0.0, 0.3, 0.7, 1.0)) if daemon.syncs else 0.0
    found = DiskState(daemon.base, daemon.trace, scene.chance, kept)
    unsynced = await deferToThread(found.replace, daemon.directory)
    scene.marks.append(f"{unsynced} writes not synced")
    daemon.stop_trace()
    await deferToThread(daemon.start)


async def servers_killed(scene: FaultContext) -> None:
    """All servers die at once; what they have is their journal."""
    servers = _servers(scene)
    members = range(len(servers.members))
    await scene.moment()
    for member in members:
        servers.members[member].send_kill()
    for member in members:
        await deferToThread(servers.kill, member)
    await scene.pause(0, 1)
    for member in members:
        await deferToThread(servers.start, member)


async def diskfull(scene: FaultContext) -> None:
    """There is no room on the disk, or SQLite is told so."""
    if scene.stage.small and scene.chance.random() < 0.5:
        scene.marks.append("the file system is full")
        with _DiskFiller(scene.stage.daemon.directory) as filler:
            # Most of it beforehand: when the moment has come, it takes no time.
            await deferToThread(filler.fill, _ROOM_BEFORE_BYTES)
            await scene.moment(0.1)  # what is sent later has to be more than there is room for
            await deferToThread(_use_up, filler, scene)
            await _trouble(scene)
    else:
        await scene.moment()
        await _disk(scene, DiskMode.FULL)


async def readonly(scene: FaultContext) -> None:
    """Nothing can be written to the disk, in one way or another."""
    await scene.moment()
    await _disk(scene, scene.chance.choice((DiskMode.READ_ONLY, DiskMode.BROKEN)))


async def locked(scene: FaultContext) -> None:
    """Somebody else has the database for himself, for longer than a write waits or not."""
    await scene.moment()
    database = scene.stage.daemon.database
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=PATIENCE_SECONDS)) as other:
        other.execute("BEGIN EXCLUSIVE")
        await scene.pause(0.2, 4)
        other.execute("ROLLBACK")


async def server_stopped(scene: FaultContext) -> None:
    """The primary stands still for a while, or ends and comes back."""
    servers = _servers(scene)
    await scene.moment()
    primary = await deferToThread(servers.primary)
    if scene.chance.random() < 0.5:
        await deferToThread(servers.freeze, primary)
        try:
            await scene.pause(0.2, 5)
        finally:
            servers.thaw(primary)
    else:
        await deferToThread(servers.kill, primary)
        await scene.pause(0, 3)
        await deferToThread(servers.start, primary)


async def stepdown(scene: FaultContext) -> None:
    """The primary is none any more, and says so."""
    await scene.moment()
    await deferToThread(_servers(scene).step_down)


async def clock(scene: FaultContext) -> None:
    """The clock of the host is set, and set right again, both while messages arrive."""
    await scene.moment(0.2)
    ahead = scene.chance.choice((-1, 1)) * scene.chance.uniform(30, LARGEST_STEP)
    scene.marks.append(f"set by {ahead:.0f} s")
    await _set(scene, ahead)
    await scene.moment(0.2)
    await _set(scene, 0.0)


async def halfopen(scene: FaultContext) -> None:
    """
    The sockets of the wallets go dead without a word, or hear and are not heard. The wallets come on other ones, and
    the messages with the same ids.
    """
    stage = scene.stage
    await scene.moment()
    with stage.relay.dead(stage.daemon.port, one_way=scene.chance.random() < 0.5):
        await scene.moment(0.2)
        others = stage.recipients(scene.load.ledger)
        for recipient in others:
            recipient.start()
        scene.recipients += others
        await deferToThread(scene.load.senders.join)
        await _all_gone(scene)
    pushed = [one for data in stage.relay.swallowed for one in parse_pushes(data, stage.wallets)]
    for wallet, delivered in pushed:
        scene.load.ledger.delivered_unseen(wallet, delivered)
    scene.marks.append(f"{len(pushed)} pushes swallowed")


async def term(scene: FaultContext) -> None:
    """The daemon is asked to end, and started again."""
    daemon = scene.stage.daemon
    await scene.moment()
    await deferToThread(daemon.stop)
    await deferToThread(daemon.start)


async def reload(scene: FaultContext) -> None:
    """The daemon reads its settings again and begins another segment of its log, several times."""
    for _ in range(scene.chance.randrange(1, 4)):
        await scene.moment(0.2)
        os.kill(scene.stage.daemon.pid, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class FaultKind:
    """
    One kind of fault.

    :param strike: has it happen, and returns when it is over.
    :param prepare: before the load begins.
    :param relayed: whether the wallets are to take the way that may go dead.
    """

    strike: Callable[[FaultContext], Awaitable[None]]
    prepare: Callable[[DaemonFixture], Awaitable[None]] | None = None
    relayed: bool = False


_EVERYWHERE = {"clock": FaultKind(clock), "halfopen": FaultKind(halfopen, relayed=True), "reload": FaultKind(reload)}
_DURABLE = {"kill9": FaultKind(kill9), "term": FaultKind(term)}
KINDS: dict[StoreName, dict[str, FaultKind]] = {
    "sqlite": {
        **_EVERYWHERE,
        **_DURABLE,
        "powercut": FaultKind(powercut, trace_disk),
        "diskfull": FaultKind(diskfull),
        "readonly": FaultKind(readonly),
        "stopped": FaultKind(locked),
    },
    "mongodb": {
        **_EVERYWHERE,
        **_DURABLE,
        "powercut": FaultKind(servers_killed),
        "stopped": FaultKind(server_stopped),
        "stepdown": FaultKind(stepdown),
    },
    "memory": dict(_EVERYWHERE),
}


async def _disk(scene: FaultContext, mode: DiskMode) -> None:
    disk_control = scene.stage.daemon.disk_control
    disk_control.mode = mode
    try:
        await _trouble(scene)
    finally:
        disk_control.mode = DiskMode.WELL


async def _trouble(scene: FaultContext) -> None:
    await deferToThread(scene.load.senders.wait_for_refused, scene.chance.randrange(1, 25))


class _DiskFiller:
    """A file that takes the room on a file system, until it is closed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "filler"
        self._file = open(self._path, "wb", buffering=0)

    def fill(self, spare: int) -> None:
        """Take all room. :param spare: bytes that are left."""
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


def _use_up(filler: _DiskFiller, scene: FaultContext) -> None:
    filler.fill(0)
    # The next commits would fit into the write-ahead log as it is. Emptied, it needs room that is no longer there.
    with contextlib.closing(sqlite3.connect(scene.stage.daemon.database, timeout=PATIENCE_SECONDS)) as other:
        with contextlib.suppress(sqlite3.OperationalError):
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    filler.fill(scene.chance.randrange(_SPARE_BYTES))


async def _set(scene: FaultContext, ahead: float) -> None:
    """Returns when the daemon goes by it."""
    daemon, reactor = scene.stage.daemon, scene.stage.reactor
    said = len(daemon.output())
    daemon.clock.ahead = ahead
    deadline = reactor.seconds() + PATIENCE_SECONDS
    while "the system clock was set" not in daemon.output()[said:]:
        assert reactor.seconds() < deadline, "the clock was set, and the daemon does not see it"
        await deferLater(reactor, _LOOK_SECONDS)


async def _all_gone(scene: FaultContext) -> None:
    """Nobody has to ask for what was accepted: it comes, is acknowledged, and nothing waits any more."""
    reactor = scene.stage.reactor
    deadline = reactor.seconds() + PATIENCE_SECONDS
    while awaited := await deferToThread(scene.stage.left) or scene.load.ledger.awaited():
        assert reactor.seconds() < deadline, f"{awaited} were accepted, and do not come"
        await deferLater(reactor, _LOOK_SECONDS)


def _servers(scene: FaultContext) -> Any:
    assert scene.stage.servers is not None, "there are no servers"
    return scene.stage.servers
