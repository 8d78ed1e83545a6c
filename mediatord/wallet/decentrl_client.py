"""
A Decentrl mediator as a wallet sees it: found by URL or DID, described by its DID document (reference 3).

A wallet's way of asking: commands by POST, and what comes back (DCTRL-0004 sections 4 and 11).

Getting contracts: with a mediator, which is registration, and with other identities (DCTRL-0004 8.1 to 8.6).

A Decentrl wallet: events for others, for itself and for everybody (DCTRL-0004 7 and 8.7 to 8.11, DCTRL-0007).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlencode

from twisted.internet.interfaces import IReactorTime
from twisted.web.client import ResponseFailed, ResponseNeverReceived
from twisted.web.http_headers import Headers

from mediatord.errors import UnresolvableDID
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import ChannelType
from mediatord.protocol.decentrl.crypto import sign_event, verify_event_signature
from mediatord.protocol.decentrl.did_decentrl import KeyType, decode_multibase_key, parse_did
from mediatord.protocol.didcomm.did_methods import locate_did_web
from mediatord.wallet import decentrl_messages
from mediatord.wallet.decentrl_messages import (
    CONTRACTS,
    EVENTS,
    PENDING_EVENTS,
    PENDING_REQUESTS,
    YEAR_SECONDS,
    ConcludedContract,
    ContractProposal,
    ContractRequest,
    DecentrlIdentity,
    Item,
    OpenedEvent,
    PageQuery,
    PendingEvent,
    PublicEvent,
    ResultPage,
    StoredContract,
    StoredEvent,
    accept_contract,
    conclude_contract,
    open_event,
    propose_contract,
    read_page,
    seal_event,
)
from mediatord.wallet.didcomm_client import HTTPResponse, TreqClient, fetch_json, read_response
from mediatord.wallet.didcomm_messages import UnreadableMessage

_SERVICE = "#mediator-service"
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class DecentrlMediator:
    """
    :param url: where commands are POSTed.
    :param signing_key: Ed25519 public key.
    :param prekey: X25519 public key that registrations are encrypted to.
    """

    did: str
    url: str
    signing_key: bytes = field(repr=False)
    prekey: bytes = field(repr=False)

    @property
    def ws_url(self) -> str:
        """Where a socket is opened."""
        scheme, _, rest = self.url.partition("://")
        return f"{'wss' if scheme == 'https' else 'ws'}://{rest.rstrip('/')}/ws"

    def public_url(self, publisher_did: str) -> str:
        """Where the public channels of a DID are read; the DID stands there as it is (reference 10.3)."""
        return f"{self.url.rstrip('/')}/public/{publisher_did}"


def read_mediator_document(document: dict[str, Any]) -> DecentrlMediator:
    """
    The mediator that a DID document describes (DCTRL-0004 3.2).

    :raise Unreadable: it has not all that a wallet needs.
    """
    try:
        did = str(document["id"])
        service = _find_entry(document["service"], _SERVICE, did + _SERVICE)
        return DecentrlMediator(
            did,
            str(service["serviceEndpoint"]["uri"]),
            _decode_key(_find_entry(document["verificationMethod"], f"{did}#signing"), "Ed25519"),
            _decode_key(_find_entry(document["keyAgreement"], f"{did}#prekey"), "X25519"),
        )
    except (KeyError, TypeError, ValueError):
        raise UnreadableMessage("not the document of a Decentrl mediator") from None


def _find_entry(entries: list[Any], *ids: str) -> dict[str, Any]:
    """Between them may be what is meant for others, references by id included."""
    for one in entries:
        if isinstance(one, dict) and one.get("id") in ids:
            return one
    raise KeyError


def _decode_key(method: dict[str, Any], kind: KeyType) -> bytes:
    return decode_multibase_key(str(method["publicKeyMultibase"]), kind)


async def discover_decentrl_mediator(http: TreqClient, url: str) -> DecentrlMediator:
    """
    The mediator at a URL.

    :raise Unreadable: there is none.
    """
    return read_mediator_document(await fetch_json(http, f"{url.rstrip('/')}/.well-known/did.json"))


async def resolve_decentrl_mediator(http: TreqClient, did: str) -> DecentrlMediator:
    """
    The mediator of a did:web; on the loopback interface without TLS, unless it insists on that.

    :raise Unreadable: some other DID, or there is nothing where it points.
    """
    if not did.startswith("did:web:"):
        raise UnreadableMessage("a mediator that is no did:web")
    try:
        location = locate_did_web(did)
    except UnresolvableDID:
        raise UnreadableMessage("a did:web that points nowhere") from None
    found = read_mediator_document(await _fetch_document(http, location.url, location.host in _LOOPBACK))
    if found.did != did:
        raise UnreadableMessage("the document of another mediator")
    return found


async def _fetch_document(http: TreqClient, url: str, near: bool) -> dict[str, Any]:
    if near:
        try:
            return await fetch_json(http, f"http{url.removeprefix('https')}")
        except (ResponseNeverReceived, ResponseFailed):
            pass  # It hangs up on whoever does not speak TLS.
    return await fetch_json(http, url)


class MediatorDirectory:
    """
    Whose keys are whose, and which mediator answers for whom.

    A did:decentrl says both itself; a mediator is known once its document has been read.
    """

    def __init__(self, http: TreqClient) -> None:
        self._http = http
        self._known: dict[str, DecentrlMediator] = {}

    def add(self, mediator: DecentrlMediator) -> None:
        """Remember it."""
        self._known[mediator.did] = mediator

    async def mediator_of(self, did: str) -> DecentrlMediator:
        """
        The mediator that a did:decentrl names.

        :raise Unreadable: it names none, or one that cannot be found.
        """
        try:
            mediator_did = parse_did(did).mediator_did
        except ValueError:
            raise UnreadableMessage("not a did:decentrl") from None
        if mediator_did not in self._known:
            self.add(await resolve_decentrl_mediator(self._http, mediator_did))
        return self._known[mediator_did]

    def signing_key(self, did: str, key_id: str) -> bytes | None:
        """The Ed25519 public key of this id; None where there is none."""
        if key_id != f"{did}#signing":
            return None
        if did in self._known:
            return self._known[did].signing_key
        try:
            return parse_did(did).signing_key
        except ValueError:
            return None


_JSON = "application/json"


class CommandRefused(Exception):
    """
    A mediator said no.

    :param status: of the HTTP response, or the close code of a socket.
    :param code: one of DCTRL-0004 section 11.
    """

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}".strip())
        self.status = status
        self.code = code


class DecentrlClient:
    """
    One identity, and where it asks what.

    :param mediator: its own.
    :param clock: for timestamps and time-outs.
    :param directory: may be shared by several.
    """

    def __init__(
        self,
        identity: DecentrlIdentity,
        mediator: DecentrlMediator,
        http: TreqClient,
        clock: IReactorTime,
        directory: MediatorDirectory | None = None,
    ) -> None:
        self.identity = identity
        self.mediator = mediator
        self.clock = clock
        self.directory = directory or MediatorDirectory(http)
        self.directory.add(mediator)
        self._http = http

    @classmethod
    def generate(
        cls,
        alias: str,
        mediator: DecentrlMediator,
        http: TreqClient,
        clock: IReactorTime,
        directory: MediatorDirectory | None = None,
    ) -> Self:
        """One with a new identity that names this mediator; it is not registered yet."""
        return cls(DecentrlIdentity.generate(alias, mediator.did), mediator, http, clock, directory)

    @property
    def did(self) -> str:
        """The identity's."""
        return self.identity.did

    def now(self) -> int:
        """Unix seconds."""
        return int(self.clock.seconds())

    def command(
        self,
        payload: dict[str, Any] | str,
        recipient_did: str | None = None,
        channel: ChannelType = decentrl_messages.DIRECT_CHANNEL,
        **headers: Any,
    ) -> dict[str, Any]:
        """
        A command of now, signed; to our mediator if no recipient is given.

        :param headers: as those of :func:`~mediatord.wallet.decentrl_messages.compose_command`.
        """
        now_ms = int(self.clock.seconds() * 1000)
        headers = {"timestamp_ms": now_ms, **headers}
        return decentrl_messages.compose_command(
            self.identity, channel, recipient_did or self.mediator.did, payload, **headers
        )

    async def ask(
        self,
        payload: dict[str, Any] | str,
        recipient_did: str | None = None,
        channel: ChannelType = decentrl_messages.DIRECT_CHANNEL,
        *,
        at: DecentrlMediator | None = None,
    ) -> dict[str, Any]:
        """
        Send a command; the reply.

        :param at: another mediator than our own.
        :raise Refused: it was not carried out.
        :raise Unreadable: the reply is none.
        """
        response = await self.post(
            decentrl_messages.encode_command(self.command(payload, recipient_did, channel)), at=at
        )
        return read_reply(response)

    async def find(
        self, query: PageQuery[Item], page: int, page_size: int, wanted: Mapping[str, Any] | None = None
    ) -> ResultPage[Item]:
        """
        A page of what our mediator keeps for us.

        :param wanted: the filter, as far as its members are not None; None for a query without one.
        """
        payload: dict[str, Any] = {"type": query.command, "pagination": {"page": page, "page_size": page_size}}
        if wanted is not None:
            payload["filter"] = {name: value for name, value in wanted.items() if value is not None}
        reply = await self.ask(payload)
        return read_page(reply.get("payload"), query.name, query.kind)

    async def post(self, body: bytes, *, at: DecentrlMediator | None = None) -> HTTPResponse:
        """POST bytes as they are."""
        url = (at or self.mediator).url
        headers = Headers({"Content-Type": [_JSON]})
        sent = self._http.post(url, data=body, headers=headers, allow_redirects=False)
        return await read_response(sent, self.clock)

    async def get(self, url: str) -> HTTPResponse:
        """GET what is public."""
        sent = self._http.get(url, headers=Headers({"Accept": [_JSON]}), allow_redirects=False)
        return await read_response(sent, self.clock)


