"""Limits on the size of the MongoDB database and on the free space of the server's disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.runtime.failure_logging import LogThrottle, redact_failure
from mediatord.store.disk_space import GROWING_OPERATIONS, SpaceLimits
from mediatord.store.interfaces.store import STORE_FAULT_MESSAGES, StoreFault
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.collection import Document, MongoCommand
from mediatord.store.mongo.driver.errors import MongoCommandError
from mediatord.store.mongo.driver.operation import Operation

# Seconds between checks.
CHECK_INTERVAL = 5.0
# Errors of servers without the option `freeStorage`: BadValue, FailedToParse, InvalidOptions, and an unknown field.
_UNKNOWN_OPTION_CODES = frozenset({2, 9, 72, 40415})
_UNAUTHORIZED = 13

_log = Logger(namespace="mediatord.store")


class MongoSpaceLimit:
    """
    Checks the size of the database and the free space of the primary's disk, and refuses writes that need more.

    `dbStats` counts the files, which the server writes about once a minute. The space of deleted documents becomes
    reusable some minutes later.

    :ivar limits: how much space the database may take.
    :param on_fault: called with `full` when that begins and ends.
    """

    def __init__(
        self, client: ReplicaSetClient, limits: SpaceLimits, on_fault: Callable[[StoreFault, bool], None]
    ) -> None:
        self._client = client
        self.limits = limits
        self._on_fault = on_fault
        self._is_full = False
        self._supports_free_storage = True
        self._warned = False
        self._failures = LogThrottle(client.clock)
        self._checks = LoopingCall(self._check_logging_errors)
        self._checks.clock = client.clock

    @property
    def fault_description(self) -> str:
        """The fault for the operator; empty if there is none, or the server is unreachable."""
        return STORE_FAULT_MESSAGES["full"] if self._is_full and self._client.is_available else ""

    def start(self) -> None:
        """Check now and every :data:`CHECK_INTERVAL` seconds."""
        if not self._checks.running:
            self._checks.start(CHECK_INTERVAL)

    def stop(self) -> None:
        if self._checks.running:
            self._checks.stop()

    def refuses(self, operation: str, *, shrinking: bool = False) -> bool:
        """
        Whether a write is refused for want of space.

        :param shrinking: whether it makes the store smaller, which its name does not show.
        """
        return self._is_full and not shrinking and operation in GROWING_OPERATIONS

    def admit(self, operation: str, *, shrinking: bool = False) -> None:
        """:raise StoreUnavailable: the write is refused."""
        if self.refuses(operation, shrinking=shrinking):
            raise StoreUnavailable()

    async def check(self) -> None:
        """:raise StoreUnavailable: the server is unreachable."""
        with self._client.operate("space") as run:
            stats = await self._read_stats(run)
        if stats is None:
            return
        reusable = int(stats.get("totalFreeStorageSize", 0))
        in_files = int(stats["storageSize"]) - int(stats.get("freeStorageSize", 0))
        indexes = int(stats["indexSize"]) - int(stats.get("indexFreeStorageSize", 0))
        # The rest beyond the uncompressed size of the documents belongs to deleted ones.
        taken = min(in_files, int(stats["dataSize"])) + indexes
        # Absent if the storage engine has no files, -1 if unknown.
        total = max(int(stats.get("fsTotalSize", 0)), 0)
        free = total - int(stats.get("fsUsedSize", 0)) if total else None
        self._set_full(self.exceeded(taken=taken, free=free, reusable=reusable, total=total))

    def exceeded(self, *, taken: int, free: int | None, reusable: int, total: int) -> bool:
        """
        Whether the database must not grow. Journal and oplog need space on the disk, so half of the space to be left
        free must be free there, outside of the files.

        :param taken: bytes that the database uses.
        :param free: free bytes on the disk; None if unknown.
        :param reusable: free bytes inside the files.
        :param total: bytes of the disk.
        """
        room = None if free is None else free + reusable
        if self.limits.exceeded(taken, room, total, was_exceeded=self._is_full):
            return True
        halved = replace(self.limits, max_bytes=None, min_free_bytes=self.limits.min_free(total) // 2)
        return halved.exceeded(taken, free, total, was_exceeded=self._is_full)

    async def _read_stats(self, run: Operation) -> Document | None:
        """Return the server's statistics; None if the user is not authorized to read them."""
        try:
            if self._supports_free_storage:
                try:
                    return await run.command(MongoCommand({"dbStats": 1, "freeStorage": 1}))
                except MongoCommandError as error:
                    if error.code not in _UNKNOWN_OPTION_CODES:
                        raise
                    self._supports_free_storage = False
            return await run.command(MongoCommand({"dbStats": 1}))
        except MongoCommandError as error:
            if error.code != _UNAUTHORIZED:
                raise
            if not self._warned:
                self._warned = True
                _log.warn(
                    "space limits are not enforced: the MongoDB user lacks the dbStats privilege; grant it readWrite "
                    "on the database"
                )
            return None

    async def _check_logging_errors(self) -> None:
        """Check; a failure must not end the loop, and the client logs why a server is unreachable."""
        try:
            await self.check()
        except StoreUnavailable:
            pass
        except Exception:
            if self._failures.count_occurrence():
                _log.failure("checking the space of the database failed", redact_failure())

    def _set_full(self, is_full: bool) -> None:
        if is_full == self._is_full:
            return
        self._is_full = is_full
        if is_full:
            _log.error("{trouble}", event="store.fault", trouble=STORE_FAULT_MESSAGES["full"])
        else:
            _log.info(
                "store fault cleared: {trouble}", event="store.fault_over", trouble=STORE_FAULT_MESSAGES["full"]
            )
        self._on_fault("full", is_full)
