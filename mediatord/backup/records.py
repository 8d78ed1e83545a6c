"""
Why something cannot be exported, imported, backed up or restored.

What a store keeps, in words of neither backend: a record is one line of JSON in an archive.

Records come by kind, in the order of :data:`KINDS`, and within a kind in order of arrival, which is kept. Accounts
and recipients are numbered from 1 in their order; messages name them by that. Times are seconds since the epoch,
bytes are base64 with `-` and `_`. What can be counted or looked up from these is no record: each store makes its own.

What is asked of a store that is exported or imported into.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

_MAX_SHOWN_LENGTH = 40


class BackupError(Exception):
    """The text is one line for the operator."""


class InvalidArchiveError(BackupError):
    """An archive is torn, altered or not one of ours; nothing of it was used."""


def shorten_value(value: object) -> str:
    """Something that an archive says, short enough for a line."""
    text = str(value) if isinstance(value, int | str) else "of another kind"
    return text if len(text) <= _MAX_SHOWN_LENGTH else f"{text[:_MAX_SHOWN_LENGTH]}..."


_Number = Annotated[int, Field(ge=1, lt=1 << 32)]
_Natural = Annotated[int, Field(ge=0, lt=1 << 31)]


class _BaseRecord(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
    )


class AccountRecord(_BaseRecord):
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


class RetiredDIDRecord(_BaseRecord):
    """A DID that an account has rotated away from, and that is refused for good."""

    kind: Literal["retired"] = "retired"
    did: str


class RecipientRecord(_BaseRecord):
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


class MessageRecord(_BaseRecord):
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


class LongFormRecord(_BaseRecord):
    """The long form of a did:peer:4."""

    kind: Literal["long_form"] = "long_form"
    short: str
    long: str


class NonceRecord(_BaseRecord):
    """Something that was received before and would be refused a second time."""

    kind: Literal["nonce"] = "nonce"
    key: bytes
    until: float


class RegistrationRecord(_BaseRecord):
    """A Decentrl identity's registration, in the order of ids."""

    kind: Literal["registration"] = "registration"
    id: str
    did: str
    expires_at: float
    digest: bytes
    text: bytes


class ContractRecord(_BaseRecord):
    """A signed contract that an identity keeps here."""

    kind: Literal["contract"] = "contract"
    id: str
    owner: str
    peer: str
    expires_at: float
    digest: bytes
    text: bytes


class ContractRequestRecord(_BaseRecord):
    """A request for a contract that waits."""

    kind: Literal["contract_request"] = "contract_request"
    id: str
    recipient: str
    sender: str
    public_key: str
    request: str


class PendingEventRecord(_BaseRecord):
    """An event that waits."""

    kind: Literal["pending_event"] = "pending_event"
    id: str
    recipient: str
    sender: str
    received_at: float
    payload: str


class StoredEventRecord(_BaseRecord):
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


class PublicEventRecord(_BaseRecord):
    """An event of a public channel."""

    kind: Literal["public_event"] = "public_event"
    id: str
    publisher: str
    timestamp: float
    channel_id: str | None
    tags: tuple[str, ...]
    signature: str
    event: str


StoreRecord: TypeAlias = (
    AccountRecord
    | RetiredDIDRecord
    | RecipientRecord
    | MessageRecord
    | LongFormRecord
    | NonceRecord
    | RegistrationRecord
    | ContractRecord
    | ContractRequestRecord
    | PendingEventRecord
    | StoredEventRecord
    | PublicEventRecord
)

# The order in which they are in an archive, and what each is called where they are counted.
RECORD_KINDS = {
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

RecordCounts: TypeAlias = dict[str, int]

_RECORD_ADAPTER: TypeAdapter[StoreRecord] = TypeAdapter(Annotated[StoreRecord, Field(discriminator="kind")])


def resolve_seen_at(account: AccountRecord) -> float:
    """When an account was last in contact; now, if that was not recorded, as it may have been in contact since."""
    return datetime.now(UTC).timestamp() if account.seen_at is None else account.seen_at


def encode_record(record: StoreRecord) -> bytes:
    """A line, with its end."""
    return to_json(record, bytes_mode="base64", inf_nan_mode="constants") + b"\n"


def decode_record(line: bytes) -> StoreRecord:
    """:raise ArchiveRefused: it is no record."""
    try:
        return _RECORD_ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "union_tag_invalid":  # whose text has all of the tag
            raise InvalidArchiveError("kind: expected one of those that there are") from None
        where = ".".join(map(str, first["loc"])) or "line"
        raise InvalidArchiveError(f"{shorten_value(where)}: {first['msg']}") from None


class RecordSource(Protocol):
    """A store that is read, all of it as it was at one time."""

    backend: str

    def counts(self) -> RecordCounts:
        """How many records of each kind there are."""

    def records(self) -> Iterator[StoreRecord]:
        """All of them, in the order of an archive."""


class RecordTarget(Protocol):
    """
    A store that is written to by an import and by nobody else. What has been written stays if the import is
    interrupted, and no daemon uses the store before it is finished.
    """

    def accept(self, record: StoreRecord) -> None:
        """:raise ArchiveRefused: it cannot be kept here. Nothing is written."""

    def begin(self, archive: str) -> int:
        """
        Begin to import an archive, or go on with it; how many of its records are there already.

        :raise TransferError: something is in the store, or an import of another archive was not finished.
        """

    def write(self, first: int, records: Sequence[StoreRecord]) -> None:
        """
        Keep records, all of them or none.

        :param first: place of the first one in the archive, from 1.
        """

    def counts(self) -> RecordCounts:
        """How many records of each kind there are."""

    def finish(self) -> None:
        """All of them are there: from now on a daemon may use the store."""


class RecordNumbers:
    """
    Numbers from 1 for keys of a store, in the order in which they are given. They may be millions: SQLite keeps them,
    on disk if need be, and leaves nothing behind.
    """

    def __init__(self) -> None:
        self._connection = sqlite3.connect("", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = OFF")
        self._connection.execute("CREATE TABLE number (key PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID")
        self._last = 0

    def give(self, key: int | bytes) -> int:
        """The next one. :raise TransferError: there is no room for them."""
        self._last += 1
        self._ask("INSERT INTO number VALUES (?, ?)", key, self._last)
        return self._last

    def of(self, key: int | bytes) -> int:
        """:raise TransferError: a key has none, or there is no room for them."""
        found = self._ask("SELECT number FROM number WHERE key = ?", key)
        if not found:
            raise BackupError("the store is damaged: something belongs to somebody who is not there")
        return int(found[0][0])

    def _ask(self, statement: str, *values: int | bytes) -> list[tuple[int]]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise BackupError(f"a temporary file cannot be used: {error}") from None

    def close(self) -> None:
        """They are forgotten."""
        self._connection.close()


def require_empty_counts(name: str, counts: RecordCounts) -> None:
    """:raise TransferError: these are not all 0."""
    kept = ", ".join(f"{number} {RECORD_KINDS[kind]}" for kind, number in counts.items() if number)
    if kept:
        raise BackupError(f"{name} is not empty ({kept}): an empty store is wanted")
