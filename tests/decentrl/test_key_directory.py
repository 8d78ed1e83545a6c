"""The directory of signing keys: DIDs that contain their keys, and the mediator's own."""

from __future__ import annotations

import pytest

from mediatord.decentrl.authentication import KeyDirectory

OWN = "did:web:mediator.example"


@pytest.fixture
def directory() -> KeyDirectory:
    """A directory of a mediator with a current and a former key."""
    return KeyDirectory({OWN}, lambda: [b"current", b"former"])


@pytest.mark.parametrize("did", ["did:decentrl:unknown", "did:web:other.example", "did:key:z6MkInbox", "x"])
def test_other_dids_have_no_key(directory: KeyDirectory, did: str) -> None:
    """A DID that contains no keys resolves to nothing, also with the right key id."""
    assert not directory.resolves(did)
    assert directory.signing_key(did, f"{did}#signing") is None


def test_own_keys_by_number(directory: KeyDirectory) -> None:
    """The mediator's DIDs have its current and its former keys, under the one key id."""
    assert directory.resolves(OWN)
    assert [directory.signing_key(OWN, f"{OWN}#signing", number) for number in (0, 1)] == [b"current", b"former"]
    assert directory.signing_key(OWN, f"{OWN}#other") is None
