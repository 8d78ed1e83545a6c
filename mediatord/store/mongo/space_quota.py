"""Whether a MongoDB database may grow: its bound in bytes, and the free space of the server's disk."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.interfaces.store import FAULT_MESSAGES, Fault
from mediatord.store.disk_space import GROWING_OPERATIONS, SpaceLimits
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.replies import Refused
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.server import Server

# Seconds between two questions for the size of the database and the free space of its disk.
CHECK_INTERVAL = 5.0

_log = Logger(namespace="mediatord.store")


class SpaceQuota:
    """
    Asks the server for the size of the database and the free space of its disk, and refuses writes that need more.

    The figures are those of `dbStats`. The server counts what it has written to its files, which it does once a
    minute, and where documents were deleted there is space in the files some minutes later. The bound in bytes counts
    documents as gone when they are deleted, the free space of the disk when their space can be written to.

    :ivar limits: how much space the database may take.
    :param on_fault: called with `full` when that begins and ends.
    """

    def __init__(self, server: Server, limits: SpaceLimits, on_fault: Callable[[Fault, bool], None]) -> None:
        self._server = server
        self.limits = limits
        self._on_fault = on_fault
        self._is_full = False
        self._reports_free = True
        self._checks = LoopingCall(self._check_quietly)
        self._checks.clock = server.clock

    @property
    def trouble(self) -> str:
        """What is wrong, for the operator; empty when all is well."""
        return FAULT_MESSAGES["full"] if self._is_full else ""

    def start(self) -> None:
        """Check now, and from now on every :data:`CHECK_INTERVAL`."""
        if not self._checks.running:
            self._checks.start(CHECK_INTERVAL)

    def stop(self) -> None:
        """Check no more."""
        if self._checks.running:
            self._checks.stop()

    def refuses(self, operation: str, *, shrinking: bool = False) -> bool:
        """
        Whether a write is refused for want of space.

        :param shrinking: whether there is less in the store after it, which its name does not say.
        """
        return self._is_full and not shrinking and operation in GROWING_OPERATIONS

    async def check(self) -> None:
        """:raise StoreUnavailable: the server does not answer, or does not let this user ask."""
        stats = await self._server.operate("space", self._stats)
        # Absent where the storage engine has no files.
        total = int(stats.get("fsTotalSize", 0))
        reusable = int(stats.get("totalFreeStorageSize", 0))
        free = total - int(stats.get("fsUsedSize", 0)) + reusable if total else None
        in_files = int(stats["storageSize"]) - int(stats.get("freeStorageSize", 0))
        # Documents are compressed in the files, so that files with more in use have it from deleted ones.
        indexes = int(stats["indexSize"]) - int(stats.get("indexFreeStorageSize", 0))
        taken = min(in_files, int(stats["dataSize"])) + indexes
        self._change(self.limits.exceeded(taken, free, total, was_exceeded=self._is_full))

    async def _stats(self, operations: Operations, deadline: float) -> Document:
        if self._reports_free:
            try:
                return await operations.command(Request({"dbStats": 1, "freeStorage": 1}), deadline)
            except Refused as error:
                if error.passing or error.unauthenticated:
                    raise
                self._reports_free = False
        return await operations.command(Request({"dbStats": 1}), deadline)

    def _check_quietly(self) -> Deferred[None]:
        # Why it does not answer is logged there.
        return Deferred.fromCoroutine(self.check()).addErrback(_ignore_unavailable)

    def _change(self, is_full: bool) -> None:
        if is_full == self._is_full:
            return
        self._is_full = is_full
        if is_full:
            _log.error("{trouble}", event="store.fault", trouble=FAULT_MESSAGES["full"])
        else:
            _log.info("no longer: {trouble}", event="store.fault_over", trouble=FAULT_MESSAGES["full"])
        self._on_fault("full", is_full)


def _ignore_unavailable(failure: Failure) -> None:
    failure.trap(StoreUnavailable)
