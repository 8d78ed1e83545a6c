"""The DIDComm half as the transports see it: bytes and their origin in, a reply out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.admission import AccessList, Admission, RegistrationQuota, weight
from mediatord.didcomm.coordination import Coordination
from mediatord.didcomm.exchange import ACCEPTED, Answer, Correspondent, Origin, Received, Reply
from mediatord.didcomm.live import Live
from mediatord.didcomm.packing import Packing
from mediatord.didcomm.pickup import Pickup
from mediatord.didcomm.remembering import memory_of, remember
from mediatord.didcomm.replying import Replying
from mediatord.didcomm.routing import FORWARD_KEY, FORWARD_NAME, Routing
from mediatord.didcomm.smalltalk import SmallTalk
from mediatord.didcomm.unpacking import Unpacking
from mediatord.errors import (
    AlienMediaType,
    AuthcryptRequired,
    InternalFault,
    MediatorError,
    MessageExpired,
    Misaddressed,
    NotAnEnvelope,
    NotEnrolled,
    RateLimited,
    Replayed,
    StoreUnavailable,
    Unsupported,
)
from mediatord.faults import release_frames, without_text
from mediatord.interfaces import FIRST_DAY, Account, IStore
from mediatord.journal import Journal, Told
from mediatord.protocol.didcomm import envelope as jwe
from mediatord.protocol.didcomm.did import did_of
from mediatord.protocol.didcomm.message import Draft, MessageType

_log = Logger()

Use = Callable[[Received, Account | None, Origin], Awaitable[Draft | None]]


@dataclass(frozen=True, slots=True)
class Protocols:
    """The use cases that messages are dispatched to."""

    routing: Routing
    coordination: Coordination
    pickup: Pickup
    smalltalk: SmallTalk


@dataclass(frozen=True, slots=True)
class Desk:
    """The rooms that every message passes."""

    clock: IReactorTime
    store: IStore
    admission: Admission
    registrations: RegistrationQuota
    unpacking: Unpacking
    packing: Packing
    replying: Replying
    live: Live
    journal: Journal
    owns: Callable[[str], bool]
    access: AccessList


class Mediator:
    """Receives messages from all transports, whatever they are."""

    def __init__(self, desk: Desk, protocols: Protocols) -> None:
        self._desk = desk
        self._protocols = protocols
        self._names = {FORWARD_KEY: FORWARD_NAME}
        self._uses: dict[tuple[str, int, str], Use] = {}
        for name, use in self._table().items():
            key = MessageType.parse(f"https://didcomm.org/{name}").key
            self._names[key] = name
            self._uses[key] = use

    def _table(self) -> Mapping[str, Use]:
        """Every message type that is served, but for the forward."""
        coordination, pickup, smalltalk = (
            self._protocols.coordination,
            self._protocols.pickup,
            self._protocols.smalltalk,
        )
        update, query = self._for_account(coordination.update), self._for_account(coordination.query)
        return {
            "coordinate-mediation/2.0/mediate-request": self._mediate_request,
            "coordinate-mediation/2.0/keylist-update": update,
            "coordinate-mediation/2.0/keylist-query": query,
            "coordinate-mediation/3.0/mediate-request": self._mediate_request,
            "coordinate-mediation/3.0/recipient-update": update,
            "coordinate-mediation/3.0/recipient-query": query,
            "messagepickup/3.0/status-request": self._for_account(pickup.status_request),
            "messagepickup/3.0/delivery-request": self._for_account(pickup.delivery_request),
            "messagepickup/3.0/messages-received": self._messages_received,
            "messagepickup/3.0/live-delivery-change": self._for_account(pickup.live_delivery_change),
            "trust-ping/2.0/ping": smalltalk.ping,
            "trust-ping/2.0/ping-response": smalltalk.nothing,
            "discover-features/2.0/queries": smalltalk.queries,
            "discover-features/2.0/disclose": smalltalk.nothing,
            "report-problem/2.0/problem-report": smalltalk.problem_report,
            "empty/1.0/empty": smalltalk.nothing,
        }

    async def receive(self, raw: bytes, origin: Origin) -> Reply:
        """
        Take one message; never raises.

        The reply is for the connection it came on. A 202 means that whatever it asked for is durable.
        """
        told = self._desk.journal.begin("didcomm", origin.peer, len(raw))
        received: Received | None = None
        memory, peer, size = self._desk.admission.memory, origin.peer, len(raw)
        has_memory = memory.take(peer, size)
        try:
            if not has_memory:
                await memory.wait(peer, size)
                has_memory = True
            received = await self._open(raw, origin)
            reply = await self._serve(told, received, origin)
        except MediatorError as error:
            release_frames(error)
            reply = self._desk.packing.refuse(error, received)
        except Exception as error:
            _log.failure("serving a message failed", without_text())
            release_frames(error)
            reply = self._desk.packing.refuse(InternalFault(), None)
        finally:
            if has_memory:
                memory.give_back(peer, size)
        self._tell(told, received, reply, origin)
        return reply

    async def _open(self, raw: bytes, origin: Origin) -> Received:
        admission = self._desk.admission
        await admission.before_reading(origin.peer, len(raw), weight(len(raw)))
        try:
            envelope = jwe.parse(raw)
        except MediatorError as error:
            try:
                admission.before_opening(origin.peer, authenticated=False)
            finally:
                admission.in_vain(origin.peer, len(raw))
            if origin.alien and isinstance(error, NotAnEnvelope):
                raise AlienMediaType from None
            raise
        admission.before_opening(origin.peer, authenticated=envelope.authenticated)
        try:
            return await self._desk.unpacking.open(envelope, origin.peer)
        except (StoreUnavailable, RateLimited):
            raise
        except MediatorError:
            # Also what only failed late: resolving a sender may cost more than decrypting.
            admission.in_vain(origin.peer, len(raw))
            raise

    async def _serve(self, told: Told, received: Received, origin: Origin) -> Reply:
        if received.message.type.key == FORWARD_KEY:
            await self._protocols.routing.forward(told, received, origin)
            return ACCEPTED
        account = await self._account(received)
        self._desk.admission.has_allowance(account.did if account else None, origin.peer)
        await self._refuse_replayed(told, received, account, origin)
        try:
            await self._charge(told, account, origin)
            answer = await self._answer(received, account, origin)
        except Exception as error:
            if isinstance(error, (StoreUnavailable, RateLimited)) or not isinstance(error, MediatorError):
                # It was not done, so the very same message may come again.
                await self._desk.store.release(received.digest)
            raise
        if answer is None or received.correspondent is None:
            return ACCEPTED
        return await self._desk.replying.send(answer, received.message, received.correspondent, origin)

    async def _refuse_replayed(self, told: Told, received: Received, account: Account | None, origin: Origin) -> None:
        """
        Remember it.

        :raise Replayed: it came before.
        :raise MessageExpired: it is too old for that to be known.
        """
        now, message = self._desk.clock.seconds(), received.message
        try:
            if not await remember(self._desk.store, received.digest, memory_of(received, account, now)):
                raise Replayed
        except (Replayed, MessageExpired) as error:
            # Whoever sends it again pays for that, which need not be who wrote it.
            self._desk.admission.in_vain(origin.peer, told.size)
            age_ms = None if message.created_time is None else (now - message.created_time) * 1000
            self._desk.journal.replayed("didcomm", received.sender, error, age_ms=age_ms)
            raise

    async def _account(self, received: Received) -> Account | None:
        """The sender's account; one that is denied is answered as if it had none."""
        correspondent = received.correspondent
        if correspondent is None or self._desk.access.denies(correspondent.did):
            return None
        return await self._desk.store.account(correspondent.did)

    async def _charge(self, told: Told, account: Account | None, origin: Origin) -> None:
        """Whatever a message turns out to be, it was opened: its account pays for that, or its address."""
        if account is None:
            await self._desk.admission.stranger(origin.peer, weight(told.size))
        else:
            await self._desk.admission.account(account.did, origin.peer, weight(told.size))

    async def _answer(self, received: Received, account: Account | None, origin: Origin) -> Draft | None:
        message = received.message
        use = self._uses.get(message.type.key)
        if use is None:
            raise Unsupported
        if message.expires_time is not None and message.expires_time <= self._desk.clock.seconds():
            raise MessageExpired
        if await self._rotate(received, origin):
            account = await self._account(received)
        if account is not None and received.correspondent is not None:
            await self._touch(account)
            # On a full disk it cannot be kept, and what waits can be fetched and deleted all the same.
            with suppress(StoreUnavailable):
                await self._desk.unpacking.keep(received.correspondent)
            if origin.session is not None:
                await self._desk.live.bind(origin.session, received.correspondent)
        return await use(received, account, origin)

    async def _rotate(self, received: Received, origin: Origin) -> bool:
        """Move an account whose holder proves to go by a new DID (reference 2.3); whether that was done."""
        if received.message.from_prior is None:
            return False
        correspondent = self._authenticated(received)
        prior = await self._desk.unpacking.rotation(received.message, origin.peer)
        if prior is None or any(map(self._desk.access.denies, (prior, correspondent.did))):
            return False
        size = len(correspondent.did) + len(correspondent.document.did)
        await self._desk.registrations.register(origin.peer, size)
        try:
            moved = await self._desk.store.move(prior, correspondent.did)
        except MediatorError:
            self._desk.registrations.give_back(origin.peer, size)
            raise
        if not moved:
            self._desk.registrations.give_back(origin.peer, size)
            return False
        self._desk.journal.moved(correspondent.did)
        await self._desk.live.rotate(prior, correspondent, origin.session)
        return True

    async def _touch(self, account: Account) -> None:
        """Record that it was in contact, once a day."""
        if not 0 <= self._desk.clock.seconds() - account.seen_at < FIRST_DAY:
            await self._desk.store.touch(account.did)

    def _for_account(self, use: Callable[[Received, Account, Origin], Awaitable[Answer]]) -> Use:
        """Let only enrolled accounts through (reference 5.3, 6.1)."""

        async def enrolled(received: Received, account: Account | None, origin: Origin) -> Draft:
            self._authenticated(received)
            if account is None:
                raise NotEnrolled
            return self._draft(received, await use(received, account, origin))

        return enrolled

    async def _mediate_request(self, received: Received, account: Account | None, origin: Origin) -> Draft:
        correspondent = self._authenticated(received)
        answer = await self._protocols.coordination.mediate_request(received, correspondent, account, origin)
        await self._desk.unpacking.keep(correspondent)
        return self._draft(received, answer)

    async def _messages_received(self, received: Received, account: Account | None, origin: Origin) -> Draft | None:
        """Answered with a `status`, which costs as much as the rest: it is only made for who wants it."""
        correspondent = self._authenticated(received)
        if account is None:
            raise NotEnrolled
        await self._protocols.pickup.acknowledge(received, account)
        if self._desk.replying.goes_nowhere(received.message, correspondent, origin):
            return None
        return self._draft(received, await self._protocols.pickup.status(account, origin))

    def _authenticated(self, received: Received) -> Correspondent:
        """
        The authenticated sender of a request that changes or reveals something.

        :raise AuthcryptRequired: there is none.
        :raise Misaddressed: it is meant for somebody else, or signed and addressed to nobody (reference 1.8).
        """
        correspondent = received.correspondent
        if correspondent is None:
            raise AuthcryptRequired
        to = received.message.to
        if (to or received.signer) and not any(self._desk.owns(did_of(one)) for one in to):
            raise Misaddressed
        return correspondent

    def _draft(self, received: Received, answer: Answer) -> Draft:
        return Draft(
            id=self._desk.packing.new_id(),
            type=answer.type,
            body=answer.body,
            thid=received.message.thread,
            attachments=answer.attachments,
        )

    def _tell(self, told: Told, received: Received | None, reply: Reply, origin: Origin) -> None:
        self._desk.journal.end(
            told,
            status=reply.status,
            fault=reply.fault,
            kind=self._names.get(received.message.type.key) if received else None,
            sender=received.sender if received else None,
            session=origin.session.name if origin.session else None,
            code=reply.code,
        )