def read_reply(response: HTTPResponse) -> dict[str, Any]:
    """
    The reply of a success.

    :raise Refused: it is the reply of a refusal, or no 200 at all.
    :raise Unreadable: it is something else.
    """
    value = read_object(response)
    if value.get("type") != "SUCCESS":
        raise UnreadableMessage("a reply that is neither success nor refusal")
    return value


def read_object(response: HTTPResponse) -> dict[str, Any]:
    """
    The JSON object of a response.

    :raise Refused: as :func:`read_reply`.
    :raise Unreadable: there is none.
    """
    try:
        value = encoding.loads_object(response.body)
    except ValueError:
        value = None
    if response.status != 200:
        raise CommandRefused(response.status, str((value or {}).get("code", "")))
    if value is None or response.headers.get("content-type", "").partition(";")[0] != _JSON:
        raise UnreadableMessage("a reply that is not JSON")
    return value


DEFAULT_PAGE_SIZE = 100


class ContractClient(DecentrlClient):
    """
    A wallet's contracts. Every method that asks a mediator raises :class:`~mediatord.wallet.decentrl_client.CommandRefused`
    when it refuses, and :class:`~mediatord.wallet.didcomm_messages.UnreadableMessage` when its answer does not pass the checks.

    :ivar agreements: contracts with other identities, as far as they are known.
    :ivar proposals: contracts that the other side has not answered yet.
    """

    def __init__(
        self,
        identity: DecentrlIdentity,
        mediator: DecentrlMediator,
        http: TreqClient,
        clock: IReactorTime,
        directory: MediatorDirectory | None = None,
    ) -> None:
        super().__init__(identity, mediator, http, clock, directory)
        self.agreements: list[ConcludedContract] = []
        self.proposals: list[ContractProposal] = []

    async def register(self, lifetime: float = YEAR_SECONDS) -> ConcludedContract:
        """
        Make a contract with our mediator, and so be registered.

        :param lifetime: seconds.
        """
        proposal = propose_contract(self.identity, self.mediator.did, self.now(), lifetime)
        reply = await self.ask(proposal.payload(self.mediator.prekey))
        try:
            signed = reply["payload"]["signed_communication_contract"]
        except (KeyError, TypeError):
            raise UnreadableMessage("a registration without a contract") from None
        return conclude_contract(proposal, signed, self.directory.signing_key)

    async def request_contract(self, peer_did: str, lifetime: float = YEAR_SECONDS) -> ContractProposal:
        """Ask another identity for a contract, at the mediator that its DID names."""
        at = await self.directory.mediator_of(peer_did)
        proposal = propose_contract(self.identity, peer_did, self.now(), lifetime)
        await self.ask(proposal.payload(parse_did(peer_did).prekey), peer_did, at=at)
        self.proposals.append(proposal)
        return proposal

    async def pending_requests(
        self, page: int = 0, page_size: int = DEFAULT_PAGE_SIZE
    ) -> ResultPage[ContractRequest]:
        """Requests for a contract with us."""
        return await self.find(PENDING_REQUESTS, page, page_size)

    def accept(self, request: ContractRequest) -> ConcludedContract:
        """
        Sign what somebody proposed; the other side does not know yet.

        :raise Unreadable: a check failed.
        """
        agreement = accept_contract(request, self.identity, self.now())
        self.agreements.append(agreement)
        return agreement

    async def save_contract(self, agreement: ConcludedContract) -> None:
        """Have our mediator keep a contract: from then on the other side may write to us."""
        await self.ask({"type": "SAVE_COMMUNICATION_CONTRACT", "signed_communication_contract": agreement.signed})

    async def respond(self, agreement: ConcludedContract) -> None:
        """Give a contract to the other side, at its own mediator: from then on we may write to it."""
        at = await self.directory.mediator_of(agreement.peer_did)
        payload = {"type": "COMMUNICATION_CONTRACT_RESPONSE", "signed_communication_contract": agreement.signed}
        await self.ask(payload, agreement.peer_did, at=at)

    async def acknowledge_requests(self, requests: Iterable[ContractRequest | str]) -> None:
        """Have requests for a contract removed."""
        ids = [one if isinstance(one, str) else one.id for one in requests]
        await self.ask(
            {"type": "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS", "communication_contract_ids": ids}
        )

    async def contracts(
        self, page: int = 0, page_size: int = DEFAULT_PAGE_SIZE, **wanted: Any
    ) -> ResultPage[StoredContract]:
        """
        Contracts that our mediator keeps for us.

        :param wanted: `did`, `expires_at_before`, `expires_at_after` (Unix seconds).
        """
        return await self.find(CONTRACTS, page, page_size, wanted)

    async def conclude(self) -> list[ConcludedContract]:
        """
        Look whether the other sides have answered our proposals; the contracts that came of it.

        :raise Unreadable: an answer is not what was proposed.
        """
        found = []
        for peer_did in {one.recipient_did for one in self.proposals}:
            for kept in await self._contracts_with(peer_did):
                if (proposal := self._proposal_of(kept)) is not None:
                    found.append(
                        conclude_contract(proposal, kept.signed_communication_contract, self.directory.signing_key)
                    )
                    self.agreements.append(found[-1])
                    self.proposals.remove(proposal)
        return found

    async def _contracts_with(self, peer_did: str) -> list[StoredContract]:
        found = await self.contracts(did=peer_did)
        kept = list(found.items)
        while len(kept) < found.total and found.items:
            found = await self.contracts(found.page + 1, did=peer_did)
            kept.extend(found.items)
        return kept

    def _proposal_of(self, kept: StoredContract) -> ContractProposal | None:
        terms = kept.signed_communication_contract.get("communication_contract")
        public = terms.get("requestor_encryption_public_key") if isinstance(terms, dict) else None
        return next((one for one in self.proposals if one.public == public), None)

    def agreements_with(self, peer_did: str) -> list[ConcludedContract]:
        """The contracts with somebody that have not expired, those that last longest first."""
        live = [one for one in self.agreements if one.peer_did == peer_did and one.expires_at > self.now()]
        return sorted(live, key=lambda one: one.expires_at, reverse=True)


