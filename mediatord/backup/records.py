"""
Store records: the content of a store independent of its backend, one line of JSON each in an archive; and the stores
that they are exported from and imported into.

Records are ordered by kind (:data:`RECORD_KINDS`), and within a kind by arrival. Accounts and recipients are numbered
from 1 in that order; messages refer to the numbers. Times are seconds since 1970, bytes are base64url. Counters and
indexes are not exported: each store derives its own.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import to_json

from mediatord.config.settings import StorageSettings
from mediatord.errors import OperatorError
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.store.interfaces import decentrl
from mediatord.store.interfaces.v1_connections import ImplicitPickup
from mediatord.store.registered_spellings import export_spellings

ItemT = TypeVar("ItemT")

_MAX_SHOWN_LENGTH = 40


class BackupError(OperatorError):
    """A store or a backup cannot be read or written."""


class InvalidArchiveError(BackupError):
    """An archive is truncated, altered or not from mediatord; nothing of it was used."""


def shorten_value(value: object) -> str:
    """A value from an archive, shortened for a line of text."""
    text = str(value) if isinstance(value, int | str) else "of another kind"
    return text if len(text) <= _MAX_SHOWN_LENGTH else f"{text[:_MAX_SHOWN_LENGTH]}..."


# In any form in an archive, as former versions have stored it.
_CanonicalDID = Annotated[str, AfterValidator(canonicalize_did)]
_Number = Annotated[int, Field(ge=1, lt=1 << 32)]
_Natural = Annotated[int, Field(ge=0, lt=1 << 31)]
# As exact as MongoDB stores it.
_Milliseconds = Annotated[float, AfterValidator(lambda time: round(time, 3))]


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
    did: _CanonicalDID
    created_at: float
    draft03: bool
    seen_at: float | None = None
    fresh: bool = False


class RetiredDIDRecord(_BaseRecord):
    """A DID that an account was rotated away from, which is refused permanently."""

    kind: Literal["retired"] = "retired"
    did: _CanonicalDID


class RecipientRecord(_BaseRecord):
    """
    A DID that an account has registered.

    :param place: position in the account's order of registration; None when it is no longer registered but has
        queued messages.
    :param names: registered spellings with their positions; empty when only the DID itself is registered.
    """

    kind: Literal["recipient"] = "recipient"
    number: _Number
    account: _Number
    did: str
    place: _Number | None
    names: tuple[tuple[_Number, str], ...] = ()


class MessageRecord(_BaseRecord):
    """
    A queued message; pending after an import, even if it was pushed.

    :param due_at: end of its delay; None if it is not delayed.
    :param arrived_at: since when it can be pushed; None while it is delayed.
    :param pushes: number of pushes.
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
    short: _CanonicalDID
    long: str


class NonceRecord(_BaseRecord):
    """A claimed nonce, refused when it is received again."""

    kind: Literal["nonce"] = "nonce"
    key: bytes
    until: float


class RegistrationRecord(_BaseRecord):
    """Registration of a Decentrl identity; ordered by id."""

    kind: Literal["registration"] = "registration"
    id: str
    did: str
    expires_at: float
    digest: bytes
    text: bytes


class ContractRecord(_BaseRecord):
    """A signed contract that an identity has stored."""

    kind: Literal["contract"] = "contract"
    id: str
    owner: str
    peer: str
    expires_at: float
    digest: bytes
    text: bytes


class ContractRequestRecord(_BaseRecord):
    """A pending contract request."""

    kind: Literal["contract_request"] = "contract_request"
    id: str
    recipient: str
    sender: str
    public_key: str
    request: str


class PendingEventRecord(_BaseRecord):
    """A pending event."""

    kind: Literal["pending_event"] = "pending_event"
    id: str
    recipient: str
    sender: str
    received_at: float
    payload: str


class StoredEventRecord(_BaseRecord):
    """An event that an identity has stored for itself."""

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

    def to_event(self) -> decentrl.StoredEvent:
        """The event without `processed` and its owner."""
        return decentrl.StoredEvent(
            self.id, self.sender, self.recipient, self.payload, self.tags, self.timestamp, self.contract_id
        )


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

    def to_event(self) -> decentrl.PublicEvent:
        """The event without its publisher."""
        return decentrl.PublicEvent(self.id, self.event, self.tags, self.timestamp, self.signature, self.channel_id)


