"""Commands in their turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable
from typing import TypeVar

from mediatord.errors import DuplicateNonce, MediatorError, StoreUnavailable
from mediatord.store.batches import Bounds
from mediatord.store.mongo.decentrl_commands import Guarded
from mediatord.store.mongo.decentrl_keys import key_of
from mediatord.store.mongo.decentrl_locks import Locks
from mediatord.store.mongo.nonces import Nonces
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.replies import Duplicate
from mediatord.store.mongo.server import Server

T = TypeVar("T")

# Commands that seemed to have failed, the last ones, which may have to be undone.
_DOUBTFUL = 1_000


class Turns:
    """
    Carries out commands of this process, those with the same nonce and those for the same party one after another, as
    they would only be in each other's way.

    :param nonces: those of the whole store.
    :param bounds: what may be under way before more is refused.
    """

    def __init__(self, server: Server, nonces: Nonces, bounds: Bounds) -> None:
        self._server = server
        self._nonces = nonces
        self._bounds = bounds
        self._commands = 0
        self._bytes = 0
        self._doubtful: OrderedDict[bytes, None] = OrderedDict()
        self._of_nonces = Locks(server.clock)
        self._of_parties = Locks(server.clock)

    async def carry_out(self, name: str, guarded: Guarded[T]) -> T:
        """
        :param name: of the operation, for the metric.
        :raise StoreUnavailable: it could not be done, or too much is under way.
        """
        size, bounds = guarded.command.size, self._bounds
        if self._commands >= bounds.waiting or self._bytes + size > bounds.waiting_bytes:
            raise StoreUnavailable()
        self._commands += 1
        self._bytes += size
        try:
            return await self._in_turn(name, guarded)
        finally:
            self._commands -= 1
            self._bytes -= size

    async def _in_turn(self, name: str, guarded: Guarded[T]) -> T:
        def in_turn(operations: Operations, deadline: float) -> Awaitable[T]:
            def transact() -> Awaitable[T]:
                return self._claimed(operations, guarded, deadline)

            def after_others() -> Awaitable[T]:
                did = guarded.command.did
                return transact() if did is None else self._of_parties.holding(key_of(did), transact, deadline)

            return self._of_nonces.holding(guarded.guard.nonce, after_others, deadline)

        try:
            return await self._server.operate(name, in_turn)
        except Duplicate:
            raise StoreUnavailable() from None

    async def _claimed(self, operations: Operations, guarded: Guarded[T], deadline: float) -> T:
        await self._nonces.look(operations, deadline, guarded.guard.share)
        guarded.has_room, guarded.doubtful = self._nonces.has_room(guarded.guard.share), self._doubtful
        try:
            answer = await operations.transact(guarded, deadline, guarded.undo)
        except (StoreUnavailable, DuplicateNonce):
            raise
        except MediatorError:
            self._nonces.claimed(not guarded.replaces)
            raise
        except Exception:
            self._doubt(guarded.token)
            raise
        self._nonces.claimed(not guarded.replaces)
        return answer

    def _doubt(self, token: bytes) -> None:
        self._doubtful[token] = None
        if len(self._doubtful) > _DOUBTFUL:
            self._doubtful.popitem(last=False)
