"""
A Decentrl wallet: identities, contracts and events; commands over HTTP, discovery of mediators, public channels; and
its WebSocket for pushed events (reference 1 to 7, DCTRL-0004 section 10).
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, Generic, Self, TypeVar
from urllib.parse import urlencode

from nacl.bindings import crypto_scalarmult_base, crypto_sign_seed_keypair
from pydantic import Field
from treq.client import HTTPClient
from twisted.internet.defer import Deferred, DeferredQueue, TimeoutError
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.web.client import ResponseFailed, ResponseNeverReceived
from twisted.web.http_headers import Headers

from mediatord.errors import InvalidCommand, UnresolvableDID
from mediatord.protocol import encoding
from mediatord.protocol.decentrl import crypto
from mediatord.protocol.decentrl.canonical_json import canonicalize
from mediatord.protocol.decentrl.commands import ChannelType, WireModel
from mediatord.protocol.decentrl.contracts import (
    countersign_contract,
    parse_registration_request,
    sign_contract_request,
    verify_contract_signatures,
    verify_request_signature,
)
from mediatord.protocol.decentrl.did_decentrl import KeyType, decode_multibase_key, make_did, parse_did
from mediatord.protocol.didcomm.did_methods import locate_did_web
from mediatord.protocol.didcomm.push_notifications import PushServiceName
from mediatord.protocol.encoding import encode_base64
from mediatord.wallet.didcomm_client import HTTPResponse, fetch_json, read_response
from mediatord.wallet.didcomm_messages import UnreadableMessage
from mediatord.wallet.didcomm_socket import (
    SOCKET_TIMEOUT_SECONDS,
    SocketClosedError,
    WalletWebSocket,
    open_wallet_socket,
)

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class DecentrlIdentity:
    """
    A did:decentrl and its private keys.

    :param mediator_did: of the mediator that the DID names.
    :param seed: Ed25519 seed.
    :param prekey: X25519 private key that contract requests are encrypted to.
    :param storage_key: AES-256 key of stored events.
    """

    did: str
    mediator_did: str
    seed: bytes = field(repr=False)
    prekey: bytes = field(repr=False)
    storage_key: bytes = field(repr=False)

    @classmethod
    def generate(cls, alias: str, mediator_did: str) -> DecentrlIdentity:
        """A new identity with new keys."""
        seed, prekey, storage_key = (secrets.token_bytes(_KEY_BYTES) for _ in range(3))
        return cls.of_keys(alias, mediator_did, seed=seed, prekey=prekey, storage_key=storage_key)

    @classmethod
    def of_keys(
        cls, alias: str, mediator_did: str, *, seed: bytes, prekey: bytes, storage_key: bytes, raw: bool = False
    ) -> DecentrlIdentity:
        """
        The identity of given keys.

        :param raw: write keys without their multicodec prefix, as some texts read (reference section 2).
        """
        did = make_did(alias, crypto_sign_seed_keypair(seed)[0], derive_public_key(prekey), mediator_did, raw=raw)
        return cls(did, mediator_did, seed, prekey, storage_key)

    @property
    def signing_key_id(self) -> str:
        """Id of the signing key in the DID document."""
        return f"{self.did}#signing"

    @property
    def signing_key(self) -> bytes:
        """Ed25519 public key."""
        public: bytes = crypto_sign_seed_keypair(self.seed)[0]
        return public

    def sign(self, value: Any) -> str:
        """Sign JSON."""
        return crypto.sign_json(value, self.seed)

    def tag(self, text: str) -> str:
        """Encrypt a tag, deterministically, for queries at the mediator (reference 5.3)."""
        return crypto.make_encrypted_tag(text, self.seed)

    def seal(self, text: str) -> str:
        """Encrypt with the storage key."""
        return crypto.encrypt(text.encode(), self.storage_key)

    def unseal(self, text: str) -> str:
        """
        The inverse of :meth:`seal`.

        :raise ValueError: not encrypted with this key.
        """
        return crypto.decrypt(text, self.storage_key).decode()


def derive_public_key(private: bytes) -> bytes:
    """The X25519 public key of a private one."""
    public: bytes = crypto_scalarmult_base(private)
    return public


DIRECT_CHANNEL: ChannelType = "DIRECT_AUTHENTICATED"
PRIVATE_CHANNEL: ChannelType = "TWO_WAY_PRIVATE"
PUBLIC_CHANNEL: ChannelType = "ONE_WAY_PUBLIC"


def compose_command(
    identity: DecentrlIdentity,
    channel: ChannelType,
    recipient_did: str,
    payload: dict[str, Any] | str,
    /,
    timestamp_ms: int,
    **headers: Any,
) -> dict[str, Any]:
    """
    A signed command.

    :param headers: in addition to or instead of the usual ones, such as `nonce`.
    """
    header = {
        "channel": channel,
        "sender_did": identity.did,
        "sender_signing_key_id": identity.signing_key_id,
        "recipient_did": recipient_did,
        "timestamp": timestamp_ms,
        "nonce": str(uuid.uuid4()),
        **headers,
    }
    return {"header": header, "payload": payload, "signature": identity.sign({"header": header, "payload": payload})}


def compose_authentication(identity: DecentrlIdentity, timestamp_ms: int, **members: Any) -> dict[str, Any]:
    """
    The signed first message on a socket.

    :param members: as `headers` of :func:`compose_command`.
    """
    content = {
        "did": identity.did,
        "signing_key_id": identity.signing_key_id,
        "timestamp": timestamp_ms,
        "nonce": str(uuid.uuid4()),
        **members,
    }
    return {"type": "AUTHENTICATE", **content, "signature": identity.sign(content)}


Item = TypeVar("Item", bound=WireModel)


@dataclass(frozen=True, slots=True)
class ResultPage(Generic[Item]):
    """A page of records. :param total: number of matching records."""

    items: tuple[Item, ...]
    page: int
    page_size: int
    total: int


class ContractRequest(WireModel):
    """A contract request of another identity."""

    id: str
    sender_did: str
    encrypted_contract_request: Annotated[str, Field(repr=False)]
    requestor_ephemeral_public_key: Annotated[str, Field(repr=False)]


class StoredContract(WireModel):
    """A contract saved at the mediator."""

    id: str
    signed_communication_contract: Annotated[dict[str, Any], Field(repr=False)]


class PendingEvent(WireModel):
    """A queued event."""

    id: str
    sender_did: str
    payload: Annotated[str, Field(repr=False)]


class StoredEvent(WireModel):
    """An event of the history, encrypted; the time is the wallet's."""

    id: str
    payload: Annotated[str, Field(repr=False)]
    encrypted_tags: Annotated[list[str], Field(repr=False)]
    timestamp: float