class _OwnedRecord(_BaseRecord):
    """
    A record of an account or of a Decentrl identity.

    :param account: number of the account; None if it belongs to an identity.
    :param identity: DID of the identity; None if it belongs to an account.
    """

    kind: str
    account: _Number | None
    identity: str | None

    @model_validator(mode="after")
    def _has_one_owner(self) -> Self:
        if (self.account is None) == (self.identity is None):
            raise ValueError("expected either an account or an identity")
        return self


class DeviceRecord(_OwnedRecord):
    """A device that a push service can wake, encrypted with the key file of the mediator."""

    kind: Literal["device"] = "device"
    id: bytes
    service: str
    sealed: bytes
    expires_at: float | None


class WakeupRecord(_OwnedRecord):
    """
    When an account or identity was last woken, and last asked for messages; None for never. In order of accounts, and
    then of the DIDs of identities.
    """

    kind: Literal["wakeup"] = "wakeup"
    polled_at: _Milliseconds | None
    woken_at: _Milliseconds | None


class V1ConnectionRecord(_BaseRecord):
    """
    A connection of DIDComm v1, of an account or of a wallet that has none yet; ordered by wallet.

    :param wallet: key of the wallet, which is the DID of its account.
    :param own_key: key of the mediator, derived from the key file of the mediator.
    """

    kind: Literal["v1_connection"] = "v1_connection"
    wallet: str
    own_key: str
    request_id: str
    endpoint: str | None
    routing_keys: tuple[str, ...]
    has_base58_keys: bool
    implicit_pickup: ImplicitPickup
    created_at: float


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
    | DeviceRecord
    | WakeupRecord
    | V1ConnectionRecord
)

# Fields of each kind, without `kind`, which comes first.
RECORD_FIELDS = {record.model_fields["kind"].default: [*record.model_fields][1:] for record in get_args(StoreRecord)}

# Kinds in the order of an archive, with their names in tables of counts.
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
    "device": "push devices",
    "wakeup": "wake-up records",
    "v1_connection": "DIDComm v1 connections",
}
# Kinds in archives and backups of each format version, the last of which is written.
KINDS_BY_VERSION = {1: list(RECORD_KINDS)[:12], 2: list(RECORD_KINDS)[:14], 3: list(RECORD_KINDS)}

RecordCounts: TypeAlias = dict[str, int]

_RECORD_ADAPTER: TypeAdapter[StoreRecord] = TypeAdapter(Annotated[StoreRecord, Field(discriminator="kind")])


def resolve_seen_at(account: AccountRecord) -> float:
    """Last contact of an account; now if that was not recorded."""
    return datetime.now(UTC).timestamp() if account.seen_at is None else account.seen_at


def encode_record(record: StoreRecord) -> bytes:
    """A record as a line with its line feed."""
    return to_json(record, bytes_mode="base64", inf_nan_mode="constants") + b"\n"


def decode_record(line: bytes) -> StoreRecord:
    """Parse a line. :raise InvalidArchiveError: it is no record."""
    try:
        return _RECORD_ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "union_tag_invalid":  # its text would contain the whole tag
            raise InvalidArchiveError("unknown kind") from None
        where = ".".join(map(str, first["loc"])) or "line"
        raise InvalidArchiveError(f"{shorten_value(where)}: {first['msg']}") from None


class RecordSource(ABC):
    """A store that is exported, as of one moment."""

    backend: ClassVar[str]

    @abstractmethod
    def count(self, kind: str) -> int:
        """Number of records of a kind."""

    @abstractmethod
    def read(self, kind: str) -> Iterator[dict[str, Any]]:
        """
        The fields of all records of a kind, in the order of an archive. In place of numbers they have the keys of
        accounts and recipients, and as `names` the stored ones.
        """

    def counts(self) -> RecordCounts:
        """Number of records of each kind."""
        return {kind: self.count(kind) for kind in RECORD_KINDS}

    def records(self) -> Iterator[StoreRecord]:
        """All records, in the order of an archive."""
        with closing(_RecordNumbers()) as numbers:
            for kind in RECORD_KINDS:
                for fields in self.read(kind):
                    if kind in ("account", "recipient"):
                        fields["number"] = numbers.allocate(kind, fields["number"])
                    if fields.get("account") is not None:
                        fields["account"] = numbers.lookup("account", fields["account"])
                    if kind == "message":
                        fields["recipient"] = numbers.lookup("recipient", fields["recipient"])
                    elif kind == "recipient":
                        fields["names"] = export_spellings(fields["did"], fields["place"], fields["names"])
                    try:
                        yield _RECORD_ADAPTER.validate_python({"kind": kind, **fields}, strict=False)
                    except ValidationError as error:
                        where = error.errors(include_url=False, include_input=False)[0]["loc"]
                        raise BackupError(
                            f"the store is damaged: a record of kind {kind} has no {where[-1]}"
                        ) from None


