"""Live delivery: pushing to open sockets, and knowing which pushes were never acknowledged (reference 6.3)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from sys import intern
from typing import Literal

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.didcomm.exchange import Correspondent, Reader
from mediatord.didcomm.marks import MARK_SECONDS, Marks, watch
from mediatord.didcomm.packing import Packing
from mediatord.faults import without_text
from mediatord.few import Few
from mediatord.interfaces import IMessageStore, Removed, StoredMessage
from mediatord.journal import Journal
from mediatord.presence import Connections, Session, TooManyDIDs, send_each
from mediatord.protocol.didcomm.message import Draft
from mediatord.protocol.didcomm.pickup import DELIVERY, DeliveryForm, delivery_attachment

_log = Logger()

# DIDs of one socket that are remembered as having been seen there.
MAX_BOUND = 256
# Messages that are remembered as having been pushed here.
MAX_PUSHED = 100_000
# Pushes that may be neither acknowledged nor overdue; one more, and the oldest is pending again before its time.
MAX_PUSHES = 100_000


@dataclass(frozen=True, slots=True)
class ClusterHooks:
    """
    What keeps several nodes from delivering a message twice.

    :param read_backlog: notes what waits for a DID when a socket has subscribed to it.
    :param record_pickups: lets other nodes know that messages were handed out by pickup.
    """

    read_backlog: Callable[[Session, str], Awaitable[None]]
    record_pickups: Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """
    How pushing is done.

    :param timeout: seconds after which an unacknowledged push is pending again.
    :param form: form of the attachment in a pushed delivery.
    :param mode: `delivery` pushes a pickup message, `raw` the payload itself.
    :param by_default: whether a socket is live as soon as an account is known on it.
    :param node: boot of this node, which pushes are marked with; empty where it is the only one.
    """

    timeout: float = 60.0
    form: DeliveryForm = "as-received"
    mode: Literal["delivery", "raw"] = "delivery"
    by_default: bool = False
    node: str = ""


@dataclass(slots=True)
class _Push:
    """
    One message on its way.

    :param at: when it was written.
    :param sessions: to which sockets.
    """

    at: float
    recipient_did: str
    received_at: float
    sessions: tuple[Session, ...]


class Live:
    """
    Pushes messages to the sockets that subscribed to their account.

    Whatever is pushed stays in the store until it is acknowledged (decision D11).

    :param hooks: None where there are no other nodes.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IMessageStore,
        connections: Connections[Reader],
        packing: Packing,
        journal: Journal,
        settings: LiveSettings,
        hooks: ClusterHooks | None = None,
    ) -> None:
        self._clock = clock
        self._store = store
        self._connections = connections
        self._packing = packing
        self._journal = journal
        self._settings = settings
        self._read_backlog = hooks.read_backlog if hooks else None
        self._record_pickups = hooks.record_pickups if hooks else None
        self._pushes: OrderedDict[str, _Push] = OrderedDict()
        # Of several nodes, each has to know what it has pushed itself: others do not count for its sockets.
        self._pushed: OrderedDict[str, None] = OrderedDict()
        self._by_session: Few[Session, str, None] = Few()
        self._bound: Few[Session, str, None] = Few()
        self._marks = Marks(clock, self._mark, 0.0 if settings.node else MARK_SECONDS)
        connections.on_close(self._session_closed)

    async def bind(self, session: Session, reader: Correspondent) -> None:
        """
        A DID proved itself on a socket (reference 3.2), which may have been closed meanwhile.

        :raise StoreUnavailable: other nodes cannot know that the socket is live.
        """
        if session not in self._connections:
            return
        if not self._bound.has(session, reader.did) and self._bound.count(session) < MAX_BOUND:
            did = intern(reader.did)
            self._bound.put(session, did, None)
            self._journal.connection_bound("didcomm", session.name, did)
            if self._settings.by_default:
                with suppress(TooManyDIDs):
                    await self.subscribe(session, reader)

    async def subscribe(self, session: Session, reader: Correspondent) -> None:
        """
        Push to this socket what comes for an account; see :meth:`~mediatord.presence.Connections.subscribe`.

        :raise TooManyDIDs: nothing comes, since it is live for so many already.
        :raise StoreUnavailable: what other nodes accept will not be pushed before the store is there again.
        """
        await self._connections.subscribe(session, intern(reader.did), Reader(reader))
        if self._read_backlog is not None:
            await self._read_backlog(session, reader.did)

    async def rotate(self, prior: str, reader: Correspondent, session: Session | None) -> None:
        """
        An account goes by a new DID (reference 2.3): the socket that said so stays live for it.

        Its other sockets are not; we could not write to them for the new DID before it has spoken there.

        :raise StoreUnavailable: other nodes cannot know.
        """
        was_live = session is not None and self._connections.is_subscribed(session, prior)
        for other, other_reader in self._connections.subscribers(prior):
            if other is not session and other_reader is not None:  # or it speaks Decentrl
                self._connections.unsubscribe(other, prior)
        if session is not None and was_live:
            await self._connections.move(session, prior, intern(reader.did), Reader(reader))

    def push(self, message: StoredMessage) -> bool:
        """
        Write a stored message to every socket that subscribed to its account.

        Waits for nothing and never fails: False when no socket took it, and then it just stays in the queue.
        """
        return self._push(message, self._connections.subscribers(message.account))

    def push_remote(self, message: StoredMessage, *, by: float = inf) -> bool:
        """
        As :meth:`push`, for a message that another node accepted: not to sockets for which it waited already.

        :param by: leaves out sockets that subscribed after this time, too.
        """
        return self._push(message, self._connections.subscribers(message.account, by=by, message=message.id))

    def handed_out(self, ids: Sequence[str]) -> None:
        """The recipient of these messages has asked for them, and gets them."""
        if self._record_pickups is not None:
            self._record_pickups(ids)

    def was_pushed(self, id_: str) -> bool:
        """
        Whether a message is on a socket of ours, neither acknowledged nor overdue; of several nodes, whether it ever
        was, as far as that is remembered, and has not been acknowledged here.
        """
        return id_ in self._pushes or id_ in self._pushed

    def _push(self, message: StoredMessage, subscribers: Sequence[tuple[Session, Reader]]) -> bool:
        took = send_each(subscribers, partial(self._frame, message))
        if not took:
            return False
        try:
            self._note(message, took)
        except Exception:
            _log.failure("taking note of a push failed", without_text())
        return True

    def _note(self, message: StoredMessage, took: Sequence[Session]) -> None:
        """It is on its way to these sockets."""
        if self._journal.is_own(message.recipient_did):
            # Without a mark: what is left of it expires soon, and nobody is to be told that it came to nothing.
            self._remember(message.id)
            return
        before = self._pushes.pop(message.id, None)  # a late look may find what has just been pushed
        sessions = tuple({*took, *before.sessions}) if before else tuple(took)
        did = intern(message.recipient_did)
        self._pushes[message.id] = _Push(self._clock.seconds(), did, message.received_at, sessions)
        for session in took:
            self._by_session.put(session, message.id, None)
        self._keep_few()
        self._journal.pushed(message, [session.name for session in took], "live", "didcomm")
        self._remember(message.id)
        self._marks.add(message.id)

    def _keep_few(self) -> None:
        """One that pushed to nobody who acknowledges shall not fill the memory."""
        if len(self._pushes) > MAX_PUSHES:
            id_, push = next(iter(self._pushes.items()))
            self._take_back(id_)
            self._fall_back({id_: push})

    @property
    def on_their_way(self) -> int:
        """Pushes that are neither acknowledged nor overdue."""
        return len(self._pushes)

    @property
    def remembered(self) -> int:
        """Messages that are remembered as having been pushed, where other nodes may ask."""
        return len(self._pushed)

    def was_live(self, removed: Removed, settled: Collection[str]) -> bool:
        """
        Whether a message that was acknowledged had been pushed.

        :param settled: what was pushed here, as :meth:`settle` said; of other nodes only the store knows.
        """
        return removed.id in settled or bool(self._settings.node and removed.pushes)

    def settle(self, ids: Iterable[str]) -> set[str]:
        """Forget the pushes that were acknowledged; those among `ids` that had been pushed."""
        settled = set()
        for id_ in ids:
            self._pushed.pop(id_, None)
            self._marks.take_back(id_)
            if self._take_back(id_):
                settled.add(id_)
        return settled

    def overdue(self) -> None:
        """Make pushes pending again that were not acknowledged in time, or are from before the clock was set back."""
        now = self._clock.seconds()
        late = {}
        while self._pushes:
            id_, push = next(iter(self._pushes.items()))
            if 0.0 <= now - push.at < self._settings.timeout:
                break
            late[id_] = push
            self._take_back(id_)
        self._fall_back(late)

    def _frame(self, message: StoredMessage, reader: Reader | None) -> bytes | None:
        """None for a socket that speaks Decentrl, which may serve the same DID."""
        if reader is None:
            return None
        if self._settings.mode == "raw":
            return message.payload
        attachment = delivery_attachment(message.id, message.payload, message.form, self._settings.form)
        draft = Draft(id=self._packing.new_id(), type=DELIVERY, attachments=[attachment])
        return self._packing.pack(draft, reader)

    def _session_closed(self, session: Session) -> None:
        self._bound.pop(session)
        lost = {}
        for id_, _ in self._by_session.pop(session):
            push = self._pushes[id_]
            push.sessions = tuple(one for one in push.sessions if one is not session)
            if not push.sessions:
                del self._pushes[id_]
                lost[id_] = push
        self._fall_back(lost)

    def _remember(self, id_: str) -> None:
        if self._settings.node:
            self._pushed[id_] = None
            self._pushed.move_to_end(id_)
            if len(self._pushed) > MAX_PUSHED:
                self._pushed.popitem(last=False)

    def _take_back(self, id_: str) -> bool:
        """Whether it was on a socket."""
        push = self._pushes.pop(id_, None)
        if push is None:
            return False
        for session in push.sessions:
            self._by_session.drop(session, id_)
        return True

    def _mark(self, ids: Sequence[str]) -> Deferred[None]:
        return self._store.mark_delivered(ids, node=self._settings.node)

    def _fall_back(self, pushes: Mapping[str, _Push]) -> None:
        """UC-021 AF-6: what was pushed in vain is in the queue again."""
        marked: list[str] = []
        unmarked: list[str] = []
        for id_ in pushes:
            (unmarked if self._marks.take_back(id_) else marked).append(id_)
        self._fell_back(unmarked, pushes)
        if marked:
            watch(self._store.mark_pending(marked).addCallback(self._fell_back, pushes))

    def _fell_back(self, ids: Iterable[str], pushes: Mapping[str, _Push]) -> None:
        for id_ in ids:
            self._journal.fell_back(id_, pushes[id_].recipient_did, pushes[id_].received_at)