class PublicEvent(WireModel):
    """An event of a public channel; the time is in Unix seconds."""

    id: str
    event: Annotated[str, Field(repr=False)]
    tags: Annotated[list[str], Field(repr=False)]
    timestamp: float
    event_signature: Annotated[str, Field(repr=False)]
    channel_id: str | None = None


@dataclass(frozen=True, slots=True)
class PushDevices:
    """
    Devices for push notifications.

    :param services: that the mediator has configured.
    :param mediator: its id in wake-ups.
    :param vapid_public_key: for `PushManager.subscribe()`; None without Web Push.
    :param devices: in order of registration; each with `service`, and the values that it was registered with.
    """

    services: tuple[str, ...]
    mediator: str
    vapid_public_key: str | None
    devices: list[dict[str, Any]] = field(repr=False)


class _PushDevicesPayload(WireModel):
    services: list[str]
    mediator: str
    vapid_public_key: str | None = None
    encrypted_push_devices: Annotated[str, Field(repr=False)]
    ephemeral_public_key: str


class _Pagination(WireModel):
    page: int
    page_size: int
    total: int


def read_page(value: Any, name: str, kind: type[Item]) -> ResultPage[Item]:
    """
    Read a page of records.

    :param value: object with the members `name` and `pagination`.
    :raise UnreadableMessage: it is invalid.
    """
    try:
        items = tuple(kind.model_validate(one) for one in value[name])
        pagination = _Pagination.model_validate(value["pagination"])
    except (KeyError, TypeError, ValueError):
        raise UnreadableMessage(f"not a page of {name}") from None
    return ResultPage(items, pagination.page, pagination.page_size, pagination.total)