class RecordTarget(Protocol):
    """
    A store that is imported into. Written records stay if the import is interrupted; no daemon uses the store before
    the import is finished.
    """

    def accept(self, record: StoreRecord) -> None:
        """Check a record without writing it. :raise InvalidArchiveError: the store cannot hold it."""

    def begin(self, archive: str) -> int:
        """
        Begin or continue the import of an archive; returns the number of its records that were written already.

        :raise BackupError: the store is not empty, or an import of another archive was not finished.
        """

    def write(self, first: int, records: Sequence[StoreRecord]) -> None:
        """
        Write records, all of them or none.

        :param first: position of the first one in the archive, from 1.
        """

    def counts(self) -> RecordCounts:
        """Number of records of each kind."""

    def finish(self) -> None:
        """Finish the import: daemons may use the store from now on."""


def open_record_source(
    storage: StorageSettings, *, offline: bool = False, stopped: bool = False
) -> AbstractContextManager[RecordSource]:
    """
    Open a store for reading.

    :raise BackupError: it cannot be opened.
    """
    _require_backend(storage)
    if storage.backend == "sqlite":
        from mediatord.backup.sqlite_records import open_sqlite_source

        return open_sqlite_source(storage.sqlite.path)
    from mediatord.backup.mongo_records import open_mongodb_source

    return open_mongodb_source(storage.mongodb.uri, offline=offline or stopped, stopped=stopped)


def open_record_target(storage: StorageSettings, *, stopped: bool = False) -> AbstractContextManager[RecordTarget]:
    """
    Open a store for an import.

    :raise BackupError: it cannot be opened.
    """
    _require_backend(storage)
    if storage.backend == "sqlite":
        from mediatord.backup.sqlite_records import open_sqlite_target

        return open_sqlite_target(storage.sqlite.path)
    from mediatord.backup.mongo_records import open_mongodb_target

    return open_mongodb_target(storage.mongodb.uri, stopped=stopped)


def _require_backend(storage: StorageSettings) -> None:
    if storage.backend == "memory":
        raise BackupError("storage.backend memory cannot be exported or imported: expected sqlite or mongodb")
    if storage.backend == "mongodb" and find_spec("pymongo") is None:
        raise BackupError(
            'storage.backend mongodb requires PyMongo and txmongo; run: pip install "mediatord[mongodb]"'
        )


class _RecordNumbers:
    """
    Consecutive numbers from 1 for keys of accounts and recipients. There may be millions: they are in a temporary
    SQLite database.
    """

    def __init__(self) -> None:
        self._connection = sqlite3.connect("", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = OFF")
        self._connection.execute(
            "CREATE TABLE number (kind, key, number INTEGER NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"
        )
        self._last: Counter[str] = Counter()

    def allocate(self, kind: str, key: int | bytes) -> int:
        """Assign the next number of a kind. :raise BackupError: the disk is full."""
        self._last[kind] += 1
        self._execute("INSERT INTO number VALUES (?, ?, ?)", kind, key, self._last[kind])
        return self._last[kind]

    def lookup(self, kind: str, key: int | bytes) -> int:
        """The number of a key. :raise BackupError: it has none, or the disk is full."""
        found = self._execute("SELECT number FROM number WHERE kind = ? AND key = ?", kind, key)
        if not found:
            raise BackupError("the store is damaged: a record refers to a missing account or recipient")
        return int(found[0][0])

    def _execute(self, statement: str, *values: int | str | bytes) -> list[tuple[int]]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise BackupError(
                f"cannot write a temporary file: {error}; set TMPDIR to a directory with free space"
            ) from None

    def close(self) -> None:
        """Delete the temporary database."""
        self._connection.close()


def require_empty_counts(name: str, counts: RecordCounts) -> None:
    """:raise BackupError: not all counts are 0."""
    kept = ", ".join(f"{number} {RECORD_KINDS[kind]}" for kind, number in counts.items() if number)
    if kept:
        raise BackupError(f"refusing to import: {name} is not empty ({kept})")


def batch_by_size(items: Iterable[tuple[ItemT, int]], most: int, max_bytes: int) -> Iterator[list[ItemT]]:
    """Batches of items, given with their sizes: at most `most` and `max_bytes`, but at least one item each."""
    batch: list[ItemT] = []
    size = 0
    for item, more in items:
        if batch and (len(batch) == most or size + more > max_bytes):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch
