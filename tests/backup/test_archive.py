"""Archives of records: reading returns what was written; truncated and altered archives are refused as a whole."""

from __future__ import annotations

import errno
import gzip
import json
import os
import stat
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.backup.archive import verify_archive, write_archive
from mediatord.backup.durable_files import create_file_atomically
from mediatord.backup.records import (
    RECORD_KINDS,
    AccountRecord,
    BackupError,
    ContractRecord,
    DeviceRecord,
    InvalidArchiveError,
    LongFormRecord,
    MessageRecord,
    NonceRecord,
    PendingEventRecord,
    PublicEventRecord,
    RecipientRecord,
    RegistrationRecord,
    RetiredDIDRecord,
    StoredEventRecord,
    StoreRecord,
    V1ConnectionRecord,
    WakeupRecord,
    decode_record,
    encode_record,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
times = st.floats(allow_nan=False)
account_records = st.builds(AccountRecord, number=st.just(1), did=texts, created_at=times, draft03=st.booleans())
records = st.one_of(
    account_records,
    st.builds(RetiredDIDRecord, did=texts),
    st.builds(
        RecipientRecord, number=st.just(1), account=st.just(1), did=texts, place=st.none() | st.integers(1, 99)
    ),
    st.builds(
        MessageRecord,
        id=texts,
        account=st.just(1),
        recipient=st.just(1),
        form=st.sampled_from(["json", "base64"]),
        received_at=times,
        expires_at=times,
        due_at=st.none() | times,
        arrived_at=st.none() | times,
        pushes=st.integers(0, 9),
        payload=st.binary(max_size=50),
    ),
    st.builds(
        DeviceRecord,
        account=st.just(1),
        identity=st.none(),
        id=st.binary(),
        service=texts,
        sealed=st.binary(),
        expires_at=st.none() | times,
    ),
    st.builds(
        WakeupRecord,
        account=st.none(),
        identity=texts,
        polled_at=st.none() | times,
        woken_at=st.none() | times,
    ),
    st.builds(
        V1ConnectionRecord,
        wallet=texts,
        own_key=texts,
        request_id=texts,
        endpoint=st.none() | texts,
        routing_keys=st.lists(texts).map(tuple),
        has_base58_keys=st.booleans(),
        implicit_pickup=st.sampled_from(["unknown", "delivery", "raw"]),
        created_at=times,
    ),
    st.builds(LongFormRecord, short=texts, long=texts),
    st.builds(NonceRecord, key=st.binary(max_size=20), until=times),
    st.builds(RegistrationRecord, id=texts, did=texts, expires_at=times, digest=st.binary(), text=st.binary()),
    st.builds(
        ContractRecord, id=texts, owner=texts, peer=texts, expires_at=times, digest=st.binary(), text=st.binary()
    ),
    st.builds(PendingEventRecord, id=texts, recipient=texts, sender=texts, received_at=times, payload=texts),
    st.builds(
        StoredEventRecord,
        id=texts,
        owner=texts,
        sender=texts,
        recipient=texts,
        timestamp=times,
        contract_id=st.none() | texts,
        processed=st.booleans(),
        tags=st.lists(texts).map(tuple),
        payload=texts,
    ),
    st.builds(
        PublicEventRecord,
        id=texts,
        publisher=texts,
        timestamp=times,
        channel_id=st.none() | texts,
        tags=st.lists(texts).map(tuple),
        signature=texts,
        event=texts,
    ),
)

SOME: list[StoreRecord] = [
    AccountRecord(number=1, did="did:a", created_at=1.5, draft03=True),
    RecipientRecord(number=1, account=1, did="did:key:z", place=None),
    MessageRecord(
        id="m",
        account=1,
        recipient=1,
        form="json",
        received_at=1.0,
        expires_at=2.0,
        due_at=None,
        arrived_at=1.0,
        pushes=3,
        payload=b"\xff\x00payload",
    ),
    NonceRecord(key=b"\xfe", until=3.0),
]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive with some records."""
    path = tmp_path / "a.gz"
    write_archive(path, "sqlite", SOME)
    return path


@given(records)
def test_record_is_one_line(record: StoreRecord) -> None:
    """Any text, bytes and time are written as one line and read back exactly."""
    line = encode_record(record)
    assert line.count(b"\n") == 1 and decode_record(line) == record
    assert json.loads(line)["kind"] == record.kind


def test_reads_what_was_written(archive: Path) -> None:
    """Records are read in order, with their numbers, from any position; only the owner can read the file."""
    read = verify_archive(archive)
    assert [record for record, _ in read.records()] == SOME
    assert [record for record, _ in read.records(after=2)] == SOME[2:]
    assert read.total == 4 and list(read.counts) == list(RECORD_KINDS) and read.counts["message"] == 1
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    assert [path.name for path in archive.parent.iterdir()] == ["a.gz"]


def test_does_not_overwrite(archive: Path) -> None:
    """An existing file is kept; a failed export leaves nothing."""
    before = archive.read_bytes()
    with pytest.raises(BackupError, match="will not be overwritten"):
        write_archive(archive, "sqlite", [])
    assert archive.read_bytes() == before

    def fail() -> Any:
        yield SOME[0]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_archive(archive.with_name("b.gz"), "sqlite", fail())
    assert [path.name for path in archive.parent.iterdir()] == ["a.gz"]


def test_reports_denied_permission(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory where this user may not create files; root may, hence the patch."""
    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with (
        pytest.raises(BackupError, match="cannot write .*new.gz: Permission denied"),
        create_file_atomically(archive.with_name("new.gz")),
    ):
        pass


def test_restarts_after_kill(archive: Path) -> None:
    """Files left by a killed run do not matter."""
    draft = archive.with_name(".b.gz.draft")
    draft.write_bytes(b"left over" * 10_000)
    draft.chmod(0o644)
    write_archive(archive.with_name("b.gz"), "sqlite", SOME)
    assert verify_archive(archive.with_name("b.gz")).total == 4
    assert stat.S_IMODE(archive.with_name("b.gz").stat().st_mode) == 0o600 and not draft.exists()


def test_refuses_truncated_archive(archive: Path) -> None:
    """An archive truncated anywhere is refused."""
    intact = archive.read_bytes()
    for length in range(len(intact)):
        archive.write_bytes(intact[:length])
        with pytest.raises(InvalidArchiveError, match="cannot read"):
            verify_archive(archive)


def test_refuses_altered_archive(archive: Path) -> None:
    """A bit flipped anywhere is detected, except for bits that gzip ignores, which change nothing."""
    intact = archive.read_bytes()
    same = 0
    for position in range(len(intact)):
        for bit in range(8):
            altered = bytearray(intact)
            altered[position] ^= 1 << bit
            archive.write_bytes(altered)
            try:
                found = [record for record, _ in verify_archive(archive).records()]
            except InvalidArchiveError as error:
                assert "\n" not in str(error)
            else:
                assert found == SOME
                same += 1
    assert same < 100


def read_lines(path: Path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).splitlines(keepends=True)


def write_forged(path: Path, lines: list[bytes]) -> Path:
    """An archive with these lines and a matching trailer."""
    header, *middle, _ = lines
    counted = {kind: [line for line in middle if json.loads(line).get("kind") == kind] for kind in RECORD_KINDS}
    counts = {
        kind: {"count": len(some), "sha256": sha256(b"".join(some)).hexdigest()} for kind, some in counted.items()
    }
    trailer = {"kind": "trailer", "records": counts, "header_sha256": sha256(header).hexdigest()}
    end = json.dumps(trailer, separators=(",", ":")).encode() + b"\n"
    path.write_bytes(gzip.compress(b"".join([header, *middle, end])))
    return path


def test_refuses_inconsistent_archive(archive: Path) -> None:
    """Archives with a valid trailer but wrong order, numbers or fields, or without records, are refused."""
    header, account, recipient, message, nonce, end = read_lines(archive)
    verify_archive(write_forged(archive, [header, account, recipient, message, nonce, end]))
    for middle in (
        [recipient, account],
        [account, account],
        [recipient],
        [account, message],
        [account, nonce, recipient],
        [account.replace(b'"number":1', b'"number":2')],
        [account.replace(b"did:a", b"did:a\\ud800")],
        [account.replace(b'"did":', b'"more":1,"did":')],
        [account.replace(b"true", b'"yes"')],
        [account.replace(b"1.5", b"NaNaN")],
        [b'{"kind":"unknown"}\n'],
        [b"[" * 100_000 + b"\n"],
        [b'{"kind":"account","did":' + b"[" * 100_000 + b"\n"],
        [b"\xff\xfe\n"],
        [b"\n"],
    ):
        with pytest.raises(InvalidArchiveError) as caught:
            verify_archive(write_invalid(archive, [header, *middle, end]))
        assert "\n" not in str(caught.value)


def write_invalid(path: Path, lines: list[bytes]) -> Path:
    """The same for lines that need not be valid."""
    try:
        return write_forged(path, lines)
    except (ValueError, RecursionError, AttributeError):
        path.write_bytes(gzip.compress(b"".join(lines)))
        return path


HEADER = b'{"kind":"header","format":"mediatord-store","version":%d}'


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "not a mediatord archive"),
        (b"{}\n", "not a mediatord archive"),
        (b"[" * 100_000 + b"\n", "not a mediatord archive"),
        (HEADER % 4 + b"\n", "version is 4, expected 1 to 3"),
        (HEADER % 1, "truncated"),
        (HEADER % 1 + b"\n", "its last line is missing"),
    ],
    ids=range(6),
)
def test_refuses_other_file(tmp_path: Path, content: bytes, error: str) -> None:
    """Any other file is refused, compressed or not."""
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(InvalidArchiveError, match=error):
        verify_archive(path)
    path.write_bytes(content)
    with pytest.raises(InvalidArchiveError, match="not a mediatord archive"):
        verify_archive(path)


