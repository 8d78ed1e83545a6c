"""New keys for a mediator, beside those of before: the key file, and the identity that is made of it."""

from __future__ import annotations

import os
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from mediatord.app.current_identity import plan_key_rollout
from mediatord.identity.key_file import (
    KeySet,
    create_keys,
    generate_keys,
    load_keys,
    parse_keys,
    retire_keys,
    rotate_keys,
    serialize_keys,
)
from mediatord.identity.mediator_identity import IdentityError, MediatorIdentity
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.did_decentrl import decode_multibase_key
from mediatord.protocol.didcomm.did_document import parse_did_document
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.runtime.secret_files import SecretFileError

URL = "https://m.example"
WEB = "did:web:m.example"
NAMES = ("prekey", "signing", "p256", "p384", "p521")


def kids(keys: KeySet) -> list[str]:
    """The ids in the order of the file, the prepared ones last."""
    return [kid for kid, _ in keys]


def numbered(number: int) -> list[str]:
    """The ids that fresh keys have."""
    return [f"{name}-{number}" for name in NAMES]


def fits(keys: KeySet) -> MediatorIdentity:
    """What the operator's configuration makes of it."""
    return MediatorIdentity(keys, URL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with one generation."""
    create_keys(tmp_path / "keys.jwks")
    return tmp_path / "keys.jwks"


def test_rotate(path: Path) -> None:
    """New keys of every curve are the first, with ids that no key had before, and the others stay as they are."""
    first = load_keys(path)
    second = rotate_keys(path, fits)
    assert second == load_keys(path)
    assert kids(second) == [*numbered(2), *NAMES]
    assert second.keys[5:] == first.keys
    assert kids(rotate_keys(path, fits)) == [*numbered(3), *numbered(2), *NAMES]
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_curves_that_are_served(path: Path) -> None:
    """A file without some curves gets no keys of these."""
    path.write_bytes(serialize_keys(KeySet(generate_keys().keys[:3])))
    assert kids(rotate_keys(path, fits)) == ["prekey-2", "signing-2", "p256-2", "prekey", "signing", "p256"]


def test_ids_are_never_given_twice(path: Path) -> None:
    """Not even those of keys that were retired."""
    for _ in range(3):
        rotate_keys(path, fits)
    for kid in ("prekey-3", "prekey-2"):
        retire_keys(path, kid, fits)
    assert kids(rotate_keys(path, fits)) == [*numbered(5), *numbered(4), *NAMES]


def test_what_somebody_has_written_stays(path: Path) -> None:
    """Members of the file and of its keys that mean nothing here are kept."""
    document = encoding.loads_object(path.read_bytes())
    document["note"] = "ours"
    document["keys"][0]["use"] = "enc"
    path.write_bytes(encoding.dumps(document))
    rotate_keys(path, fits)
    written = encoding.loads_object(path.read_bytes())
    assert written["note"] == "ours"
    assert written["keys"][5:] == document["keys"]


def test_through_a_link(path: Path, tmp_path: Path) -> None:
    """A link to the file stays one."""
    link = tmp_path / "link.jwks"
    link.symlink_to(path)
    rotate_keys(link, fits)
    assert link.is_symlink()
    assert kids(load_keys(path))[0] == "prekey-2"


@pytest.mark.parametrize("prepare", [False, True])
def test_open_to_others(path: Path, prepare: bool) -> None:
    """A file that others can read is refused with the command that mends it, and stays as it is."""
    path.chmod(0o640)
    content = path.read_bytes()
    for change in (lambda: rotate_keys(path, fits, prepare=prepare), lambda: retire_keys(path, "prekey", fits)):
        with pytest.raises(SecretFileError, match=f"run: chmod 600 {path}$"):
            change()
    assert path.read_bytes() == content


def test_prepare(path: Path) -> None:
    """Prepared keys open and are told to nobody, until they are the current ones; there are never two such sets."""
    before = fits(load_keys(path))
    prepared = rotate_keys(path, fits, prepare=True)
    assert prepared == load_keys(path)
    identity = fits(prepared)
    assert (identity.did, identity.web_document) == (before.did, before.web_document)
    (coming,) = identity.prepared_dids
    assert identity.owns(coming)
    (method,) = resolve_local(coming).key_agreement
    assert identity.agreement_keys.get(method.id) == (dict(prepared.prepared)["prekey-2"],)
    with pytest.raises(SecretFileError, match="already has prepared keys"):
        rotate_keys(path, fits, prepare=True)
    after = fits(rotate_keys(path, fits))
    assert (after.did, after.former_peer_dids, after.prepared_dids) == (coming, (before.did,), ())
    assert b"prepared" not in path.read_bytes()


def test_prepared_keys_can_be_dropped(path: Path) -> None:
    """As if nothing had been."""
    first = load_keys(path)
    rotate_keys(path, fits, prepare=True)
    gone, left = retire_keys(path, "p384-2", fits)
    assert (list(gone.kids), left.keys, left.prepared) == (numbered(2), first.keys, ())


def test_retire(path: Path) -> None:
    """All that was made together with a key goes; the DID with it."""
    first = fits(load_keys(path))
    second = fits(rotate_keys(path, fits))
    third = rotate_keys(path, fits)
    content = path.read_bytes()
    gone, left = retire_keys(path, "p256-2", fits, dry_run=True)
    assert path.read_bytes() == content
    assert list(gone.kids) == numbered(2)
    assert retire_keys(path, "p256-2", fits) == (gone, left)
    assert load_keys(path) == left
    assert kids(left) == [*numbered(3), *NAMES]
    identity = fits(left)
    assert identity.former_peer_dids == (first.did,)
    assert not identity.owns(second.did)
    assert identity.find_missing_dids(fits(third)) == [second.did]


@pytest.mark.parametrize(
    ("kid", "why"),
    [("signing-2", "is a current key, which cannot be retired"), ("signing-9", "has no key signing-9")],
)
def test_not_retired(path: Path, kid: str, why: str) -> None:
    """Neither what is in use nor what is not there."""
    rotate_keys(path, fits)
    content = path.read_bytes()
    with pytest.raises(SecretFileError, match=why):
        retire_keys(path, kid, fits)
    assert path.read_bytes() == content


def test_checked_before_it_is_written(path: Path) -> None:
    """What the daemon would refuse is not written."""
    former = fits(load_keys(path)).did
    rotate_keys(path, fits)
    content = path.read_bytes()
    for dry_run in (False, True):
        with pytest.raises(IdentityError, match="former DID"):
            check = partial(MediatorIdentity, public_url="https://other.example", former_dids=[former])
            retire_keys(path, "prekey", check, dry_run=dry_run)
    assert path.read_bytes() == content


def test_the_same_mediator(path: Path) -> None:
    """Whatever is rotated and retired, processes know each other; those with other keys or another URL are others."""
    first = fits(load_keys(path))
    sets = [rotate_keys(path, fits, prepare=True), rotate_keys(path, fits), rotate_keys(path, fits)]
    secrets = {fits(keys).root_secret for keys in sets}
    sets += [retire_keys(path, kid, fits)[1] for kid in ("prekey", "prekey-2")]
    assert len(kids(sets[-1])) == len(NAMES)
    assert {fits(keys).fingerprint for keys in sets} == {first.fingerprint}
    assert secrets == {first.root_secret}
    assert MediatorIdentity(sets[-1], "https://other.example").fingerprint != first.fingerprint
    other = MediatorIdentity(generate_keys(), URL)
    assert other.fingerprint != first.fingerprint
    assert not other.is_successor_of(first)
    assert all(fits(keys).is_successor_of(first) for keys in sets)


def test_digest_of_one_generation(path: Path) -> None:
    """It is what releases that knew no rotation take it for."""
    identity = fits(load_keys(path))
    assert identity.fingerprint == sha256(f"{identity.did} {identity.web_did}".encode()).digest()


def test_written_and_read(path: Path) -> None:
    """What is handed to other processes is the same set."""
    rotate_keys(path, fits)
    retire_keys(path, "prekey", fits)
    keys = rotate_keys(path, fits, prepare=True)
    assert keys.prepared and keys.retired_root
    assert parse_keys(serialize_keys(keys), "it") == keys


@pytest.mark.parametrize("root", [{}, [], {"agreement": "z6LS", "signing": "z6Mk"}, {"agreement": 1, "signing": 2}])
def test_bad_root(path: Path, root: object) -> None:
    """A root that is none is a mistake like any other."""
    document = encoding.loads_object(path.read_bytes())
    path.write_bytes(encoding.dumps({**document, "root": root}))
    with pytest.raises(SecretFileError, match="expected a JWK set"):
        load_keys(path)


def test_former_keys_open(path: Path) -> None:
    """Each former did:peer:2 has its own key; a name of the did:web means any that it had, the current one first."""
    first = load_keys(path)
    did = fits(first).did
    second = rotate_keys(path, fits)
    identity = fits(second)
    old, new = dict(first.keys), dict(second.keys)
    assert identity.former_peer_dids == (did,)
    assert identity.agreement_keys.get(f"{did}#key-1") == (old["prekey"],)
    assert identity.agreement_keys.get(f"{identity.did}#key-1") == (new["prekey-2"],)
    assert identity.agreement_keys.get(f"{WEB}#prekey") == (new["prekey-2"], old["prekey"])
    assert identity.agreement_keys.get(f"{WEB}#p256") == (old["p256"],)
    assert identity.agreement_keys.get(f"{WEB}#p256-2") == (new["p256-2"],)
    assert identity.agreement_keys.get(f"{WEB}#{old['prekey'].public.multibase()}") == (old["prekey"],)
    assert identity.prekeys_private == (new["prekey-2"].secret, old["prekey"].secret)


def test_the_web_document_after_a_rotation(path: Path) -> None:
    """#prekey and #signing are the current keys; former ones are told for nothing but to verify what was signed."""
    first, second = load_keys(path), rotate_keys(path, fits)
    identity, old, new = fits(second), dict(first.keys), dict(second.keys)
    document = identity.web_document
    assert document["alsoKnownAs"] == [identity.did, fits(first).did]
    read = parse_did_document(WEB, document)
    assert [(one.id, one.key) for one in read.authentication] == [(f"{WEB}#signing", new["signing-2"].public)]
    assert [one.id.partition("#")[2] for one in read.key_agreement] == ["prekey", "p256-2", "p384-2", "p521-2"]
    assert {one.key for one in read.key_agreement}.isdisjoint(key.public for key in old.values())
    methods = {
        one["id"]: decode_multibase_key(one["publicKeyMultibase"], "Ed25519")
        for one in document["verificationMethod"]
    }
    former = old["signing"].public
    assert methods == {
        f"{WEB}#signing": new["signing-2"].public.raw,
        f"{WEB}#{former.multibase()}": former.raw,
    }
    assert identity.former_signing_keys == (former.raw,)
    third = fits(rotate_keys(path, fits)).web_document["verificationMethod"]
    assert [one["id"] for one in third][1:] == [f"{WEB}#signing-2", f"{WEB}#{former.multibase()}"]


def test_unequal_numbers() -> None:
    """A key of one kind that was added by hand has no DID of its own, and opens by name."""
    older = PrivateKey.from_secret("X25519", b"7" * 32)
    keys = KeySet((*generate_keys().keys, ("older", older)))
    identity = fits(keys)
    assert identity.former_peer_dids == ()
    assert identity.agreement_keys.get(f"{WEB}#older") == (older,)


def test_stages(path: Path) -> None:
    """Before anybody tells of new keys everybody accepts them, and those of before as well."""
    first, second = load_keys(path), rotate_keys(path, fits)
    _, third = retire_keys(path, "prekey", fits)
    before, after = fits(first), fits(second)
    accepting, last = plan_key_rollout(before, after)
    assert last == second
    between = fits(accepting)
    assert (between.did, between.prepared_dids) == (before.did, (after.did,))
    assert [one.owns(did) for one in (between, after) for did in (before.did, after.did)] == [True] * 4
    assert plan_key_rollout(after, fits(third)) == [third]
    prepared = rotate_keys(path, fits, prepare=True)
    assert plan_key_rollout(fits(prepared), fits(rotate_keys(path, fits))) == [load_keys(path)]