def read_pushed_events(frame: Mapping[str, Any]) -> tuple[PendingEvent, ...]:
    """
    Read the events of a pushed frame; none if it is about contracts.

    :raise UnreadableMessage: it is another frame.
    """
    if frame.get("type") == "CONTRACTS_UPDATED":
        return ()
    try:
        if frame["type"] != "PENDING_EVENTS":
            raise ValueError
        return tuple(PendingEvent.model_validate(one) for one in frame["events"])
    except (KeyError, TypeError, ValueError):
        raise UnreadableMessage("not a push") from None


SigningKeyLookup = Callable[[str, str], bytes | None]

YEAR_SECONDS = 31_536_000


@dataclass(frozen=True, slots=True)
class ContractProposal:
    """
    A contract signed by its requestor only.

    :param request: plaintext of the request.
    :param private: X25519 private key of the requestor for this contract.
    :param public: its public key, as in the contract.
    """

    recipient_did: str
    request: dict[str, Any] = field(repr=False)
    private: bytes = field(repr=False)
    public: str = field(repr=False)

    def payload(self, prekey: bytes) -> dict[str, Any]:
        """
        The payload of REQUEST_COMMUNICATION_CONTRACT.

        :param prekey: the recipient's.
        """
        return {
            "type": "REQUEST_COMMUNICATION_CONTRACT",
            "encrypted_contract_request": crypto.encrypt(
                encoding.dumps(self.request), crypto.derive_shared_secret(self.private, prekey)
            ),
            "requestor_ephemeral_public_key": self.public,
        }


@dataclass(frozen=True, slots=True)
class ConcludedContract:
    """
    A contract signed by both sides.

    :param signed: contract and signatures.
    :param root_secret: key of all events between the two.
    """

    peer_did: str
    signed: dict[str, Any] = field(repr=False)
    root_secret: bytes = field(repr=False)

    @property
    def terms(self) -> dict[str, Any]:
        """The contract without signatures."""
        terms: dict[str, Any] = self.signed["communication_contract"]
        return terms

    @property
    def id(self) -> str:
        """Id, the same for both sides (reference 7.4)."""
        return sha256(canonicalize(self.terms)).hexdigest()

    @property
    def expires_at(self) -> float:
        """Unix seconds."""
        return float(self.terms["expires_at"])


def propose_contract(
    identity: DecentrlIdentity, recipient_did: str, now: float, lifetime: float = YEAR_SECONDS
) -> ContractProposal:
    """
    Propose a contract. The signature does not cover the recipient's key, which does not exist yet (reference 7.2).

    :param now: Unix seconds, as are all times of contracts.
    """
    private, public = crypto.generate_key_pair()
    terms = {
        "requestor_did": identity.did,
        "recipient_did": recipient_did,
        "requestor_signing_key_id": identity.signing_key_id,
        "recipient_signing_key_id": f"{recipient_did}#signing",
        "requestor_encryption_public_key": encode_base64(public),
        "expires_at": int(now + lifetime),
        "timestamp": int(now),
    }
    request = {"communication_contract": terms, "requestor_signature": sign_contract_request(terms, identity.seed)}
    return ContractProposal(recipient_did, request, private, encode_base64(public))


