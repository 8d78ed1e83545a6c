"""
A Decentrl wallet: discovery of mediators, commands over HTTP, contracts, events and public channels; and its
WebSocket for pushed events (DCTRL-0004 section 10).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlencode

from treq.client import HTTPClient
from twisted.internet.defer import Deferred, DeferredQueue, TimeoutError
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.web.client import ResponseFailed, ResponseNeverReceived
from twisted.web.http_headers import Headers

from mediatord.errors import UnresolvableDID
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import ChannelType
from mediatord.protocol.decentrl.crypto import sign_event, verify_event_signature
from mediatord.protocol.decentrl.did_decentrl import KeyType, decode_multibase_key, parse_did
from mediatord.protocol.didcomm.did_methods import locate_did_web
from mediatord.wallet.decentrl_messages import (
    CONTRACTS,
    DIRECT_CHANNEL,
    EVENTS,
    PENDING_EVENTS,
    PENDING_REQUESTS,
    PRIVATE_CHANNEL,
    PUBLIC_CHANNEL,
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
    compose_authentication,
    compose_command,
    conclude_contract,
    encode_command,
    open_event,
    propose_contract,
    read_page,
    seal_event,
)
from mediatord.wallet.didcomm_client import HTTPResponse, fetch_json, read_response
from mediatord.wallet.didcomm_messages import UnreadableMessage
from mediatord.wallet.didcomm_socket import (
    SOCKET_TIMEOUT_SECONDS,
    SocketClosedError,
    WalletWebSocket,
    open_wallet_socket,
)

_SERVICE = "#mediator-service"
DEFAULT_PAGE_SIZE = 100
_JSON = "application/json"
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class DecentrlMediator:
    """
    A mediator, as its DID document describes it.

    :param url: for commands.
    :param signing_key: Ed25519 public key.
    :param prekey: X25519 public key that registrations are encrypted to.
    """

    did: str
    url: str
    signing_key: bytes = field(repr=False)
    prekey: bytes = field(repr=False)

    @property
    def ws_url(self) -> str:
        """URL of the WebSocket."""
        scheme, _, rest = self.url.partition("://")
        return f"{'wss' if scheme == 'https' else 'ws'}://{rest.rstrip('/')}/ws"

    def public_url(self, publisher_did: str) -> str:
        """URL of the public channels of a DID, which is not percent-encoded in it (reference 10.3)."""
        return f"{self.url.rstrip('/')}/public/{publisher_did}"


def read_mediator_document(document: dict[str, Any]) -> DecentrlMediator:
    """
    Read the DID document of a mediator (DCTRL-0004 3.2).

    :raise UnreadableMessage: an entry that a wallet needs is missing or invalid.
    """
    try:
        did = str(document["id"])
        service = _find_entry(document["service"], _SERVICE, did + _SERVICE)
        return DecentrlMediator(
            did,
            str(service["serviceEndpoint"]["uri"]),
            _find_key(document["verificationMethod"], f"{did}#signing", "Ed25519"),
            _find_key(document["keyAgreement"], f"{did}#prekey", "X25519"),
        )
    except (KeyError, TypeError, ValueError):
        raise UnreadableMessage("not the document of a Decentrl mediator") from None


def _find_entry(entries: list[Any], *ids: str) -> dict[str, Any]:
    """The entry with one of these ids; others are ignored, references by id included."""
    for one in entries:
        if isinstance(one, dict) and one.get("id") in ids:
            return one
    raise KeyError


def _find_key(methods: list[Any], id_: str, kind: KeyType) -> bytes:
    return decode_multibase_key(str(_find_entry(methods, id_)["publicKeyMultibase"]), kind)


async def discover_decentrl_mediator(http: HTTPClient, url: str) -> DecentrlMediator:
    """
    Find the mediator at a URL.

    :raise UnreadableMessage: there is no valid document.
    """
    return read_mediator_document(await fetch_json(http, f"{url.rstrip('/')}/.well-known/did.json"))


async def resolve_decentrl_mediator(http: HTTPClient, did: str) -> DecentrlMediator:
    """
    Resolve the did:web of a mediator; on the loopback interface without TLS, unless the server requires it.

    :raise UnreadableMessage: another DID method, or there is no valid document.
    """
    if not did.startswith("did:web:"):
        raise UnreadableMessage("the mediator is no did:web")
    try:
        location = locate_did_web(did)
    except UnresolvableDID:
        raise UnreadableMessage("an invalid did:web") from None
    document = None
    if location.host in _LOOPBACK:
        try:
            document = await fetch_json(http, f"http{location.url.removeprefix('https')}")
        except (ResponseNeverReceived, ResponseFailed):
            pass  # a TLS server closes the connection
    mediator = read_mediator_document(document or await fetch_json(http, location.url))
    if mediator.did != did:
        raise UnreadableMessage("the document of another mediator")
    return mediator


class MediatorDirectory:
    """
    Public keys by DID, and mediators of identities.

    A did:decentrl contains both its key and its mediator's DID; a mediator's document is fetched once.
    """

    def __init__(self, http: HTTPClient) -> None:
        self._http = http
        self._known: dict[str, DecentrlMediator] = {}

    def add(self, mediator: DecentrlMediator) -> None:
        """Add a mediator."""
        self._known[mediator.did] = mediator

    async def mediator_of(self, did: str) -> DecentrlMediator:
        """
        The mediator that a did:decentrl names.

        :raise UnreadableMessage: it is not a did:decentrl, or its mediator is not found.
        """
        try:
            mediator_did = parse_did(did).mediator_did
        except ValueError:
            raise UnreadableMessage("not a did:decentrl") from None
        if mediator_did not in self._known:
            self.add(await resolve_decentrl_mediator(self._http, mediator_did))
        return self._known[mediator_did]

    def signing_key(self, did: str, key_id: str) -> bytes | None:
        """The Ed25519 public key with this id; None if there is none."""
        if key_id != f"{did}#signing":
            return None
        if did in self._known:
            return self._known[did].signing_key
        try:
            return parse_did(did).signing_key
        except ValueError:
            return None


class CommandRefused(Exception):
    """
    A mediator refused a command.

    :param status: HTTP status, or the close code of a socket.
    :param code: one of DCTRL-0004 section 11.
    """

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}".strip())
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """
    An event to store in the wallet's history, in plaintext.

    :param tags: for queries.
    :param timestamp: Unix seconds; None for now.
    """

    sender_did: str
    recipient_did: str
    text: str = field(repr=False)
    tags: Sequence[str] = field(default=(), repr=False)
    timestamp: float | None = None
    contract_id: str | None = None


class DecentrlWallet:
    """
    An identity, its account at a mediator, its contracts and its events.

    Methods that send commands raise :class:`CommandRefused` when the mediator refuses, and
    :class:`~mediatord.wallet.didcomm_messages.UnreadableMessage` when a response does not pass the checks.

    :param clock: for timestamps and time-outs.
    :param directory: may be shared by several wallets.
    :ivar concluded: contracts with other identities.
    :ivar proposals: contracts that the other side has not accepted yet.
    """

    def __init__(
        self,
        identity: DecentrlIdentity,
        mediator: DecentrlMediator,
        http: HTTPClient,
        clock: IReactorTime,
        directory: MediatorDirectory | None = None,
    ) -> None:
        self.identity = identity
        self.mediator = mediator
        self.clock = clock
        self.directory = directory or MediatorDirectory(http)
        self.directory.add(mediator)
        self.concluded: list[ConcludedContract] = []
        self.proposals: list[ContractProposal] = []
        self._http = http

    @classmethod
    def generate(
        cls,
        alias: str,
        mediator: DecentrlMediator,
        http: HTTPClient,
        clock: IReactorTime,
        directory: MediatorDirectory | None = None,
    ) -> Self:
        """A wallet with a new identity of this mediator, which is not registered yet."""
        return cls(DecentrlIdentity.generate(alias, mediator.did), mediator, http, clock, directory)

    @property
    def did(self) -> str:
        """The identity's DID."""
        return self.identity.did

    def now(self) -> int:
        """Unix seconds."""
        return int(self.clock.seconds())

    def command(
        self,
        payload: dict[str, Any] | str,
        recipient_did: str | None = None,
        channel: ChannelType = DIRECT_CHANNEL,
        **headers: Any,
    ) -> dict[str, Any]:
        """
        A signed command with the current time; to the wallet's mediator if no recipient is given.

        :param headers: as of :func:`~mediatord.wallet.decentrl_messages.compose_command`.
        """
        now_ms = int(self.clock.seconds() * 1000)
        headers = {"timestamp_ms": now_ms, **headers}
        return compose_command(self.identity, channel, recipient_did or self.mediator.did, payload, **headers)

    async def ask(
        self,
        payload: dict[str, Any] | str,
        recipient_did: str | None = None,
        channel: ChannelType = DIRECT_CHANNEL,
        *,
        at: DecentrlMediator | None = None,
    ) -> dict[str, Any]:
        """
        Send a command; the reply.

        :param at: another mediator than the wallet's.
        """
        return read_reply(await self.post(encode_command(self.command(payload, recipient_did, channel)), at=at))

    async def find(
        self, query: PageQuery[Item], page: int, page_size: int, wanted: Mapping[str, Any] | None = None
    ) -> ResultPage[Item]:
        """
        Query a page of records at the wallet's mediator.

        :param wanted: members of the filter, without those that are None; None for no filter.
        """
        payload: dict[str, Any] = {"type": query.command, "pagination": {"page": page, "page_size": page_size}}
        if wanted is not None:
            payload["filter"] = {name: value for name, value in wanted.items() if value is not None}
        reply = await self.ask(payload)
        return read_page(reply.get("payload"), query.name, query.kind)

    async def post(self, body: bytes, *, at: DecentrlMediator | None = None) -> HTTPResponse:
        """POST bytes to the mediator."""
        url = (at or self.mediator).url
        headers = Headers({"Content-Type": [_JSON]})
        sent = self._http.post(url, data=body, headers=headers, allow_redirects=False)
        return await read_response(sent, self.clock)

    async def get(self, url: str) -> HTTPResponse:
        """GET a public resource."""
        sent = self._http.get(url, headers=Headers({"Accept": [_JSON]}), allow_redirects=False)
        return await read_response(sent, self.clock)

    async def register(self, lifetime: float = YEAR_SECONDS) -> ConcludedContract:
        """
        Register by making a contract with the mediator.

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
        """Request a contract from another identity, at the mediator that its DID names."""
        at = await self.directory.mediator_of(peer_did)
        proposal = propose_contract(self.identity, peer_did, self.now(), lifetime)
        await self.ask(proposal.payload(parse_did(peer_did).prekey), peer_did, at=at)
        self.proposals.append(proposal)
        return proposal

    async def pending_requests(
        self, page: int = 0, page_size: int = DEFAULT_PAGE_SIZE
    ) -> ResultPage[ContractRequest]:
        """Contract requests of other identities."""
        return await self.find(PENDING_REQUESTS, page, page_size)

    def accept(self, request: ContractRequest) -> ConcludedContract:
        """
        Countersign a requested contract; see :meth:`save_contract` and :meth:`respond`.

        :raise UnreadableMessage: a check failed.
        """
        contract = accept_contract(request, self.identity, self.now())
        self.concluded.append(contract)
        return contract

    async def save_contract(self, contract: ConcludedContract) -> None:
        """Save a contract at the wallet's mediator, which then accepts events of the other side."""
        await self.ask({"type": "SAVE_COMMUNICATION_CONTRACT", "signed_communication_contract": contract.signed})

    async def respond(self, contract: ConcludedContract) -> None:
        """Send a contract to the mediator of the other side, which then accepts events of this wallet."""
        at = await self.directory.mediator_of(contract.peer_did)
        payload = {"type": "COMMUNICATION_CONTRACT_RESPONSE", "signed_communication_contract": contract.signed}
        await self.ask(payload, contract.peer_did, at=at)

    async def acknowledge_requests(self, requests: Iterable[ContractRequest | str]) -> None:
        """Remove contract requests."""
        ids = [one if isinstance(one, str) else one.id for one in requests]
        await self.ask(
            {"type": "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS", "communication_contract_ids": ids}
        )

    async def contracts(
        self, page: int = 0, page_size: int = DEFAULT_PAGE_SIZE, **wanted: Any
    ) -> ResultPage[StoredContract]:
        """
        Contracts saved at the wallet's mediator.

        :param wanted: `did`, `expires_at_before`, `expires_at_after` (Unix seconds).
        """
        return await self.find(CONTRACTS, page, page_size, wanted)

    async def conclude(self) -> list[ConcludedContract]:
        """
        Conclude the proposals that were accepted meanwhile; the new contracts.

        :raise UnreadableMessage: a contract is not what was proposed.
        """
        found = []
        for peer_did in {one.recipient_did for one in self.proposals}:
            for kept in await self._saved_contracts(peer_did):
                if (proposal := self._find_proposal(kept)) is not None:
                    found.append(
                        conclude_contract(proposal, kept.signed_communication_contract, self.directory.signing_key)
                    )
                    self.concluded.append(found[-1])
                    self.proposals.remove(proposal)
        return found

    async def _saved_contracts(self, peer_did: str) -> list[StoredContract]:
        found = await self.contracts(did=peer_did)
        kept = list(found.items)
        while len(kept) < found.total and found.items:
            found = await self.contracts(found.page + 1, did=peer_did)
            kept.extend(found.items)
        return kept

    def _find_proposal(self, kept: StoredContract) -> ContractProposal | None:
        terms = kept.signed_communication_contract.get("communication_contract")
        public = terms.get("requestor_encryption_public_key") if isinstance(terms, dict) else None
        return next((one for one in self.proposals if one.public == public), None)

    def contracts_with(self, peer_did: str) -> list[ConcludedContract]:
        """Contracts with a peer that have not expired, the one that lasts longest first."""
        live = [one for one in self.concluded if one.peer_did == peer_did and one.expires_at > self.now()]
        return sorted(live, key=lambda one: one.expires_at, reverse=True)

    async def send(self, peer_did: str, text: str, contract: ConcludedContract | None = None) -> str:
        """
        Send an event to the mediator that the peer's DID names; the id of the event.

        :param contract: by default the one that lasts longest.
        :raise LookupError: there is no contract.
        """
        if contract is None:
            contract = next(iter(self.contracts_with(peer_did)), None)
        if contract is None:
            raise LookupError("no contract")
        at = await self.directory.mediator_of(peer_did)
        payload = seal_event(self.identity, contract, text, self.now())
        reply = await self.ask(payload, peer_did, PRIVATE_CHANNEL, at=at)
        return _reply_id(reply, "pendingEventId")

    async def pending(
        self, page: int = 0, page_size: int = DEFAULT_PAGE_SIZE, **wanted: Any
    ) -> ResultPage[PendingEvent]:
        """
        Events queued for this wallet.

        :param wanted: `sender_did`.
        """
        return await self.find(PENDING_EVENTS, page, page_size, wanted)

    def open(self, event: PendingEvent) -> OpenedEvent:
        """
        Decrypt an event and verify its sender.

        :raise UnreadableMessage: a check failed, or there is no contract with the sender.
        """
        return open_event(event.payload, event.sender_did, self.contracts_with(event.sender_did))

    async def acknowledge(self, events: Iterable[PendingEvent | str]) -> None:
        """Remove queued events."""
        ids = [one if isinstance(one, str) else one.id for one in events]
        await self.ask({"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": ids})

    async def save_events(self, *entries: HistoryEntry) -> None:
        """Store events in the history, encrypted for this wallet."""
        await self.ask({"type": "SAVE_EVENTS", "events": [self._seal_entry(entry) for entry in entries]})

    async def events(
        self, page: int = 0, page_size: int = DEFAULT_PAGE_SIZE, *, tags: Sequence[str] = (), **wanted: Any
    ) -> ResultPage[StoredEvent]:
        """
        Stored events; :meth:`~mediatord.wallet.decentrl_messages.DecentrlIdentity.unseal` decrypts their payloads.

        :param tags: plaintext; an event matches that has one of them.
        :param wanted: `participant_did`, `after_timestamp`, `before_timestamp`, `unprocessed_only`.
        """
        if tags:
            wanted["encrypted_tags"] = self._tags(tags)
        return await self.find(EVENTS, page, page_size, wanted)

    async def update_tags(self, tags: Mapping[str, Sequence[str]]) -> None:
        """Replace the tags of events, by their ids, and mark them as processed."""
        events = [{"event_id": id_, "encrypted_tags": self._tags(given)} for id_, given in tags.items()]
        await self.ask({"type": "UPDATE_EVENT_TAGS", "events": events})

    async def publish(self, event: str, tags: Sequence[str] = (), channel_id: str | None = None) -> str:
        """Publish an event; its id."""
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
        return _reply_id(await self.ask(payload, channel=PUBLIC_CHANNEL), "public_event_id")

    async def unpublish(self, event_id: str) -> None:
        """Delete a published event."""
        await self.ask({"type": "DELETE_PUBLIC_EVENT", "public_event_id": event_id}, channel=PUBLIC_CHANNEL)

    async def public(
        self, publisher_did: str, *, at: DecentrlMediator | None = None, tags: Sequence[str] = (), **wanted: Any
    ) -> ResultPage[PublicEvent]:
        """
        Public events of a publisher, with verified signatures.

        :param at: by default the mediator that the publisher's DID names.
        :param tags: an event matches that has one of them.
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

    def _seal_entry(self, entry: HistoryEntry) -> dict[str, Any]:
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


async def make_contract(
    requestor: DecentrlWallet, recipient: DecentrlWallet, lifetime: float = YEAR_SECONDS
) -> tuple[ConcludedContract, ConcludedContract]:
    """
    Conclude a contract between two wallets (reference 7.5), as the requestor and as the recipient have it.

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


