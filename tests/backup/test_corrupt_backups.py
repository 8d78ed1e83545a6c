"""Backups that are torn, altered or forged: refused in one line, and nothing is written."""

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
def small(tmp_path: Path) -> Path:
    """A backup that is small enough to be broken at every place."""
    for name in ("mediator.yaml", "keys.jwks", "store.records.gz"):
        (tmp_path / name).write_bytes(name.encode())
    path = tmp_path / "small.tar"
    with create_file_atomically(path) as file:
        names = ("mediator.yaml", "keys.jwks", "store.records.gz")
        write_backup_file(file, "mongodb", counts(), {name: tmp_path / name for name in names})
    return path


def counts() -> dict[str, int]:
    """Of nothing."""
    return dict.fromkeys(RECORD_KINDS, 0)


def contents(path: Path) -> tuple[BackupManifest, dict[str, bytes], bytes]:
    """All that a backup says."""
    store = io.BytesIO()
    return *read_backup_file(path, store_target=store), store.getvalue()


def test_every_torn_one_is_refused(small: Path) -> None:
    """Cut anywhere before the last byte that counts; behind that there are zeros."""
    whole = small.read_bytes()
    for length in [*range(0, len(whole.rstrip(b"\0")), 7), len(whole.rstrip(b"\0")) - 1]:
        small.write_bytes(whole[:length])
        with pytest.raises(InvalidArchiveError, match="cannot read") as caught:
            read_backup_file(small)
        assert "\n" not in str(caught.value)


@pytest.mark.exhaustive
def test_every_altered_one_is_refused(small: Path) -> None:
    """A bit flipped in any byte, or nothing else is read."""
    whole, random = small.read_bytes(), Random(1)
    said = contents(small)
    refused = 0
    for place in range(len(whole)):
        altered = bytearray(whole)
        altered[place] ^= 1 << random.randrange(8)
        small.write_bytes(altered)
        try:
            read_backup_file(small)
        except InvalidArchiveError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert contents(small) == said
    assert refused > len(whole.replace(b"\0", b""))


def forged(path: Path, change: Callable[[dict[str, Any], list[tuple[tarfile.TarInfo, bytes]]], None]) -> Path:
    """A backup by somebody who can count: with right digests, and what is to be wrong."""
    with tarfile.open(path) as tar:
        members = [(one, tar.extractfile(one).read()) for one in tar.getmembers()]  # type: ignore[union-attr]
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


def named(name: str) -> Callable[[dict[str, Any], list[tuple[tarfile.TarInfo, bytes]]], None]:
    """The keys are called something else, in the manifest as well."""

    def change(manifest: dict[str, Any], members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        manifest["members"][1]["name"] = members[1][0].name = name

    return change


def typed(kind: bytes, target: str = "/etc/passwd") -> Callable[[dict[str, Any], list[Any]], None]:
    """The keys are no plain file."""

    def change(manifest: dict[str, Any], members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        members[1][0].type, members[1][0].linkname, members[1][0].size = kind, target, 0

    return change


def said(**values: Any) -> Callable[[dict[str, Any], list[Any]], None]:
    """The manifest says something else."""
    return lambda manifest, members: manifest.update(values)


@pytest.mark.parametrize(
    "change",
    [
        named("../keys.jwks"),
        named("/tmp/keys.jwks"),
        named("keys.jwks/../../x"),
        named("another"),
        named("mediator.yaml"),
        named("log.key\n"),
        typed(tarfile.SYMTYPE),
        typed(tarfile.LNKTYPE),
        typed(tarfile.CHRTYPE),
        typed(tarfile.FIFOTYPE),
        typed(tarfile.DIRTYPE),
        said(version=2),
        said(format="another"),
        said(backend="memory"),
        said(records={}),
        said(members=[]),
        said(members="x"),
        said(more=1),
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
def test_what_is_forged_is_refused(
    change: Callable[[dict[str, Any], list[Any]], None], small: Path, tmp_path: Path, capsys: Capture
) -> None:
    """In one line, and nothing is written."""
    before = read_tree(tmp_path)
    forged(small, change)
    assert call("restore", "--from", str(small), "--dir", str(tmp_path / "new")) == 1
    assert one_line(capsys).startswith(f"cannot read {small}: ")
    assert {**read_tree(tmp_path), "small.tar": b""} == {**before, "small.tar": b""}
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\0" * 10_240, b"PK\x03\x04" * 1000, Random(2).randbytes(4096), b"\x1f\x8b" + b"x" * 2000],
    ids=range(6),
)
def test_what_is_none_is_refused(content: bytes, tmp_path: Path, capsys: Capture) -> None:
    """Whatever it is instead."""
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    assert call("restore", "--from", str(path), "--dir", str(tmp_path / "new")) == 1
    assert "cannot read" in one_line(capsys)
    assert os.listdir(tmp_path) == ["x.tar"]


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE])
def test_headers_of_headers_are_not_read(kind: bytes, tmp_path: Path) -> None:
    """They would be read into memory, as long as they say that they are."""
    header = tarfile.TarInfo("keys.jwks")
    header.type, header.size = kind, 1 << 33
    path = tmp_path / "x.tar"
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    with pytest.raises(InvalidArchiveError, match="members other than regular files"):
        read_backup_file(path)


def test_a_store_that_is_not_what_the_manifest_counts(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    """Or that is no database of ours: refused, and nothing is left of it."""
    forged(saved, lambda manifest, members: manifest["records"].update(account=2))
    assert call("restore", "--from", str(saved), "--dir", str(tmp_path / "new")) == 1
    assert "its store does not match its manifest" in one_line(capsys)

    def other(manifest: dict[str, Any], members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        header, content = members[-1]
        content = content[:4096] + b"\xff" * (len(content) - 4096)
        members[-1] = (header, content)
        manifest["members"][-1]["sha256"] = sha256(content).hexdigest()

    forged(saved, other)
    assert call("restore", "--from", str(saved), "--dir", str(tmp_path / "new")) == 1
    one_line(capsys)
    assert set(read_tree(tmp_path / "new")) <= {"mediator.sqlite3.lock"}