def accept_contract(request: ContractRequest, identity: DecentrlIdentity, now: float) -> ConcludedContract:
    """
    Countersign a requested contract.

    :raise UnreadableMessage: it is not for this identity, not authentic, or expired.
    """
    try:
        public = crypto.decode_public_key(request.requestor_ephemeral_public_key)
        plaintext = crypto.decrypt(
            request.encrypted_contract_request, crypto.derive_shared_secret(identity.prekey, public)
        )
        proposed = parse_registration_request(plaintext)
        requestor = parse_did(request.sender_did)
    except (ValueError, InvalidCommand):
        raise UnreadableMessage("a request for a contract that does not open") from None
    terms = proposed.contract
    if (terms["requestor_did"], terms["recipient_did"]) != (request.sender_did, identity.did):
        raise UnreadableMessage("a request for a contract between others")
    if terms["requestor_signing_key_id"] != requestor.signing_key_id:
        raise UnreadableMessage("a request for a contract with a key of somebody else")
    if not verify_request_signature(proposed, requestor.signing_key):
        raise UnreadableMessage("a request for a contract that was not signed")
    if not terms["expires_at"] > now:
        raise UnreadableMessage("a request for a contract that has expired")
    private, own = crypto.generate_key_pair()
    signed = countersign_contract(proposed, mediator_did=identity.did, encryption_key=own, seed=identity.seed)
    return _make_concluded_contract(signed, request.sender_did, private, "requestor")


def conclude_contract(
    proposal: ContractProposal, signed: dict[str, Any], signing_key: SigningKeyLookup
) -> ConcludedContract:
    """
    Conclude a proposal with the contract that the recipient has signed.

    :raise UnreadableMessage: it is another contract, or a signature is missing.
    """
    try:
        terms = signed["communication_contract"]
        ours = proposal.request["communication_contract"]
        same = all(terms[name] == value for name, value in ours.items())
    except (KeyError, TypeError):
        raise UnreadableMessage("not a contract") from None
    if not same:
        raise UnreadableMessage("a contract that is not what was proposed")
    if not verify_contract_signatures(signed, signing_key):
        raise UnreadableMessage("a contract that not both have signed")
    return _make_concluded_contract(signed, proposal.recipient_did, proposal.private, "recipient")


def _make_concluded_contract(signed: dict[str, Any], peer_did: str, private: bytes, peer: str) -> ConcludedContract:
    """:param peer: role of the other side in the contract."""
    try:
        public = crypto.decode_public_key(signed["communication_contract"][f"{peer}_encryption_public_key"])
        return ConcludedContract(peer_did, signed, crypto.derive_shared_secret(private, public))
    except (KeyError, ValueError):
        raise UnreadableMessage("a contract without a key") from None


_SIGNED_MEMBERS = ("contract_id", "event", "timestamp")


@dataclass(frozen=True, slots=True)
class OpenedEvent:
    """
    An authenticated event of another identity.

    :param contract: that it was encrypted under.
    :param text: the event, usually JSON.
    :param timestamp: Unix seconds.
    """

    sender_did: str
    contract: ConcludedContract
    text: str = field(repr=False)
    timestamp: float


def seal_event(identity: DecentrlIdentity, contract: ConcludedContract, text: str, timestamp: int) -> str:
    """
    Sign and encrypt an event for the other side of a contract.

    :param timestamp: Unix seconds.
    """
    envelope = {"contract_id": contract.id, "event": text, "timestamp": timestamp}
    return crypto.encrypt(encoding.dumps({**envelope, "signature": identity.sign(envelope)}), contract.root_secret)


def open_event(payload: str, sender_did: str, contracts: Iterable[ConcludedContract]) -> OpenedEvent:
    """
    Decrypt an event and verify its sender.

    :param contracts: with the sender, tried in turn.
    :raise UnreadableMessage: none of them decrypts it, or the sender did not sign it.
    """
    for contract in contracts:
        try:
            plaintext = crypto.decrypt(payload, contract.root_secret)
        except ValueError:
            continue
        return OpenedEvent(sender_did, contract, *_check_event(plaintext, sender_did))
    raise UnreadableMessage("encrypted under no contract that we have with its sender")


