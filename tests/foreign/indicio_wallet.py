"""
Wallets of the PyPI package `didcomm-messaging` (Indicio) against a running mediator.

Usage: ``python indicio_wallet.py askar|authlib URL THEME…``, in the environment of requirements-indicio.txt.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import did_peer_2
from aries_askar import Key, KeyAlg
from authlib.jose import OKPKey
from conversation import PICKUP, Mediator, OpenedMessage, compose_chat
from didcomm_messaging import DIDCommMessaging, UnpackResult, quickstart
from didcomm_messaging.crypto.backend.askar import AskarCryptoService, AskarKey, AskarSecretKey
from didcomm_messaging.crypto.backend.authlib import AuthlibCryptoService, AuthlibKey, AuthlibSecretKey
from didcomm_messaging.crypto.backend.basic import InMemorySecretsManager
from didcomm_messaging.packaging import PackagingService
from didcomm_messaging.resolver import PrefixResolver
from didcomm_messaging.resolver.peer import Peer2, Peer4
from didcomm_messaging.routing import RoutingService
from steps import TIMEOUT_SECONDS, Steps, Theme, post, run_themes
from themes import COMMON


class Askar:
    """Keys of the library's Askar backend (Rust)."""

    crypto = AskarCryptoService
    secret = AskarSecretKey

    @staticmethod
    def generate(curve: str) -> tuple[Key, str]:
        key = Key.generate(KeyAlg.ED25519 if curve == "Ed25519" else KeyAlg.X25519)
        return key, AskarKey.key_to_multikey(key)


class Authlib:
    """Keys of the library's Authlib backend (Python)."""

    crypto = AuthlibCryptoService
    secret = AuthlibSecretKey

    @staticmethod
    def generate(curve: str) -> tuple[OKPKey, str]:
        key = OKPKey.generate_key(curve, is_private=True)
        return key, AuthlibKey.key_to_multikey(key)


BACKENDS: dict[str, type[Askar] | type[Authlib]] = {"askar": Askar, "authlib": Authlib}


@dataclass(frozen=True)
class Indicio:
    """The library with one of its backends."""

    backend: type[Askar] | type[Authlib]
    media_type: str = "application/octet-stream"  # what the library's own client sends
    encs: tuple[str, ...] = ("XC20P",)  # the only one it emits

    async def wallet(self, mediator: str) -> Wallet:
        """As in the library's quickstart: the signing key comes first, so the X25519 key is `#key-2`."""
        (signing, verification), (secret, agreement) = (self.backend.generate(c) for c in ("Ed25519", "X25519"))
        keys = [did_peer_2.KeySpec.verification(verification), did_peer_2.KeySpec.key_agreement(agreement)]
        endpoint = {"uri": mediator, "accept": ["didcomm/v2"]}
        did = did_peer_2.generate(keys, [{"type": "DIDCommMessaging", "serviceEndpoint": endpoint}])
        secrets = InMemorySecretsManager()
        await secrets.add_secret(self.backend.secret(signing, f"{did}#key-1"))
        await secrets.add_secret(self.backend.secret(secret, f"{did}#key-2"))
        resolver = PrefixResolver({"did:peer:2": Peer2(), "did:peer:4": Peer4()})
        parts = (self.backend.crypto(), secrets, resolver, PackagingService(), RoutingService())
        return Wallet(did, DIDCommMessaging(*parts))

    async def endpoints(self, did: str) -> list[str]:
        document = await Peer2().resolve_and_parse(did)
        return [str(service.service_endpoint.uri) for service in document.service]


@dataclass(frozen=True)
class Wallet:
    """One DID of this library, which does not verify JWS."""

    opens_signed: ClassVar[bool] = False
    did: str
    messaging: DIDCommMessaging

    async def authcrypt(self, message: dict[str, Any], to: str) -> bytes:
        return await self.pack(message, to, self.did)

    async def anoncrypt(self, message: dict[str, Any], to: str) -> bytes:
        return await self.pack(message, to, None)

    async def pack(self, message: dict[str, Any], to: str, frm: str | None) -> bytes:
        """Encrypt without routing."""
        messaging = self.messaging
        parts = (messaging.crypto, messaging.resolver, messaging.secrets, json.dumps(message).encode(), [to], frm)
        return bytes(await messaging.packaging.pack(*parts))

    async def route(self, message: dict[str, Any], to: str, enc: str, *, anonymous: bool = False) -> bytes:
        assert enc == "XC20P", enc
        packed = await self.messaging.pack(message, to, None if anonymous else self.did)
        assert packed.get_endpoint("http").startswith("http"), "its routing found no endpoint of the mediator"
        return bytes(packed.message)

    async def open(self, packed: str | bytes) -> OpenedMessage:
        result = await self.messaging.unpack(packed)
        return OpenedMessage(result.message, result.sender_kid)


