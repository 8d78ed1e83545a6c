"""Truncated, altered and forged backups are refused in one line, and nothing is written."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mediatord.backup.backup_file import BackupManifest, read_backup_file, write_backup_file
from mediatord.backup.durable_files import create_file_atomically
from mediatord.backup.records import RECORD_KINDS, InvalidArchiveError
from tests.backup.store_contents import read_tree
from tests.cli.test_commands import Capture, call, one_line


@pytest.fixture
def small_backup(tmp_path: Path) -> Path:
    """A backup small enough to be damaged at every position."""
    for name in ("mediator.yaml", "keys.jwks", "store.records.gz"):
        (tmp_path / name).write_bytes(name.encode())
    path = tmp_path / "small.tar"
    with create_file_atomically(path) as file:
        names = ("mediator.yaml", "keys.jwks", "store.records.gz")
        write_backup_file(file, "mongodb", no_counts(), {name: tmp_path / name for name in names})
    return path


def no_counts() -> dict[str, int]:
    """Counts of nothing."""
    return dict.fromkeys(RECORD_KINDS, 0)


def read_contents(path: Path) -> tuple[BackupManifest, dict[str, bytes], bytes]:
    """All contents of a backup."""
    store = io.BytesIO()
    return *read_backup_file(path, store_target=store), store.getvalue()


def test_refuses_truncated_backup(small_backup: Path) -> None:
    """A backup truncated before the last significant byte is refused; behind it are zeros."""
    intact = small_backup.read_bytes()
    for length in [*range(0, len(intact.rstrip(b"\0")), 7), len(intact.rstrip(b"\0")) - 1]:
        small_backup.write_bytes(intact[:length])
        with pytest.raises(InvalidArchiveError, match="cannot read") as caught:
            read_backup_file(small_backup)
        assert "\n" not in str(caught.value)


@pytest.mark.exhaustive
def test_refuses_altered_backup(small_backup: Path) -> None:
    """A bit flipped in any byte is detected or changes nothing."""
    intact, random = small_backup.read_bytes(), Random(1)
    contents = read_contents(small_backup)
    refused = 0
    for position in range(len(intact)):
        altered = bytearray(intact)
        altered[position] ^= 1 << random.randrange(8)
        small_backup.write_bytes(altered)
        try:
            read_backup_file(small_backup)
        except InvalidArchiveError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert read_contents(small_backup) == contents
    assert refused > len(intact.replace(b"\0", b""))


def write_forged(path: Path, change: Callable[[dict[str, Any], list[tuple[tarfile.TarInfo, bytes]]], None]) -> Path:
    """A backup with valid digests and a forged change."""
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar.getmembers()]  # type: ignore[union-attr]
    manifest = json.loads(members[0][1])
    members = members[2:]
    change(manifest, members)
    text = json.dumps(manifest).encode()
    digest = sha256(text).hexdigest().encode() + b"\n"
    with tarfile.open(path, "w") as tar:
        for header, content in (
            (tarfile.TarInfo("manifest.json"), text),
            (tarfile.TarInfo("manifest.sha256"), digest),
            *members,
        ):
            if header.isreg():
                header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


def rename_keys(name: str) -> Callable[[dict[str, Any], list[tuple[tarfile.TarInfo, bytes]]], None]:
    """The keys have another name, in the manifest too."""

    def change(manifest: dict[str, Any], members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        manifest["members"][1]["name"] = members[1][0].name = name

    return change


def change_type_of_keys(kind: bytes, target: str = "/etc/passwd") -> Callable[[dict[str, Any], list[Any]], None]:
    """The keys are not a regular file."""

    def change(manifest: dict[str, Any], members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        members[1][0].type, members[1][0].linkname, members[1][0].size = kind, target, 0

    return change


def change_manifest(**values: Any) -> Callable[[dict[str, Any], list[Any]], None]:
    """The manifest differs."""
    return lambda manifest, members: manifest.update(values)


@pytest.mark.parametrize(
    "change",
    [
        rename_keys("../keys.jwks"),
        rename_keys("/tmp/keys.jwks"),
        rename_keys("keys.jwks/../../x"),
        rename_keys("another"),
        rename_keys("mediator.yaml"),
        rename_keys("log.key\n"),
        change_type_of_keys(tarfile.SYMTYPE),
        change_type_of_keys(tarfile.LNKTYPE),
        change_type_of_keys(tarfile.CHRTYPE),
        change_type_of_keys(tarfile.FIFOTYPE),
        change_type_of_keys(tarfile.DIRTYPE),
        change_manifest(version=4),
        change_manifest(format="another"),
        change_manifest(backend="memory"),
        change_manifest(records={}),
        change_manifest(members=[]),
        change_manifest(members="x"),
        change_manifest(more=1),
        lambda manifest, members: members.append((tarfile.TarInfo("more"), b"x")),
        lambda manifest, members: members.append(members[0]),
        lambda manifest, members: members.reverse(),
        lambda manifest, members: members.clear(),
        lambda manifest, members: manifest["members"].pop(),
        lambda manifest, members: manifest["members"].pop(0),
        lambda manifest, members: manifest["members"][1].update(bytes=-1),
        lambda manifest, members: manifest["members"][1].update(bytes=1 << 60),
        lambda manifest, members: manifest["members"][1].update(sha256="../x"),
        lambda manifest, members: manifest["members"][1].update(mode=1 << 40),
        lambda manifest, members: members[1][0].pax_headers.update(path="../../keys.jwks"),
    ],
)
def test_refuses_forged_backup(
    change: Callable[[dict[str, Any], list[Any]], None], small_backup: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A forged backup is refused in one line, and nothing is written."""
    before = read_tree(tmp_path)
    write_forged(small_backup, change)
    assert call("restore", "--from", str(small_backup), "--dir", str(tmp_path / "new")) == 1
    assert one_line(capsys).startswith(f"cannot read {small_backup}: ")
    assert {**read_tree(tmp_path), "small.tar": b""} == {**before, "small.tar": b""}
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\0" * 10_240, b"PK\x03\x04" * 1000, Random(2).randbytes(4096), b"\x1f\x8b" + b"x" * 2000],
    ids=range(6),
)
def test_refuses_other_file(content: bytes, tmp_path: Path, capsys: Capture) -> None:
    """Any other file is refused."""
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    assert call("restore", "--from", str(path), "--dir", str(tmp_path / "new")) == 1
    assert "cannot read" in one_line(capsys)
    assert os.listdir(tmp_path) == ["x.tar"]


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE])
def test_does_not_read_extended_headers(kind: bytes, tmp_path: Path) -> None:
    """Extended headers would be read into memory at whatever size they state."""
    header = tarfile.TarInfo("keys.jwks")
    header.type, header.size = kind, 1 << 33
    path = tmp_path / "x.tar"
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    with pytest.raises(InvalidArchiveError, match="members other than regular files"):
        read_backup_file(path)


def test_refuses_store_that_differs_from_manifest(backup: Path, tmp_path: Path, capsys: Capture) -> None:
    """A store that has other counts than the manifest, or is no database, is refused and removed."""
    write_forged(backup, lambda manifest, members: manifest["records"].update(account=2))
    assert call("restore", "--from", str(backup), "--dir", str(tmp_path / "new")) == 1
    assert "its store does not match its manifest" in one_line(capsys)

    def replace_store(manifest: dict[str, Any], members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        header, content = members[-1]
        content = content[:4096] + b"\xff" * (len(content) - 4096)
        members[-1] = (header, content)
        manifest["members"][-1]["sha256"] = sha256(content).hexdigest()

    write_forged(backup, replace_store)
    assert call("restore", "--from", str(backup), "--dir", str(tmp_path / "new")) == 1
    one_line(capsys)
    assert set(read_tree(tmp_path / "new")) <= {"mediator.sqlite3.lock"}