def _check_event(plaintext: bytes, sender_did: str) -> tuple[str, float]:
    try:
        envelope: dict[str, Any] = encoding.loads_object(plaintext)
        signed = {name: envelope[name] for name in _SIGNED_MEMBERS}
        signature, key = envelope["signature"], parse_did(sender_did).signing_key
    except (KeyError, ValueError):
        raise UnreadableMessage("not an event") from None
    if not crypto.verify_json(signed, signature, key):
        raise UnreadableMessage("an event that its sender did not sign")
    if not isinstance(signed["event"], str) or not isinstance(signed["timestamp"], int | float):
        raise UnreadableMessage("not an event")
    return signed["event"], float(signed["timestamp"])


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
    if location.host in _LOOPBACK:
        try:
            document = await fetch_json(http, f"http{location.url.removeprefix('https')}")
        except (ResponseNeverReceived, ResponseFailed):  # a TLS server closes the connection
            document = await fetch_json(http, location.url)
        except UnreadableMessage as error:  # a proxy answers plain HTTP on a TLS port with an error page
            try:
                document = await fetch_json(http, location.url)
            except (ResponseNeverReceived, ResponseFailed):
                raise error from None
    else:
        document = await fetch_json(http, location.url)
    mediator = read_mediator_document(document)
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

        :param headers: as of :func:`~mediatord.wallet.decentrl_client.compose_command`.
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
        return read_reply(await self.post(encoding.dumps(self.command(payload, recipient_did, channel)), at=at))

    async def _query(
        self, name: str, kind: type[Item], page: int, page_size: int, wanted: Mapping[str, Any] | None = None
    ) -> ResultPage[Item]:
        """
        Query a page of records at the wallet's mediator.

        :param name: of the list in the reply, and of the command in upper case.
        :param wanted: members of the filter, without those that are None; None for no filter.
        """
        payload = {"type": f"QUERY_{name.upper()}", "pagination": {"page": page, "page_size": page_size}}
        if wanted is not None:
            payload["filter"] = {name: value for name, value in wanted.items() if value is not None}
        reply = await self.ask(payload)
        return read_page(reply.get("payload"), name, kind)

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
        return await self._query("pending_communication_contract_requests", ContractRequest, page, page_size)

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
        return await self._query("communication_contracts", StoredContract, page, page_size, wanted)

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
        return await self._query("pending_events", PendingEvent, page, page_size, wanted)

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
        Stored events; :meth:`~mediatord.wallet.decentrl_client.DecentrlIdentity.unseal` decrypts their payloads.

        :param tags: plaintext; an event matches that has one of them.
        :param wanted: `participant_did`, `after_timestamp`, `before_timestamp`, `unprocessed_only`.
        """
        if tags:
            wanted["encrypted_tags"] = self._tags(tags)
        return await self._query("events", StoredEvent, page, page_size, wanted)

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
            "event_signature": crypto.sign_event(event, tags, now, self.identity.seed, channel_id),
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

    async def set_push_device(self, service: PushServiceName, values: Mapping[str, Any]) -> None:
        """
        Register a device for push notifications.

        :param values: as of :meth:`~mediatord.wallet.didcomm_client.MediationRequests.set_push_device`.
        """
        private, public = crypto.generate_key_pair()
        secret = crypto.derive_shared_secret(private, self.mediator.prekey)
        await self.ask(
            {
                "type": "SET_PUSH_DEVICE",
                "encrypted_push_device": crypto.encrypt(encoding.dumps({**values, "service": service}), secret),
                "sender_ephemeral_public_key": encode_base64(public),
            }
        )

    async def push_devices(self) -> PushDevices:
        """The registered devices, and what the mediator offers."""
        private, public = crypto.generate_key_pair()
        reply = await self.ask({"type": "QUERY_PUSH_DEVICES", "sender_ephemeral_public_key": encode_base64(public)})
        try:
            found = _PushDevicesPayload.model_validate(reply["payload"])
            secret = crypto.derive_shared_secret(private, crypto.decode_public_key(found.ephemeral_public_key))
            devices = encoding.loads(crypto.decrypt(found.encrypted_push_devices, secret))
        except (KeyError, ValueError):
            raise UnreadableMessage("not a list of devices") from None
        return PushDevices(tuple(found.services), found.mediator, found.vapid_public_key, devices)

    async def remove_push_devices(self, service: PushServiceName) -> None:
        """Remove all devices of one service."""
        await self.ask({"type": "REMOVE_PUSH_DEVICES", "service": service})

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
    return crypto.verify_event_signature(
        event.event, event.tags, timestamp, event.event_signature, key, event.channel_id
    )


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

    :ivar pushed: pushed frames, for :func:`~mediatord.wallet.decentrl_client.read_pushed_events`.
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
