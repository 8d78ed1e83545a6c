"""Key rotation: the key file, and the identity built from it."""

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
    retire_root_secret,
    rotate_keys,
    serialize_keys,
)
from mediatord.identity.mediator_identity import IdentityError, MediatorIdentity
from mediatord.identity.v1_identity import V1Identity
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
    """The key ids in the order of the file, prepared ones last."""
    return [kid for kid, _ in keys]


def numbered(number: int) -> list[str]:
    """The ids of new keys."""
    return [f"{name}-{number}" for name in NAMES]


def build_from(keys: KeySet) -> MediatorIdentity:
    """The identity of these keys with the operator's configuration."""
    return MediatorIdentity(keys, URL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with one generation."""
    create_keys(tmp_path / "keys.jwks")
    return tmp_path / "keys.jwks"


def test_rotate(path: Path) -> None:
    """New keys of every curve come first, with new ids; the others stay unchanged."""
    first = load_keys(path)
    second = rotate_keys(path, build_from)
    assert second == load_keys(path)
    assert kids(second) == [*numbered(2), *NAMES]
    assert second.keys[5:] == first.keys
    assert kids(rotate_keys(path, build_from)) == [*numbered(3), *numbered(2), *NAMES]
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_only_configured_curves(path: Path) -> None:
    """A file without some curves gets no keys of these."""
    path.write_bytes(serialize_keys(KeySet(generate_keys().keys[:3])))
    assert kids(rotate_keys(path, build_from)) == ["prekey-2", "signing-2", "p256-2", "prekey", "signing", "p256"]


def test_ids_are_never_reused(path: Path) -> None:
    """Not even those of retired keys."""
    for _ in range(3):
        rotate_keys(path, build_from)
    for kid in ("prekey-3", "prekey-2"):
        retire_keys(path, kid, build_from)
    assert kids(rotate_keys(path, build_from)) == [*numbered(5), *numbered(4), *NAMES]


def test_unknown_members_are_kept(path: Path) -> None:
    """Unknown members of the file and its keys are kept."""
    document = encoding.loads_object(path.read_bytes())
    document["note"] = "ours"
    document["keys"][0]["use"] = "enc"
    path.write_bytes(encoding.dumps(document))
    rotate_keys(path, build_from)
    written = encoding.loads_object(path.read_bytes())
    assert written["note"] == "ours"
    assert written["keys"][5:] == document["keys"]


def test_symbolic_link(path: Path, tmp_path: Path) -> None:
    """A link to the file stays a link."""
    link = tmp_path / "link.jwks"
    link.symlink_to(path)
    rotate_keys(link, build_from)
    assert link.is_symlink()
    assert kids(load_keys(path))[0] == "prekey-2"


@pytest.mark.parametrize("prepare", [False, True])
def test_readable_file(path: Path, prepare: bool) -> None:
    """A file that others can read is refused with the command that fixes it, and unchanged."""
    path.chmod(0o640)
    content = path.read_bytes()
    for change in (
        lambda: rotate_keys(path, build_from, prepare=prepare),
        lambda: retire_keys(path, "prekey", build_from),
    ):
        with pytest.raises(SecretFileError, match=f"run: chmod 600 {path}$"):
            change()
    assert path.read_bytes() == content


def test_prepare(path: Path) -> None:
    """Prepared keys decrypt and are not published until they are current; there is at most one such set."""
    before = build_from(load_keys(path))
    prepared = rotate_keys(path, build_from, prepare=True)
    assert prepared == load_keys(path)
    identity = build_from(prepared)
    assert (identity.did, identity.web_document) == (before.did, before.web_document)
    (coming,) = identity.prepared_dids
    assert identity.owns(coming)
    (method,) = resolve_local(coming).key_agreement
    assert identity.agreement_keys.get(method.id) == (dict(prepared.prepared)["prekey-2"],)
    with pytest.raises(SecretFileError, match="already has prepared keys"):
        rotate_keys(path, build_from, prepare=True)
    after = build_from(rotate_keys(path, build_from))
    assert (after.did, after.former_peer_dids, after.prepared_dids) == (coming, (before.did,), ())
    assert b"prepared" not in path.read_bytes()


def test_discard_prepared_keys(path: Path) -> None:
    """As if they had not been prepared."""
    first = load_keys(path)
    rotate_keys(path, build_from, prepare=True)
    gone, left = retire_keys(path, "p384-2", build_from)
    assert (list(gone.kids), left.keys, left.prepared) == (numbered(2), first.keys, ())


def test_retire(path: Path) -> None:
    """A whole generation is removed, and its DID."""
    first = build_from(load_keys(path))
    second = build_from(rotate_keys(path, build_from))
    third = rotate_keys(path, build_from)
    content = path.read_bytes()
    gone, left = retire_keys(path, "p256-2", build_from, dry_run=True)
    assert path.read_bytes() == content
    assert list(gone.kids) == numbered(2)
    assert retire_keys(path, "p256-2", build_from) == (gone, left)
    assert load_keys(path) == left
    assert kids(left) == [*numbered(3), *NAMES]
    identity = build_from(left)
    assert identity.former_peer_dids == (first.did,)
    assert not identity.owns(second.did)
    assert identity.find_missing_dids(build_from(third)) == [second.did]


@pytest.mark.parametrize(
    ("kid", "why"),
    [("signing-2", "is a current key, which cannot be retired"), ("signing-9", "has no key signing-9")],
)
def test_cannot_retire(path: Path, kid: str, why: str) -> None:
    """Neither current keys nor unknown ones."""
    rotate_keys(path, build_from)
    content = path.read_bytes()
    with pytest.raises(SecretFileError, match=why):
        retire_keys(path, kid, build_from)
    assert path.read_bytes() == content


def test_validates_before_writing(path: Path) -> None:
    """A file that the daemon would refuse is not written."""
    former = build_from(load_keys(path)).did
    rotate_keys(path, build_from)
    content = path.read_bytes()
    for dry_run in (False, True):
        with pytest.raises(IdentityError, match="former DID"):
            check = partial(MediatorIdentity, public_url="https://other.example", former_dids=[former])
            retire_keys(path, "prekey", check, dry_run=dry_run)
    assert path.read_bytes() == content


def test_same_mediator(path: Path) -> None:
    """
    Processes recognise each other after rotation and retirement; other keys or another URL are another mediator.
    """
    first = build_from(load_keys(path))
    sets = [rotate_keys(path, build_from, prepare=True), rotate_keys(path, build_from), rotate_keys(path, build_from)]
    sets += [retire_keys(path, kid, build_from)[1] for kid in ("prekey", "prekey-2")]
    assert len(kids(sets[-1])) == len(NAMES)
    assert {build_from(keys).fingerprint for keys in sets} == {first.fingerprint}
    assert {build_from(keys).root_secret for keys in sets} == {first.root_secret}
    assert V1Identity(build_from(sets[-1]).root_secret).invitation_key == V1Identity(first.root_secret).invitation_key
    assert MediatorIdentity(sets[-1], "https://other.example").fingerprint != first.fingerprint
    other = MediatorIdentity(generate_keys(), URL)
    assert other.fingerprint != first.fingerprint
    assert not other.is_successor_of(first)
    assert all(build_from(keys).is_successor_of(first) for keys in sets)


def test_digest_of_one_generation(path: Path) -> None:
    """It is the digest of releases without rotation."""
    identity = build_from(load_keys(path))
    assert identity.fingerprint == sha256(f"{identity.did} {identity.web_did}".encode()).digest()


def test_retire_root_secret(path: Path) -> None:
    """It can be deleted once its keys are; then that of the oldest keys counts, and is kept in turn."""
    first = build_from(load_keys(path))
    with pytest.raises(SecretFileError, match="retire the oldest keys first"):
        retire_root_secret(path, build_from)
    rotate_keys(path, build_from)
    retire_keys(path, "prekey", build_from)
    content = path.read_bytes()
    seen = build_from(retire_root_secret(path, build_from, dry_run=True)).root_secret
    assert path.read_bytes() == content
    second = build_from(retire_root_secret(path, build_from))
    assert second.root_secret == seen != first.root_secret
    assert second.fingerprint == first.fingerprint
    assert encoding.encode_base64url(first.root_secret).encode() not in path.read_bytes()
    with pytest.raises(SecretFileError, match="retire the oldest keys first"):
        retire_root_secret(path, build_from)
    rotate_keys(path, build_from)
    _, left = retire_keys(path, "prekey-2", build_from)
    assert build_from(left).root_secret == build_from(load_keys(path)).root_secret == second.root_secret


def test_root_of_earlier_release(path: Path) -> None:
    """A file without a kept secret, whose oldest keys were retired before there was one, goes on from what it has."""
    rotate_keys(path, build_from)
    retire_keys(path, "prekey", build_from)
    document = encoding.loads_object(path.read_bytes())
    del document["root"]["secret"]
    path.write_bytes(encoding.dumps(document))
    before = build_from(load_keys(path)).root_secret
    rotate_keys(path, build_from)
    retire_keys(path, "prekey-2", build_from)
    assert build_from(load_keys(path)).root_secret == before


def test_root_secret_does_not_show(path: Path) -> None:
    """It is in no text of a key set."""
    rotate_keys(path, build_from)
    _, left = retire_keys(path, "prekey", build_from)
    assert repr(left.root_secret) not in repr(left)


def test_round_trip(path: Path) -> None:
    """Keys passed to other processes are the same set."""
    rotate_keys(path, build_from)
    retire_keys(path, "prekey", build_from)
    keys = rotate_keys(path, build_from, prepare=True)
    assert keys.prepared and keys.retired_root
    assert parse_keys(serialize_keys(keys), "it") == keys


@pytest.mark.parametrize("secret", ["", "AA", "!", 5, None])
def test_invalid_root_secret(path: Path, secret: object) -> None:
    """A root secret of another size is an error."""
    rotate_keys(path, build_from)
    retire_keys(path, "prekey", build_from)
    document = encoding.loads_object(path.read_bytes())
    document["root"]["secret"] = secret
    path.write_bytes(encoding.dumps(document))
    with pytest.raises(SecretFileError, match="expected a JWK set"):
        load_keys(path)


@pytest.mark.parametrize("root", [{}, [], {"agreement": "z6LS", "signing": "z6Mk"}, {"agreement": 1, "signing": 2}])
def test_invalid_root_keys(path: Path, root: object) -> None:
    """Invalid root keys are an error."""
    document = encoding.loads_object(path.read_bytes())
    path.write_bytes(encoding.dumps({**document, "root": root}))
    with pytest.raises(SecretFileError, match="expected a JWK set"):
        load_keys(path)


def test_former_keys_decrypt(path: Path) -> None:
    """Each former did:peer:2 has its own key; an id of the did:web means any that it had, the current one first."""
    first = load_keys(path)
    did = build_from(first).did
    second = rotate_keys(path, build_from)
    identity = build_from(second)
    old, new = dict(first.keys), dict(second.keys)
    assert identity.former_peer_dids == (did,)
    assert identity.agreement_keys.get(f"{did}#key-1") == (old["prekey"],)
    assert identity.agreement_keys.get(f"{identity.did}#key-1") == (new["prekey-2"],)
    assert identity.agreement_keys.get(f"{WEB}#prekey") == (new["prekey-2"], old["prekey"])
    assert identity.agreement_keys.get(f"{WEB}#p256") == (old["p256"],)
    assert identity.agreement_keys.get(f"{WEB}#p256-2") == (new["p256-2"],)
    assert identity.agreement_keys.get(f"{WEB}#{old['prekey'].public.multibase()}") == (old["prekey"],)
    assert identity.prekeys_private == (new["prekey-2"].secret, old["prekey"].secret)


def test_did_web_document_after_rotation(path: Path) -> None:
    """#prekey and #signing are the current keys; former ones are published only for verification."""
    first, second = load_keys(path), rotate_keys(path, build_from)
    identity, old, new = build_from(second), dict(first.keys), dict(second.keys)
    document = identity.web_document
    assert document["alsoKnownAs"] == [identity.did, build_from(first).did]
    read = parse_did_document(WEB, document)
    assert [(element.id, element.key) for element in read.authentication] == [
        (f"{WEB}#signing", new["signing-2"].public)
    ]
    assert [member.id.partition("#")[2] for member in read.key_agreement] == ["prekey", "p256-2", "p384-2", "p521-2"]
    assert {item.key for item in read.key_agreement}.isdisjoint(key.public for key in old.values())
    methods = {
        item["id"]: decode_multibase_key(item["publicKeyMultibase"], "Ed25519")
        for item in document["verificationMethod"]
    }
    former = old["signing"].public
    assert methods == {
        f"{WEB}#signing": new["signing-2"].public.raw,
        f"{WEB}#{former.multibase()}": former.raw,
    }
    assert identity.former_signing_keys == (former.raw,)
    third = build_from(rotate_keys(path, build_from)).web_document["verificationMethod"]
    assert [item["id"] for item in third][1:] == [f"{WEB}#signing-2", f"{WEB}#{former.multibase()}"]


def test_unequal_numbers_of_keys() -> None:
    """A key that was added by hand has no DID of its own, and decrypts by its id."""
    older = PrivateKey.from_secret("X25519", b"7" * 32)
    keys = KeySet((*generate_keys().keys, ("older", older)))
    identity = build_from(keys)
    assert identity.former_peer_dids == ()
    assert identity.agreement_keys.get(f"{WEB}#older") == (older,)


def test_rollout_stages(path: Path) -> None:
    """All processes accept new keys before one publishes them, and former ones as well."""
    first, second = load_keys(path), rotate_keys(path, build_from)
    _, third = retire_keys(path, "prekey", build_from)
    before, after = build_from(first), build_from(second)
    accepting, last = plan_key_rollout(before, after)
    assert last == second
    between = build_from(accepting)
    assert (between.did, between.prepared_dids) == (before.did, (after.did,))
    assert [item.owns(did) for item in (between, after) for did in (before.did, after.did)] == [True] * 4
    assert plan_key_rollout(after, build_from(third)) == [third]
    prepared = rotate_keys(path, build_from, prepare=True)
    assert plan_key_rollout(build_from(prepared), build_from(rotate_keys(path, build_from))) == [load_keys(path)]