def test_refuses_data_after_trailer(archive: Path) -> None:
    """Another gzip member or a further line is refused."""
    intact = archive.read_bytes()
    for more in (b"garbage", gzip.compress(b"x\n"), intact):
        archive.write_bytes(intact + more)
        with pytest.raises(InvalidArchiveError):
            verify_archive(archive)


def test_detects_replaced_archive(archive: Path, tmp_path: Path) -> None:
    """An archive that is replaced after it was checked is refused."""
    read = verify_archive(archive)
    other = tmp_path / "b.gz"
    write_archive(other, "mongodb", [*SOME, NonceRecord(key=b"more", until=1.0)])
    other.replace(archive)
    with pytest.raises(InvalidArchiveError, match="changed while it was read"):
        list(read.records())


def test_detects_changed_content(archive: Path) -> None:
    """Content that changed after the check is refused even if the trailer is the same."""
    read = verify_archive(archive)
    header, account, recipient, message, nonce, end = read_lines(archive)
    other = encode_record(SOME[2].model_copy(update={"payload": b"another"}))
    archive.write_bytes(gzip.compress(b"".join([header, account, recipient, other, nonce, end])))
    for after in (0, 3):
        with pytest.raises(InvalidArchiveError, match="changed while it was read"):
            list(read.records(after))