def read_reply(response: HTTPResponse) -> dict[str, Any]:
    """
    Read the reply of a successful command.

    :raise CommandRefused: the HTTP status is not 200.
    :raise UnreadableMessage: the reply is invalid.
    """
    value = read_object(response)
    if value.get("type") != "SUCCESS":
        raise UnreadableMessage("a reply that is neither success nor refusal")
    return value


def read_object(response: HTTPResponse) -> dict[str, Any]:
    """
    Read the JSON object of a response.

    :raise CommandRefused: the HTTP status is not 200.
    :raise UnreadableMessage: there is no JSON object.
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


class DecentrlSocket(WalletWebSocket):
    """
    An open socket; see :func:`connect_decentrl_socket`.

    :ivar pushed: pushed frames, for :func:`~mediatord.wallet.decentrl_messages.read_pushed_events`.
    :ivar authenticated: fires when authentication has succeeded; fails with :class:`CommandRefused` or
        :class:`SocketClosedError`.
    :ivar pings: number of answered pings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pushed: DeferredQueue[dict[str, Any]] = DeferredQueue()
        self.authenticated: Deferred[None] = Deferred()
        self.pings = 0
        self._error_code: str | None = None

    def send(self, value: dict[str, Any]) -> None:
        """
        Send a frame.

        :raise SocketClosedError: the socket is closed.
        """
        self.send_frame(encoding.dumps(value))

    def frame_received(self, payload: bytes) -> None:
        """Dispatch a frame. Never raises."""
        try:
            frame = encoding.loads_object(payload)
        except ValueError:
            self.unexpected.append(payload)
            return
        kind = frame.get("type")
        if kind == "PING":
            self.pings += 1
            self.send({"type": "PONG", "timestamp": frame.get("timestamp")})
        elif kind == "AUTH_SUCCESS" and not self.authenticated.called:
            self.authenticated.callback(None)
        elif kind == "AUTH_FAILED" and not self.authenticated.called:
            self._error_code = str(frame.get("code"))  # the close frame that follows has the status
        elif kind in ("PENDING_EVENTS", "CONTRACTS_UPDATED"):
            self.pushed.put(frame)
        else:
            self.unexpected.append(payload)

    def fail_pending(self, code: int) -> None:
        """Fail authentication if it is pending."""
        if not self.authenticated.called:
            refused = None if self._error_code is None else CommandRefused(code, self._error_code)
            self.authenticated.errback(refused or SocketClosedError(code))


async def connect_decentrl_socket(
    reactor: Any, wallet: DecentrlWallet, *, endpoint: IStreamClientEndpoint | None = None
) -> DecentrlSocket:
    """
    Open a socket to the wallet's mediator and authenticate.

    :raise CommandRefused: authentication failed.
    :raise SocketClosedError: the mediator refused the socket.
    """
    socket = await open_wallet_socket(reactor, wallet.mediator.ws_url, DecentrlSocket(), endpoint)
    socket.send(compose_authentication(wallet.identity, int(wallet.clock.seconds() * 1000)))
    try:
        await socket.authenticated.addTimeout(SOCKET_TIMEOUT_SECONDS, reactor)
    except TimeoutError:
        socket.close()
        raise
    return socket
