"""Identities, commands, replies, contracts and events of a Decentrl wallet, without I/O (reference 1 to 7)."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, Generic, TypeVar

from nacl.bindings import crypto_scalarmult_base, crypto_sign_seed_keypair
from pydantic import Field

from mediatord.errors import InvalidCommand
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
from mediatord.protocol.decentrl.crypto import (
    decode_public_key,
    decrypt,
    derive_shared_secret,
    encrypt,
    generate_key_pair,
    verify_json,
)
from mediatord.protocol.decentrl.did_decentrl import make_did, parse_did
from mediatord.protocol.encoding import encode_base64
from mediatord.wallet.didcomm_messages import UnreadableMessage

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


def encode_command(command: dict[str, Any]) -> bytes:
    """The command as it is sent."""
    return encoding.dumps(command)


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


class _Pagination(WireModel):
    page: int
    page_size: int
    total: int


@dataclass(frozen=True, slots=True)
class PageQuery(Generic[Item]):
    """A kind of query. :param name: of the list in the reply."""

    command: str
    name: str
    kind: type[Item]


PENDING_REQUESTS = PageQuery(
    "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS", "pending_communication_contract_requests", ContractRequest
)
CONTRACTS = PageQuery("QUERY_COMMUNICATION_CONTRACTS", "communication_contracts", StoredContract)
PENDING_EVENTS = PageQuery("QUERY_PENDING_EVENTS", "pending_events", PendingEvent)
EVENTS = PageQuery("QUERY_EVENTS", "events", StoredEvent)


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
            "encrypted_contract_request": encrypt(
                encoding.dumps(self.request), derive_shared_secret(self.private, prekey)
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
    private, public = generate_key_pair()
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
        public = decode_public_key(request.requestor_ephemeral_public_key)
        plaintext = decrypt(request.encrypted_contract_request, derive_shared_secret(identity.prekey, public))
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
    private, own = generate_key_pair()
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
        public = decode_public_key(signed["communication_contract"][f"{peer}_encryption_public_key"])
        return ConcludedContract(peer_did, signed, derive_shared_secret(private, public))
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
    return encrypt(encoding.dumps({**envelope, "signature": identity.sign(envelope)}), contract.root_secret)


def open_event(payload: str, sender_did: str, contracts: Iterable[ConcludedContract]) -> OpenedEvent:
    """
    Decrypt an event and verify its sender.

    :param contracts: with the sender, tried in turn.
    :raise UnreadableMessage: none of them decrypts it, or the sender did not sign it.
    """
    for contract in contracts:
        try:
            plaintext = decrypt(payload, contract.root_secret)
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
    if not verify_json(signed, signature, key):
        raise UnreadableMessage("an event that its sender did not sign")
    if not isinstance(signed["event"], str) or not isinstance(signed["timestamp"], int | float):
        raise UnreadableMessage("not an event")
    return signed["event"], float(signed["timestamp"])
