"""
Wallets of the PyPI package `didcomm` (SICPA) against a running mediator.

Usage: ``python sicpa_wallet.py URL THEME…``, in the environment of requirements-sicpa.txt.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from conversation import CM3, PICKUP, PING, Mediator, OpenedMessage, compose_message, open_session, send_chat
from didcomm.common.algorithms import AnonCryptAlg
from didcomm.common.resolvers import ResolversConfig
from didcomm.did_doc.did_doc import DIDDoc
from didcomm.did_doc.did_resolver import DIDResolver
from didcomm.pack_encrypted import PackEncryptedConfig, pack_encrypted
from didcomm.secrets.secrets_resolver import Secret, SecretsResolver
from didcomm.secrets.secrets_resolver_in_memory import SecretsResolverInMemory
from didcomm.secrets.secrets_util import jwk_to_secret
from didcomm.unpack import unpack
from sicpa_documents import (
    JWK,
    Resolve,
    dialect,
    generate,
    multikey,
    old_key_ids,
    old_peer_did,
    peer_did,
    public,
    spec_key_ids,
)
from steps import ENCRYPTED, Steps, Theme, get, run_themes
from themes import COMMON, mediation_3, pickup

ENCS = {
    "XC20P": AnonCryptAlg.XC20P_ECDH_ES_A256KW,
    "A256GCM": AnonCryptAlg.A256GCM_ECDH_ES_A256KW,
    "A256CBC-HS512": AnonCryptAlg.A256CBC_HS512_ECDH_ES_A256KW,
}


@dataclass
class Sicpa:
    """
    One configuration of the library.

    :param curve: key agreement curve of the wallets and of the mediator's key.
    :param create: creates the wallets' DIDs.
    :param resolve_own: resolves them.
    :param resolve_mediator: resolves the mediator's DID.
    """

    curve: str = "X25519"
    create: Callable[[str, str, str], tuple[str, list[str]]] = peer_did
    resolve_own: Resolve = spec_key_ids
    resolve_mediator: Resolve = spec_key_ids
    media_type: str = ENCRYPTED
    encs: tuple[str, ...] = tuple(ENCS)
    mediator: str = ""
    jwks: dict[str, JWK] = field(default_factory=dict)

    async def wallet(self, mediator: str) -> Wallet:
        self.mediator = mediator
        keys = [generate(self.curve), generate("Ed25519")]
        agreement, authentication = (multikey(jwk) for jwk in keys)
        if self.curve != "X25519":
            self.jwks[agreement] = public(keys[0])
        did, fragments = self.create(agreement, authentication, mediator)
        secrets = [jwk_to_secret({**jwk, "kid": f"{did}#{name}"}) for jwk, name in zip(keys, fragments, strict=True)]
        return Wallet(did, ResolversConfig(SecretsResolverInMemory(secrets), Resolver(self)))

    async def endpoints(self, did: str) -> list[str]:
        return [str(service.service_endpoint) for service in dialect(self.resolve_mediator(did), {}, str).service]

    def routing_key(self, mediator: str) -> str:
        """Key id of the mediator on this curve."""
        document = dialect(self.resolve_mediator(mediator), {}, str)
        methods = [method for method in document.verification_method if method.id in document.key_agreement]
        curves = {
            (getattr(method, "public_key_jwk", None) or {"crv": "X25519"})["crv"]: method.id for method in methods
        }
        return str(curves[self.curve])


class Resolver(DIDResolver):
    """Resolver passed to the library."""

    def __init__(self, library: Sicpa) -> None:
        self._library = library

    async def resolve(self, did: str) -> DIDDoc:
        library = self._library
        document = library.resolve_mediator(did) if did == library.mediator else library.resolve_own(did)
        return dialect(document, library.jwks, library.routing_key)


@dataclass(frozen=True)
class Wallet:
    """One DID of this library."""

    opens_signed: ClassVar[bool] = True
    did: str
    resolvers: ResolversConfig

    async def authcrypt(self, message: dict[str, Any], to: str, **options: Any) -> str:
        return await self.pack(message, to, PackEncryptedConfig(forward=False), frm=self.did, **options)

    async def anoncrypt(self, message: dict[str, Any], to: str) -> str:
        return await self.pack(message, to, PackEncryptedConfig(forward=False))

    async def route(self, message: dict[str, Any], to: str, enc: str, *, anonymous: bool = False) -> str:
        # The library uses enc_alg_anon for the forward, and for the message inside if that is anonymous.
        config = PackEncryptedConfig(enc_alg_anon=ENCS[enc])
        return await self.pack(message, to, config, frm=None if anonymous else self.did)

    async def pack(self, message: dict[str, Any], to: str, config: PackEncryptedConfig, **options: Any) -> str:
        result = await pack_encrypted(self.resolvers, message, to, pack_config=config, **options)
        return str(result.packed_msg)

    async def open(self, packed: str | bytes) -> OpenedMessage:
        result = await unpack(self.resolvers, packed if isinstance(packed, str) else packed.decode())
        kid, signer = result.metadata.encrypted_from, result.metadata.sign_from
        return OpenedMessage(result.message.as_dict(), str(kid) if kid else None, str(signer) if signer else None)


async def nesting(mediator: Mediator, steps: Steps) -> None:
    """Nested envelopes: a protected sender, a signature inside."""
    bob, alice = await open_session(Sicpa(), mediator), await open_session(Sicpa(), mediator)
    ping = partial(compose_message, PING, bob.wallet, mediator.did)
    for enc, algorithm in ENCS.items():
        with steps.step(f"anoncrypt-{enc}-of-authcrypt"):
            config = PackEncryptedConfig(forward=False, protect_sender_id=True, enc_alg_anon=algorithm)
            packed = await bob.wallet.pack(ping(), mediator.did, config, frm=bob.wallet.did)
            assert (await bob.read(bob.post(packed).body))["type"].endswith("ping-response")
    with steps.step("authcrypt-of-signed"):
        packed = await bob.wallet.authcrypt(ping(), mediator.did, sign_frm=bob.wallet.did)
        assert (await bob.read(bob.post(packed).body))["type"].endswith("ping-response")
    with steps.step("forward-of-anoncrypt-of-authcrypt-of-signed"):
        await bob.enrol()
        config = PackEncryptedConfig(protect_sender_id=True)
        message = compose_message(PING, alice.wallet, bob.wallet.did)
        options = {"frm": alice.wallet.did, "sign_frm": alice.wallet.did}
        response = alice.post(await alice.wallet.pack(message, bob.wallet.did, config, **options))
        assert (response.status, response.body) == (202, b""), response
        delivery = await bob.request(PICKUP + "delivery-request", {"limit": 1})
        (opened,) = await bob.attached(delivery)
        assert opened.message["id"] == message["id"], opened
        assert opened.sender_kid == f"{alice.wallet.did}#key-1", opened


async def rewrapped(mediator: Mediator, steps: Steps) -> None:
    """With ``rewrap: true`` a message arrives in a forward to its recipient, which the library unwraps."""
    bob, alice = await open_session(Sicpa(), mediator), await open_session(Sicpa(), mediator)
    with steps.step("deliver"):
        await bob.enrol()
        await send_chat(alice, bob.wallet.did, "twice wrapped", "XC20P")
        delivery = await bob.request(PICKUP + "delivery-request", {"limit": 1})
    with steps.step("unwrap"):
        (attachment,) = delivery["attachments"]
        result = await unpack(bob.wallet.resolvers, json.dumps(attachment["data"]["json"]))
        assert result.metadata.re_wrapped_in_forward, result.metadata
        assert result.message.body == {"content": "twice wrapped"}, result


async def rotation(mediator: Mediator, steps: Steps) -> None:
    """An account moves to a new DID, proven by the old one (from_prior)."""
    library = Sicpa()
    old, new = await open_session(library, mediator), await open_session(library, mediator)
    with steps.step("enrol"):
        await old.enrol()
    with steps.step("from-prior"):
        prior = {"iss": old.wallet.did, "sub": new.wallet.did}
        # The library signs the token itself, so it needs the old keys as well.
        both = CombinedSecrets(new.wallet.resolvers.secrets_resolver, old.wallet.resolvers.secrets_resolver)
        wallet = Wallet(new.wallet.did, ResolversConfig(both, new.wallet.resolvers.did_resolver))
        packed = await wallet.authcrypt(compose_message(PING, wallet, mediator.did, from_prior=prior), mediator.did)
        assert (await new.read(new.post(packed).body))["type"].endswith("ping-response")
    with steps.step("recipients-moved"):
        listed = await new.request(CM3 + "recipient-query")
        assert listed["body"] == {"dids": [{"recipient_did": old.wallet.did}]}, listed


class CombinedSecrets(SecretsResolver):
    """The secrets of two wallets."""

    def __init__(self, *resolvers: SecretsResolver) -> None:
        self._resolvers = resolvers

    async def get_key(self, kid: str) -> Secret | None:
        secrets = [await resolver.get_key(kid) for resolver in self._resolvers]
        return next((secret for secret in secrets if secret), None)

    async def get_keys(self, kids: list[str]) -> list[str]:
        return [kid for resolver in self._resolvers for kid in await resolver.get_keys(kids)]


def themes(url: str) -> dict[str, Theme]:
    """Themes of this library, by name."""
    mediator = Mediator.at(url)
    document = get(f"{url}/.well-known/did.json").json
    web = Mediator(url, document["id"])
    of_web = partial(Sicpa, resolve_mediator={web.did: document}.__getitem__)
    chosen = {name: partial(theme, Sicpa(), mediator) for name, theme in COMMON.items()}
    old = Sicpa(create=old_peer_did, resolve_own=old_key_ids, resolve_mediator=old_key_ids)
    chosen["pickup-old-key-ids"] = partial(pickup, old, mediator)
    chosen["nesting"] = partial(nesting, mediator)
    chosen["rewrapped"] = partial(rewrapped, mediator)
    chosen["rotation"] = partial(rotation, mediator)
    chosen["did-web-mediation-3"] = partial(mediation_3, of_web(), web)
    for curve in ("X25519", "P-256", "P-384", "P-521"):
        chosen[f"did-web-{curve}"] = partial(pickup, of_web(curve=curve), web)
    return chosen


if __name__ == "__main__":
    asyncio.run(run_themes(themes(sys.argv[1]), sys.argv[2:]))