class RecordingMessaging(DIDCommMessaging):
    """Messaging that keeps unpacked messages, which the quickstart passes to its callback only in part."""

    def __init__(self, messaging: DIDCommMessaging) -> None:
        super().__init__(
            messaging.crypto, messaging.secrets, messaging.resolver, messaging.packaging, messaging.routing
        )
        self.opened: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def unpack(self, encoded_message: bytes, **options: Any) -> UnpackResult:
        result = await super().unpack(encoded_message, **options)
        self.opened.put_nowait(result.message)
        return result


class Quickstart:
    """The library's own client code, unchanged: a wallet behind a relay, and what its callback received."""

    def __init__(
        self, mediator: Mediator, messaging: RecordingMessaging, did: str, relay_did: str, alice: Wallet
    ) -> None:
        self.mediator, self.messaging, self.did, self.relay_did, self.alice = (
            mediator,
            messaging,
            did,
            relay_did,
            alice,
        )
        self.received: list[str] = []

    @classmethod
    async def enrol(cls, mediator: Mediator) -> Quickstart:
        did, keys = quickstart.generate_did()
        messaging = RecordingMessaging(await quickstart.setup_default(did, keys))
        relay_did = await quickstart.setup_relay(messaging, did, mediator.did, *keys)
        return cls(mediator, messaging, did, relay_did, await Indicio(Askar).wallet(mediator.did))

    async def send(self, content: str) -> None:
        """Send a message from another wallet, with the library's routing."""
        packed = await self.alice.route(compose_chat(self.alice, self.relay_did, content), self.relay_did, "XC20P")
        response = post(self.mediator.http, packed)
        assert (response.status, response.body) == (202, b""), response

    async def fetch(self) -> Any:
        return await quickstart.fetch_relayed_messages(self.messaging, self.did, self.mediator.did, self._keep)

    async def listen(self) -> asyncio.Task[None]:
        """Open the WebSocket and wait for the status that confirms live delivery."""
        self.messaging.opened = asyncio.Queue()
        arguments = (self.messaging, self.did, self.mediator.did, self._keep)
        listener = await quickstart.activate_websocket(*arguments, create_task=True)
        status = await self.receive()
        assert status["body"]["live_delivery"] is True, status
        return listener

    async def receive(self) -> dict[str, Any]:
        """The next message that the library unpacks."""
        return await asyncio.wait_for(self.messaging.opened.get(), TIMEOUT_SECONDS)

    async def _keep(self, message: dict[str, Any]) -> None:
        self.received.append(message["body"]["content"])


async def run_quickstart(mediator: Mediator, steps: Steps) -> None:
    """Enrol, fetch and listen. The callback gets no deliveries, so pushes must be fetched as well."""
    with steps.step("setup_relay"):
        bob = await Quickstart.enrol(mediator)
    with steps.step("fetch_relayed_messages"):
        await bob.send("one")
        await bob.send("two")
        await bob.fetch()
        assert bob.received == ["one", "two"], bob.received
        assert await bob.fetch() == []
    with steps.step("activate_websocket"):
        listener = await bob.listen()
    with steps.step("push"):
        await bob.send("three")
        delivery = await bob.receive()
        assert delivery["type"] == PICKUP + "delivery", delivery
        listener.cancel()
    with steps.step("nothing-lost"):
        await bob.fetch()
        assert bob.received == ["one", "two", "three"], bob.received


async def raw_push(mediator: Mediator, steps: Steps) -> None:
    """With ``live_push: raw`` the callback gets pushes; they stay queued, as nothing is acknowledged."""
    bob = await Quickstart.enrol(mediator)
    with steps.step("push"):
        listener = await bob.listen()
        await bob.send("for your callback")
        chat = await bob.receive()
        assert chat["from"] == bob.alice.did, chat
        listener.cancel()
    with steps.step("fetch_relayed_messages"):
        await bob.fetch()
        assert bob.received[-1] == "for your callback", bob.received


def themes(backend: str, url: str) -> dict[str, Theme]:
    """Themes of this library, by name."""
    mediator = Mediator.at(url)
    chosen: dict[str, Theme] = {
        name: partial(theme, Indicio(BACKENDS[backend]), mediator) for name, theme in COMMON.items()
    }
    # The quickstart is written for the Askar backend.
    return {**chosen, "quickstart": partial(run_quickstart, mediator), "raw-push": partial(raw_push, mediator)}


if __name__ == "__main__":
    asyncio.run(run_themes(themes(*sys.argv[1:3]), sys.argv[3:]))