async def make_contract(
    requestor: ContractClient, recipient: ContractClient, lifetime: float = YEAR_SECONDS
) -> tuple[ConcludedContract, ConcludedContract]:
    """
    All that two wallets do to get a contract (reference 7.5); how the requestor sees it, and how the recipient does.

    :param lifetime: seconds.
    """
    proposal = await requestor.request_contract(recipient.did, lifetime)
    waiting = (await recipient.pending_requests()).items
    request = next(one for one in waiting if one.requestor_ephemeral_public_key == proposal.public)
    accepted = recipient.accept(request)
    await recipient.save_contract(accepted)
    await recipient.respond(accepted)
    await recipient.acknowledge_requests([request])
    concluded = await requestor.conclude()
    return next(one for one in concluded if one.id == accepted.id), accepted


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """
    An event of our own history, in the clear.

    :param tags: what we want to find it by.
    :param timestamp: Unix seconds; None for now.
    """

    sender_did: str
    recipient_did: str
    text: str = field(repr=False)
    tags: Sequence[str] = field(default=(), repr=False)
    timestamp: float | None = None
    contract_id: str | None = None


class DecentrlWallet(ContractClient):
    """
    What comes for one identity, and what it keeps and says.

    Its methods raise as those of :class:`~mediatord.wallet.decentrl_client.ContractClient`.
    """

    async def send(self, peer_did: str, text: str, agreement: ConcludedContract | None = None) -> str:
        """
        Send an event to somebody, at the mediator that its DID names; the id that it has there.

        :param agreement: the contract to use; if none is named, the one that lasts longest.
        :raise LookupError: there is no contract.
        """
        if agreement is None:
            agreement = next(iter(self.agreements_with(peer_did)), None)
        if agreement is None:
            raise LookupError("no contract")
        at = await self.directory.mediator_of(peer_did)
        payload = seal_event(self.identity, agreement, text, self.now())
        reply = await self.ask(payload, peer_did, decentrl_messages.PRIVATE_CHANNEL, at=at)
        return _reply_id(reply, "pendingEventId")

    async def pending(
        self, page: int = 0, page_size: int = DEFAULT_PAGE_SIZE, **wanted: Any
    ) -> ResultPage[PendingEvent]:
        """
        Events that wait for us.

        :param wanted: `sender_did`.
        """
        return await self.find(PENDING_EVENTS, page, page_size, wanted)

    def open(self, event: PendingEvent) -> OpenedEvent:
        """
        Decrypt an event and check who wrote it.

        :raise Unreadable: a check failed, or there is no contract with its sender.
        """
        return open_event(event.payload, event.sender_did, self.agreements_with(event.sender_did))

    async def acknowledge(self, events: Iterable[PendingEvent | str]) -> None:
        """Have events removed from those that wait."""
        ids = [one if isinstance(one, str) else one.id for one in events]
        await self.ask({"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": ids})

    async def save_events(self, *entries: HistoryEntry) -> None:
        """Have our mediator keep events, encrypted for ourselves."""
        await self.ask({"type": "SAVE_EVENTS", "events": [self._sealed(entry) for entry in entries]})

    async def events(
        self, page: int = 0, page_size: int = DEFAULT_PAGE_SIZE, *, tags: Sequence[str] = (), **wanted: Any
    ) -> ResultPage[StoredEvent]:
        """
        Our history, as our mediator keeps it: :meth:`~mediatord.wallet.decentrl_messages.DecentrlIdentity.unseal` reads it.

        :param tags: one of them, in the clear.
        :param wanted: `participant_did`, `after_timestamp`, `before_timestamp`, `unprocessed_only`.
        """
        if tags:
            wanted["encrypted_tags"] = self._tags(tags)
        return await self.find(EVENTS, page, page_size, wanted)

    async def update_tags(self, tags: Mapping[str, Sequence[str]]) -> None:
        """Give events other tags, by their ids, and have them marked as processed."""
        events = [{"event_id": id_, "encrypted_tags": self._tags(given)} for id_, given in tags.items()]
        await self.ask({"type": "UPDATE_EVENT_TAGS", "events": events})

    async def publish(self, event: str, tags: Sequence[str] = (), channel_id: str | None = None) -> str:
        """Say something to everybody; the id that it has at our mediator."""
        now = self.now()
        payload: dict[str, Any] = {
            "type": "PUBLISH_PUBLIC_EVENT",
            "event": event,
            "tags": list(tags),
            "timestamp": now,
            "event_signature": sign_event(event, tags, now, self.identity.seed, channel_id),
        }
        if channel_id is not None:
            payload["channel_id"] = channel_id
        return _reply_id(await self.ask(payload, channel=decentrl_messages.PUBLIC_CHANNEL), "public_event_id")

    async def unpublish(self, event_id: str) -> None:
        """Take back what we published."""
        await self.ask(
            {"type": "DELETE_PUBLIC_EVENT", "public_event_id": event_id}, channel=decentrl_messages.PUBLIC_CHANNEL
        )

    async def public(
        self, publisher_did: str, *, at: DecentrlMediator | None = None, tags: Sequence[str] = (), **wanted: Any
    ) -> ResultPage[PublicEvent]:
        """
        What somebody said to everybody, checked to be theirs.

        :param at: where to look; the mediator that the publisher's DID names.
        :param tags: one of them.
        :param wanted: `after`, `before`, `channel_id`, `page`, `page_size`.
        """
        at = at or await self.directory.mediator_of(publisher_did)
        if tags:
            wanted["tags"] = ",".join(tags)
        response = await self.get(f"{at.public_url(publisher_did)}?{urlencode(wanted)}")
        found = read_page(read_object(response), "events", PublicEvent)
        if not all(_is_signed_by_publisher(one, publisher_did) for one in found.items):
            raise UnreadableMessage("a public event that its publisher did not sign")
        return found

    def _tags(self, tags: Sequence[str]) -> list[str]:
        return [self.identity.tag(tag) for tag in tags]

    def _sealed(self, entry: HistoryEntry) -> dict[str, Any]:
        sealed: dict[str, Any] = {
            "sender_did": entry.sender_did,
            "recipient_did": entry.recipient_did,
            "timestamp": self.now() if entry.timestamp is None else entry.timestamp,
            "payload": self.identity.seal(entry.text),
            "encrypted_tags": self._tags(entry.tags),
        }
        return sealed if entry.contract_id is None else {**sealed, "contract_id": entry.contract_id}


def _reply_id(reply: Mapping[str, Any], name: str) -> str:
    if not isinstance(reply.get(name), str):
        raise UnreadableMessage("a reply without an id")
    return str(reply[name])


def _is_signed_by_publisher(event: PublicEvent, publisher_did: str) -> bool:
    key = parse_did(publisher_did).signing_key
    timestamp = event.timestamp
    return verify_event_signature(event.event, event.tags, timestamp, event.event_signature, key, event.channel_id)
