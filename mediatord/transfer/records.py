"""
What a store keeps, in words of neither backend: a record is one line of JSON in an archive.

Records come by kind, in the order of :data:`KINDS`, and within a kind in order of arrival, which is kept. Accounts
and recipients are numbered from 1 in their order; messages name them by that. Times are seconds since the epoch,
bytes are base64 with `-` and `_`. What can be counted or looked up from these is no record: each store makes its own.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from mediatord.transfer.errors import ArchiveRefused, shown

_Number = Annotated[int, Field(ge=1, lt=1 << 32)]
_Natural = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
    )


class Account(_Record):
    """
    A DIDComm wallet with mediation.

    :param seen_at: last authenticated contact; None if that was not recorded.
    :param fresh: whether it is not known to have been used.
    """

    kind: Literal["account"] = "account"
    number: _Number
    did: str
    created_at: float
    draft03: bool
    seen_at: float | None = None
    fresh: bool = False


class Retired(_Record):
    """A DID that an account has rotated away from, and that is refused for good."""

    kind: Literal["retired"] = "retired"
    did: str


class Recipient(_Record):
    """
    A DID that an account has registered.

    :param place: in the account's order of registration; None when it is registered no more, but messages wait.
    :param names: spellings under which it is registered, with their places; empty when that is the DID alone.
    """

    kind: Literal["recipient"] = "recipient"
    number: _Number
    account: _Number
    did: str
    place: _Number | None
    names: tuple[tuple[_Number, str], ...] = ()


class Message(_Record):
    """
    A message that waits. Whether it was pushed is not kept: it is pending again.

    :param due_at: while it is delayed, until when.
    :param arrived_at: since when it can be pushed; None while it is delayed.
    :param pushes: how often it was.
    """

    kind: Literal["message"] = "message"
    id: str
    account: _Number
    recipient: _Number
    form: Literal["json", "base64"]
    received_at: float
    expires_at: float
    due_at: float | None
    arrived_at: float | None
    pushes: _Natural
    payload: bytes


class LongForm(_Record):
    """The long form of a did:peer:4."""

    kind: Literal["long_form"] = "long_form"
    short: str
    long: str


class Nonce(_Record):
    """Something that was received before and would be refused a second time."""

    kind: Literal["nonce"] = "nonce"
    key: bytes
    until: float


class Registration(_Record):
    """A Decentrl identity's registration, in the order of ids."""

    kind: Literal["registration"] = "registration"
    id: str
    did: str
    expires_at: float
    digest: bytes
    text: bytes


class Contract(_Record):
    """A signed contract that an identity keeps here."""

    kind: Literal["contract"] = "contract"
    id: str
    owner: str
    peer: str
    expires_at: float
    digest: bytes
    text: bytes


class ContractRequest(_Record):
    """A request for a contract that waits."""

    kind: Literal["contract_request"] = "contract_request"
    id: str
    recipient: str
    sender: str
    public_key: str
    request: str


class PendingEvent(_Record):
    """An event that waits."""

    kind: Literal["pending_event"] = "pending_event"
    id: str
    recipient: str
    sender: str
    received_at: float
    payload: str


class StoredEvent(_Record):
    """An event that an identity keeps here for itself."""

    kind: Literal["stored_event"] = "stored_event"
    id: str
    owner: str
    sender: str
    recipient: str
    timestamp: float
    contract_id: str | None
    processed: bool
    tags: tuple[str, ...]
    payload: str


class PublicEvent(_Record):
    """An event of a public channel."""

    kind: Literal["public_event"] = "public_event"
    id: str
    publisher: str
    timestamp: float
    channel_id: str | None
    tags: tuple[str, ...]
    signature: str
    event: str


Record: TypeAlias = (
    Account
    | Retired
    | Recipient
    | Message
    | LongForm
    | Nonce
    | Registration
    | Contract
    | ContractRequest
    | PendingEvent
    | StoredEvent
    | PublicEvent
)

# The order in which they are in an archive, and what each is called where they are counted.
KINDS = {
    "account": "accounts",
    "retired": "retired DIDs",
    "recipient": "recipient DIDs",
    "message": "messages",
    "long_form": "did:peer:4 long forms",
    "nonce": "nonces",
    "registration": "Decentrl registrations",
    "contract": "contracts",
    "contract_request": "contract requests",
    "pending_event": "pending events",
    "stored_event": "stored events",
    "public_event": "public events",
}

Counts: TypeAlias = dict[str, int]

_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def seen_at_of(account: Account) -> float:
    """When an account was last in contact; now, if that was not recorded, as it may have been in contact since."""
    return datetime.now(UTC).timestamp() if account.seen_at is None else account.seen_at


def encode(record: Record) -> bytes:
    """A line, with its end."""
    return to_json(record, bytes_mode="base64", inf_nan_mode="constants") + b"\n"


def decode(line: bytes) -> Record:
    """:raise ArchiveRefused: it is no record."""
    try:
        return _RECORD.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "union_tag_invalid":  # whose text has all of the tag
            raise ArchiveRefused("kind: expected one of those that there are") from None
        where = ".".join(map(str, first["loc"])) or "line"
        raise ArchiveRefused(f"{shown(where)}: {first['msg']}") from None
