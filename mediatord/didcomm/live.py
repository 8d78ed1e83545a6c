"""Live delivery: pushing to open sockets, and knowing which pushes were never acknowledged (reference 6.3)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.didcomm.exchange import Correspondent
from mediatord.didcomm.packing import Packing
from mediatord.errors import StoreUnavailable
from mediatord.faults import without_text
from mediatord.interfaces import IMessageStore, StoredMessage
from mediatord.journal import Journal
from mediatord.presence import Connections, Session
from mediatord.protocol.didcomm.message import Draft
from mediatord.protocol.didcomm.pickup import DELIVERY, DeliveryForm, delivery_attachment

_log = Logger()

# DIDs of one socket that are remembered as having been seen there.
MAX_BOUND = 256


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """
    How pushing is done.

    :param timeout: seconds after which an unacknowledged push is pending again.
    :param form: form of the attachment in a pushed delivery.
    :param mode: `delivery` pushes a pickup message, `raw` the payload itself.
    :param by_default: whether a socket is live as soon as an account is known on it.
    """

    timeout: float = 60.0
    form: DeliveryForm = "as-received"
    mode: Literal["delivery", "raw"] = "delivery"
    by_default: bool = False


@dataclass(slots=True)
class _Push:
    """One message on its way: the sockets it was written to, and when it counts as not delivered."""

    deadline: float
    sessions: set[Session] = field(default_factory=set)


class Live:
    """
    Pushes messages to the sockets that subscribed to their account.

    Whatever is pushed stays in the store until it is acknowledged (decision D11).
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IMessageStore,
        connections: Connections[Correspondent],
        packing: Packing,
        journal: Journal,
        settings: LiveSettings,
    ) -> None:
        self._clock = clock
        self._store = store
        self._connections = connections
        self._packing = packing
        self._journal = journal
        self._settings = settings
        self._pushes: OrderedDict[str, _Push] = OrderedDict()
        self._by_session: dict[Session, set[str]] = {}
        self._bound: dict[Session, set[str]] = {}
        connections.on_close(self._session_closed)

    def bind(self, session: Session, reader: Correspondent) -> None:
        """A DID proved itself on a socket (reference 3.2), which may have been closed meanwhile."""
        if session not in self._connections:
            return
        dids = self._bound.setdefault(session, set())
        if reader.did not in dids and len(dids) < MAX_BOUND:
            dids.add(reader.did)
            self._journal.connection_bound("didcomm", session.name, reader.did)
            if self._settings.by_default:
                self._connections.subscribe(session, reader.did, reader)

    def rotate(self, prior: str, reader: Correspondent, session: Session | None) -> None:
        """
        An account goes by a new DID (reference 2.3): the socket that said so stays live for it.

        Its other sockets are not; we could not write to them for the new DID before it has spoken there.
        """
        for other, _ in self._connections.subscribers(prior):
            self._connections.unsubscribe(other, prior)
            if other is session:
                self._connections.subscribe(other, reader.did, reader)

    def push(self, message: StoredMessage) -> bool:
        """
        Write a stored message to every socket that subscribed to its account.

        Waits for nothing and never fails: False when no socket took it, and then it just stays in the queue.
        """
        try:
            return self._push(message)
        except Exception:
            _log.failure("pushing a message failed", without_text())
            return False

    def _push(self, message: StoredMessage) -> bool:
        took = [
            session
            for session, reader in self._connections.subscribers(message.account)
            if session.send(self._frame(message, reader))
        ]
        if not took:
            return False
        push = _Push(self._clock.seconds() + self._settings.timeout, set(took))
        self._pushes[message.id] = push
        for session in took:
            self._by_session.setdefault(session, set()).add(message.id)
            self._journal.pushed(message, session.name, "live")
        _watch(self._store.mark_delivered([message.id]))
        return True

    def settle(self, ids: Iterable[str]) -> set[str]:
        """Forget the pushes that were acknowledged; those among `ids` that had been pushed."""
        settled = set()
        for id_ in ids:
            push = self._pushes.pop(id_, None)
            if push is not None:
                settled.add(id_)
                for session in push.sessions:
                    self._forget(session, id_)
        return settled

    def overdue(self) -> None:
        """Make pushes pending again that were not acknowledged in time."""
        now = self._clock.seconds()
        late = []
        while self._pushes:
            id_, push = next(iter(self._pushes.items()))
            if push.deadline > now:
                break
            late.append(id_)
            self.settle([id_])
        self._fall_back(late)

    def _frame(self, message: StoredMessage, reader: Correspondent) -> bytes:
        if self._settings.mode == "raw":
            return message.payload
        attachment = delivery_attachment(message.id, message.payload, message.form, self._settings.form)
        draft = Draft(id=self._packing.new_id(), type=DELIVERY, attachments=[attachment])
        return self._packing.pack(draft, reader)

    def _session_closed(self, session: Session) -> None:
        self._bound.pop(session, None)
        lost = []
        for id_ in self._by_session.pop(session, set()):
            push = self._pushes[id_]
            push.sessions.discard(session)
            if not push.sessions:
                del self._pushes[id_]
                lost.append(id_)
        self._fall_back(lost)

    def _forget(self, session: Session, id_: str) -> None:
        ids = self._by_session.get(session)
        if ids is not None:
            ids.discard(id_)
            if not ids:
                del self._by_session[session]

    def _fall_back(self, ids: Sequence[str]) -> None:
        """UC-021 AF-6: what was pushed in vain is in the queue again."""
        if ids:
            _watch(self._store.mark_pending(ids).addCallback(lambda back: self._journal.fell_back(len(back))))


def _watch(done: Deferred[None]) -> None:
    """The mark is for operators and counters; the message itself is safe without it."""

    def failed(failure: object) -> None:
        _log.warn("the store did not take a delivery mark")

    done.addErrback(lambda failure: failed(failure) if failure.check(StoreUnavailable) else failure)
    done.addErrback(lambda failure: _log.failure("marking a delivery failed", without_text(failure)))
