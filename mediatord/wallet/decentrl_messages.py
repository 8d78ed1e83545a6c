"""
Throw-away identities: a did:decentrl and the three keys behind it (reference sections 1 and 2).

What an identity says to a mediator, built and signed (DCTRL-0004 sections 4 and 10.2).

What a mediator answers, read as strictly as it is specified (DCTRL-0004 section 8).

Communication contracts between identities: proposing, accepting, and what both get from it (reference 7).

Events on their way between two identities: signed by one, encrypted under their contract (reference section 5).
"""

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
    A DID whose private keys we hold.

    :param mediator_did: of the mediator that the DID names.
    :param seed: Ed25519, signs.
    :param prekey: X25519 private key that requests for a contract are encrypted to.
    :param storage_key: AES-256, for what only its owner is to read.
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
        """What the signing key is called in the DID document."""
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
        """What stands for a tag at the mediator: always the same, and nothing to anybody else (reference 5.3)."""
        return crypto.make_encrypted_tag(text, self.seed)

    def seal(self, text: str) -> str:
        """Encrypt for ourselves."""
        return crypto.encrypt(text.encode(), self.storage_key)

    def unseal(self, text: str) -> str:
        """
        The reverse of :meth:`seal`.

        :raise ValueError: it was not encrypted by us, or not for us.
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
    A command, signed.

    :param headers: added to or replacing those that follow from the arguments; `nonce`, for one.
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
    The first message on a socket, signed.

    :param members: as `headers` of :func:`compose`.
    """
    said = {
        "did": identity.did,
        "signing_key_id": identity.signing_key_id,
        "timestamp": timestamp_ms,
        "nonce": str(uuid.uuid4()),
        **members,
    }
    return {"type": "AUTHENTICATE", **said, "signature": identity.sign(said)}


def encode_command(command: dict[str, Any]) -> bytes:
    """As it goes over the wire."""
    return encoding.dumps(command)


Item = TypeVar("Item", bound=WireModel)


@dataclass(frozen=True, slots=True)
class ResultPage(Generic[Item]):
    """:param total: how many there are in all."""

    items: tuple[Item, ...]
    page: int
    page_size: int
    total: int


class ContractRequest(WireModel):
    """A request for a contract that waits for us."""

    id: str
    sender_did: str
    encrypted_contract_request: Annotated[str, Field(repr=False)]
    requestor_ephemeral_public_key: Annotated[str, Field(repr=False)]


class StoredContract(WireModel):
    """A contract that the mediator keeps for us."""

    id: str
    signed_communication_contract: Annotated[dict[str, Any], Field(repr=False)]


class PendingEvent(WireModel):
    """An event that waits for us."""

    id: str
    sender_did: str
    payload: Annotated[str, Field(repr=False)]


class StoredEvent(WireModel):
    """An event that the mediator keeps for us, as it keeps it; the time is the one that we gave."""

    id: str
    payload: Annotated[str, Field(repr=False)]
    encrypted_tags: Annotated[list[str], Field(repr=False)]
    timestamp: float


class PublicEvent(WireModel):
    """An event of a public channel; the time is Unix seconds."""

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
    """:param name: what the reply calls its list."""

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
    A page of results.

    :param value: what has `name` and `pagination`.
    :raise Unreadable: it is not.
    """
    try:
        items = tuple(kind.model_validate(one) for one in value[name])
        pagination = _Pagination.model_validate(value["pagination"])
    except (KeyError, TypeError, ValueError):
        raise UnreadableMessage(f"not a page of {name}") from None
    return ResultPage(items, pagination.page, pagination.page_size, pagination.total)


def read_pushed_events(frame: Mapping[str, Any]) -> tuple[PendingEvent, ...]:
    """
    The events that a socket was told of; none when the frame is about contracts.

    :raise Unreadable: it is something else.
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
    A contract that we have signed and the other side has not.

    :param request: what goes to the other side, encrypted.
    :param private: the X25519 private key that we made for this contract.
    :param public: its public half, as it stands in the contract.
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
    A contract that both have signed, and what only the two of them know.

    :param signed: both signatures and what they are for.
    :param root_secret: the key of all events between them.
    """

    peer_did: str
    signed: dict[str, Any] = field(repr=False)
    root_secret: bytes = field(repr=False)

    @property
    def terms(self) -> dict[str, Any]:
        """The contract itself."""
        terms: dict[str, Any] = self.signed["communication_contract"]
        return terms

    @property
    def id(self) -> str:
        """The same for both (reference 7.4)."""
        return sha256(canonicalize(self.terms)).hexdigest()

    @property
    def expires_at(self) -> float:
        """Unix seconds."""
        return float(self.terms["expires_at"])


def propose_contract(
    identity: DecentrlIdentity, recipient_did: str, now: float, lifetime: float = YEAR_SECONDS
) -> ContractProposal:
    """
    A contract for somebody to accept. Our signature cannot cover the key that they have yet to make (reference 7.2).

    :param now: Unix seconds, like all times of contracts.
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
    Sign what somebody proposed.

    :raise Unreadable: it is not for us, not by who it says, or has expired.
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
    The contract that somebody made of our proposal.

    :raise Unreadable: it is another contract, or somebody did not sign it.
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
    """:param peer: which role the other side has in the contract."""
    try:
        public = decode_public_key(signed["communication_contract"][f"{peer}_encryption_public_key"])
        return ConcludedContract(peer_did, signed, derive_shared_secret(private, public))
    except (KeyError, ValueError):
        raise UnreadableMessage("a contract without a key") from None


_SIGNED_MEMBERS = ("contract_id", "event", "timestamp")


@dataclass(frozen=True, slots=True)
class OpenedEvent:
    """
    What somebody wrote to us, and proved to be from them.

    :param agreement: the contract that it was encrypted under.
    :param text: the event itself, usually JSON.
    :param timestamp: Unix seconds.
    """

    sender_did: str
    agreement: ConcludedContract
    text: str = field(repr=False)
    timestamp: float


def seal_event(identity: DecentrlIdentity, agreement: ConcludedContract, text: str, timestamp: int) -> str:
    """
    An event for the other side of a contract, as it goes through a mediator.

    :param timestamp: Unix seconds.
    """
    envelope = {"contract_id": agreement.id, "event": text, "timestamp": timestamp}
    return encrypt(encoding.dumps({**envelope, "signature": identity.sign(envelope)}), agreement.root_secret)


def open_event(payload: str, sender_did: str, agreements: Iterable[ConcludedContract]) -> OpenedEvent:
    """
    Decrypt an event and check who wrote it.

    :param agreements: with the sender, tried one after the other.
    :raise Unreadable: none of them opens it, or it was not signed by the sender.
    """
    for agreement in agreements:
        try:
            plaintext = decrypt(payload, agreement.root_secret)
        except ValueError:
            continue
        return OpenedEvent(sender_did, agreement, *_check_event(plaintext, sender_did))
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
