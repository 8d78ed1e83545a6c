"""Tells the store which DIDs this node holds sockets of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.cluster.quiet import Arrivals, Unseen
from mediatord.deadline import time_left
from mediatord.errors import StoreUnavailable
from mediatord.faults import without_text
from mediatord.interfaces import IClusterStore

_log = Logger()

CHUNK = 500
# Seconds until the store is told again what it did not take.
RETRY = 1.0


class Announcer:
    """
    Keeps what the store says of this node the same as what is so.

    One conversation with the store at a time, in which each DID is said to be here or gone as it is by then: so a
    socket that comes and goes at once ends right, however the answers of the store come.

    :param boot: ours.
    :param arrivals: also told of those who are here, before anybody else is.
    """

    def __init__(
        self, clock: IReactorTime, store: IClusterStore, boot: str, arrivals: Arrivals | None = None
    ) -> None:
        self._clock = clock
        self._store = store
        self._boot = boot
        self._arrivals = arrivals or Unseen()
        self._here: set[str] = set()
        self._changed: dict[str, None] = {}
        # What the store knows, and what it may know because an answer did not come.
        self._told: set[str] = set()
        self._perhaps: set[str] = set()
        self._waiting: dict[str, list[Deferred[None]]] = {}
        self._stay = 0
        self._joined = self._stopped = False
        self._begin: IDelayedCall | None = None
        self._talk: Deferred[float] | None = None

    def here(self, did: str) -> Deferred[None]:
        """
        A socket for a DID is here, the first one or one more; fires when other nodes can know.

        :raise StoreUnavailable: they cannot for now; they will when the store is there again.
        """
        if did in self._told and did in self._here:
            return succeed(None)
        self._here.add(did)
        if self._stopped:
            return fail(StoreUnavailable())
        known: Deferred[None] = Deferred()
        self._waiting.setdefault(did, []).append(known)
        known.addTimeout(time_left(self._clock), self._clock, lambda _, __: fail(StoreUnavailable()))
        self._change(did)
        return known

    def gone(self, did: str) -> None:
        """The last one is gone."""
        self._here.discard(did)
        self._answer([did])
        self._change(did)

    def joined(self) -> None:
        """This node is one of the cluster, and the store knows nothing of its sockets."""
        self._joined = True
        self._forget()
        self._changed = dict.fromkeys([*self._here, *self._changed])
        self._arm(0)

    def parted(self) -> None:
        """It is none any more, for the time being: who comes now waits until it is again."""
        self._joined = False
        self._forget()

    def stop(self) -> Deferred[None]:
        """Say nothing more; fires when that is sure."""
        self._joined, self._stopped = False, True
        if self._begin is not None:
            self._begin.cancel()
            self._begin = None
        self._answer(list(self._waiting), fault=True)
        over: Deferred[None] = Deferred()
        (self._talk or succeed(0.0)).addCallback(lambda _: over.callback(None))
        return over

    def _forget(self) -> None:
        """What was said, or is just being said, counts no longer."""
        self._stay += 1
        self._told.clear()

    def _change(self, did: str) -> None:
        self._changed[did] = None
        self._arm(0)

    def _arm(self, delay: float) -> None:
        if self._joined and self._changed and self._begin is None and self._talk is None:
            self._begin = self._clock.callLater(delay, self._start)

    def _start(self) -> None:
        self._begin = None
        self._talk = talk = Deferred.fromCoroutine(self._tell())
        talk.addErrback(self._failed)
        talk.addCallback(self._told_all)

    def _told_all(self, pause: float | None) -> None:
        self._talk = None
        self._arm(pause or 0)

    def _failed(self, failure: object) -> float:
        _log.failure("announcing sockets failed", without_text(failure))  # type: ignore[arg-type]  # a Failure
        return RETRY

    async def _tell(self) -> float:
        """Say all there is to say; the seconds after which that makes sense again."""
        while self._joined and self._changed:
            dids = list(self._changed)[:CHUNK]
            for did in dids:
                del self._changed[did]
            try:
                await self._announce([did for did in dids if did in self._here and did not in self._told])
                self._answer(did for did in dids if did in self._told)
                await self._withdraw([did for did in dids if did not in self._here and did in self._perhaps])
            except StoreUnavailable:
                self._answer(dids, fault=True)
                return RETRY
            except Exception:
                self._answer(dids, fault=True)
                raise
            finally:
                self._changed.update(dict.fromkeys(did for did in dids if not self._is_settled(did)))
        return 0

    def _is_settled(self, did: str) -> bool:
        return did in self._told if did in self._here else did not in self._perhaps

    async def _announce(self, dids: Sequence[str]) -> None:
        if dids:
            stay = self._stay
            self._perhaps.update(dids)
            try:
                await self._store.announce(self._boot, dids)
            finally:
                self._arrivals.came(dids)  # if it failed, the store may know all the same
            if stay == self._stay:
                self._told.update(dids)

    async def _withdraw(self, dids: Sequence[str]) -> None:
        if dids:
            self._told.difference_update(dids)
            await self._store.withdraw(self._boot, dids)
            self._perhaps.difference_update(dids)

    def _answer(self, dids: Iterable[str], *, fault: bool = False) -> None:
        """Tell who waits for these DIDs that others know, or that they cannot."""
        for known in [known for did in dids for known in self._waiting.pop(did, ())]:
            if not known.called:
                known.errback(StoreUnavailable()) if fault else known.callback(None)