@pytest.mark.parametrize("text", ['"' + "x" * 9999 + '"', "9" * 4000, "[1]"])
def test_error_does_not_quote_content(text: str, archive: Path) -> None:
    """An error is one short line without payloads."""
    header, *more = read_lines(archive)
    archive.write_bytes(gzip.compress(header.replace(b'"version":2', b'"version":' + text.encode())))
    with pytest.raises(InvalidArchiveError) as version:
        verify_archive(archive)
    archive.write_bytes(gzip.compress(header + b'{"kind":' + text.encode() + b"}\n"))
    with pytest.raises(InvalidArchiveError) as kind:
        verify_archive(archive)
    archive.write_bytes(gzip.compress(header + b'{"kind":"retired","did":"d","' + b"x" * 9999 + b'":1}\n'))
    with pytest.raises(InvalidArchiveError) as field:
        verify_archive(archive)
    assert all(len(str(one.value)) < len(str(archive)) + 150 for one in (version, kind, field))


def test_refuses_existing_partial_file(archive: Path) -> None:
    """An existing partial file may be readable by its owner, or be a link to another file, so it is refused."""
    precious = archive.with_name("precious")
    precious.write_text("precious")
    draft = archive.with_name(".b.gz.draft")
    os.link(precious, draft)
    with pytest.raises(BackupError, match="belongs to another user"):
        write_archive(archive.with_name("b.gz"), "sqlite", SOME)
    assert precious.read_text() == "precious"
    draft.unlink()
    if os.geteuid() == 0:  # which only root can change
        draft.touch()
        os.chown(draft, 12345, 12345)
        with pytest.raises(BackupError, match="belongs to another user"):
            write_archive(archive.with_name("b.gz"), "sqlite", SOME)
        assert draft.read_bytes() == b""


def test_full_disk(archive: Path) -> None:
    """The error names the file, and nothing is left."""
    script = (
        "import resource, sys; from pathlib import Path; from mediatord.backup.archive import write_archive; "
        "from mediatord.backup.records import NonceRecord; resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99)); "
        "write_archive(Path(sys.argv[1]), 'sqlite', [NonceRecord(key=b'', until=1.0)])"
    )
    command = [sys.executable, "-B", "-c", script, str(archive.with_name("b.gz"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().endswith(f"BackupError: cannot write {command[-1]}: File too large")
    assert [path.name for path in archive.parent.iterdir()] == ["a.gz"]
