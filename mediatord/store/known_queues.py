"""What the connection that writes remembers of queues, so that a deposit need not look them up."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from sqlite3 import Connection

from mediatord.protocol.canonical_did import did_digest
from mediatord.store.known_senders import KnownSenders
from mediatord.store.sql_rows import gather_in
from mediatord.store.standings import Standing
from mediatord.store.writer_queue import WriterQueue

# Queues in each of two generations; with DIDs of two thousand characters, their own and that of the account, that is
# 32 MiB of text at most. Beside that there is only what is remembered of few queues, below.
GENERATION = 4_096
# Queues of which it is known who has how much: a queue of a thousand messages may have twice as many parties.
STANDINGS = 32
# Queues of which it stays known whom their recipients have acknowledged: ten thousand bytes each at most.
SENDERS = 64

_COLUMNS = """
    r.did, r.id, r.account_id, a.did, coalesce(q.messages, 0), coalesce(q.bytes, 0), r.registered IS NOT NULL,
    a.fresh
"""
_SOURCE = """
    FROM recipient r CROSS JOIN account a ON a.id = r.account_id
    LEFT JOIN queue q ON q.account_id = r.account_id AND q.recipient_id = r.id
"""
_BY_DID = f"{_SOURCE} WHERE r.did_digest IN ({{}}) AND r.registered IS NOT NULL"
_BY_NUMBER = f"{_SOURCE} WHERE r.id IN ({{}})"


class Queue:
    """
    What waits for a recipient DID of an account.

    :ivar messages: so many wait, and so many `size` bytes; kept by whoever changes it.
    :ivar registered: whether the account still has the DID.
    :ivar fresh: whether the account is not known to be used (:meth:`~mediatord.interfaces.IAccountStore.touch`).
    :ivar standing: who has how much of it, if that was asked lately; likewise.
    :ivar senders: whom its recipient has acknowledged, if that was asked lately; likewise.
    """

    __slots__ = (
        "account",
        "account_id",
        "did",
        "fresh",
        "messages",
        "recipient_id",
        "registered",
        "senders",
        "size",
        "standing",
    )

    def __init__(
        self,
        did: str,
        recipient_id: int,
        account_id: int,
        account: str,
        messages: int,
        size: int,
        registered: int = True,
        fresh: int = False,
    ) -> None:
        self.did = did
        self.recipient_id = recipient_id
        self.account_id = account_id
        self.account = account
        self.messages = messages
        self.size = size
        self.registered = bool(registered)
        self.fresh = bool(fresh)
        self.standing: Standing | None = None
        self.senders: KnownSenders | None = None

    def stand(self, messages: int, size: int, origin: int | None) -> None:
        """So many came from there, or went; None if nobody knows from where."""
        if origin is None:
            self.standing = None
        elif self.standing is not None:
            self.standing.change(origin, messages, size)


class KnownQueues:
    """
    A bounded memory of queues. What was not asked for while as many others were is forgotten.

    It is as good as the transaction in which it was read: whoever changes a queue changes it here, a roll-back and a
    commit of somebody else clear it (:class:`StoreConnection`).
    """

    def __init__(self, generation: int = GENERATION) -> None:
        self._generation = generation
        self._young: dict[str, Queue] = {}
        self._old: dict[str, Queue] = {}
        self._numbers: dict[int, Queue] = {}
        self._standing: OrderedDict[int, Queue] = OrderedDict()
        self._senders: OrderedDict[int, Queue] = OrderedDict()

    def clear(self) -> None:
        """Forget them all."""
        self._young, self._old, self._numbers = {}, {}, {}
        self._standing.clear()
        self._senders.clear()

    def keep_standing(self, queue: Queue, standing: Standing) -> None:
        """Who has how much of it; of few queues that is remembered."""
        queue.standing = standing
        self._standing[queue.recipient_id] = queue
        self._standing.move_to_end(queue.recipient_id)
        if len(self._standing) > STANDINGS:
            _, oldest = self._standing.popitem(last=False)
            oldest.standing = None

    def keep_senders(self, queue: Queue) -> None:
        """Whom its recipient has acknowledged is asked for; it stays until :meth:`forget_senders` at least."""
        self._senders[queue.recipient_id] = queue
        self._senders.move_to_end(queue.recipient_id)

    def forget_senders(self) -> None:
        """But for those of few queues that were asked for last; all that has changed of them is written."""
        while len(self._senders) > SENDERS:
            _, oldest = self._senders.popitem(last=False)
            oldest.senders = None

    def find(self, connection: Connection, dids: Sequence[str]) -> dict[str, Queue]:
        """
        Those of the DIDs that somebody has registered; what is not known is looked up in one statement.

        :param dids: in their canonical form; by another form of it a DID is found too, but is looked up every time.
        """
        found = {}
        missing = []
        for did in dids:
            queue = self._young.get(did) or self._aged(did)
            if queue is None:
                missing.append(did)
            else:
                found[did] = queue
        if missing:
            digests = {did: did_digest(did) for did in missing}
            rows = gather_in(connection, _COLUMNS, _BY_DID, list(digests.values()))
            queues = {did_digest(row[0]): self._numbers.get(row[1]) or self._keep(Queue(*row)) for row in rows}
            found |= {did: queues[digest] for did, digest in digests.items() if digest in queues}
        return found

    def numbered(self, connection: Connection, recipient_ids: Iterable[int]) -> dict[int, Queue]:
        """The same by the numbers of recipients, registered or left over."""
        wanted = set(recipient_ids)
        found = {number: self._numbers[number] for number in wanted if number in self._numbers}
        for queue in found.values():
            self._aged(queue.did)
        if len(found) < len(wanted):
            for row in gather_in(connection, _COLUMNS, _BY_NUMBER, list(wanted - found.keys())):
                queue = Queue(*row)
                found[queue.recipient_id] = self._keep(queue) if queue.registered else queue
        return found

    def _aged(self, did: str) -> Queue | None:
        queue = self._old.pop(did, None)
        if queue is not None:
            self._young[did] = queue
        return queue

    def _keep(self, queue: Queue) -> Queue:
        if len(self._young) >= self._generation:
            for old in self._old.values():
                self._numbers.pop(old.recipient_id, None)
            self._young, self._old = {}, self._young
        self._young[queue.did] = self._numbers[queue.recipient_id] = queue
        return queue


class StoreConnection(Connection):
    """
    A connection that remembers queues from one transaction to the next.

    :ivar known: good within a transaction of :func:`~mediatord.store.group_commit.commit_together` only.
    :ivar entries: in such a transaction, what it has yet to write in the ledger; None outside.
    :ivar queue: where transactions that write wait for those of other processes; None where there are none.
    """

    known: KnownQueues | None = None
    entries: Counter[tuple[str, str]] | None = None
    queue: WriterQueue | None = None
    _version = 0
    _trusted = False
    _checked = False

    def begun(self) -> None:
        """A transaction that may write has begun."""
        self._trusted, self._checked, self.entries = True, False, Counter()

    def ended(self, *, committed: bool) -> None:
        """It is over."""
        self._trusted, self.entries = False, None
        if not committed:
            self.known = None
        elif self.known is not None:
            self.known.forget_senders()

    def forget(self) -> None:
        """Who has which DID may be changed by this transaction."""
        if self.known is not None:
            self.known.clear()

    def queues(self) -> KnownQueues:
        """What is known in this transaction; `PRAGMA data_version` differs once somebody else has committed."""
        if not self._trusted:
            return KnownQueues()
        if not self._checked:
            ((version,),) = self.execute("PRAGMA data_version").fetchall()
            if version != self._version or self.known is None:
                self._version, self.known = version, KnownQueues()
            self._checked = True
        assert self.known is not None
        return self.known


def known_queues(connection: Connection) -> KnownQueues:
    """What the connection knows; nothing where nobody says when transactions begin and end."""
    return connection.queues() if isinstance(connection, StoreConnection) else KnownQueues()


def forget_queues(connection: Connection) -> None:
    """Who has which DID is changed by this transaction."""
    if isinstance(connection, StoreConnection):
        connection.forget()


def begun(connection: Connection) -> None:
    """A transaction that may write has begun: until it is over, queues may be remembered."""
    if isinstance(connection, StoreConnection):
        connection.begun()


def ended(connection: Connection, *, committed: bool) -> None:
    """It is over."""
    if isinstance(connection, StoreConnection):
        connection.ended(committed=committed)
