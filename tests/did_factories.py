"""Makes DIDs of the methods that mediatord only resolves: did:key, did:peer:0 and did:peer:4 (reference 8.2, 8.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.keys import PublicKey


def make_did_key(key: PublicKey) -> str:
    """The did:key of a key."""
    return f"did:key:{key.multibase()}"


def make_did_peer_0(key: PublicKey) -> str:
    """The did:peer:0 of a key."""
    return f"did:peer:0{key.multibase()}"


def make_did_peer_4(document: Mapping[str, Any]) -> tuple[str, str]:
    """
    Long and short form of the did:peer:4 of a document.

    :param document: without `id`; all ids in it are relative.
    """
    encoded = "z" + encoding.encode_base58(b"\x80\x04" + encoding.dumps(document))
    short = f"did:peer:4{encoding.encode_multihash(encoded.encode('ascii'))}"
    return f"{short}:{encoded}", short
