"""Ownership proofs over the network, with a daemon that requires them."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    anoncrypt,
    build_forward,
    compose_message,
)
from tests.integration.daemon import Daemon
from tests.integration.message_load import enrol_wallet
from tests.wallet_identities import prove_ownership

reactor: Any = _reactor


class OwnershipTests(TestCase):
    async def test_registers_did_only_with_proof(self) -> None:
        """With the proof its messages are queued; without it registration is refused."""
        daemon = Daemon({"didcomm": {"require_ownership": True}})
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        bob = await enrol_wallet(daemon, reactor)
        alias = WalletIdentity.generate(endpoint=bob.mediator.did)
        self.assertEqual(await bob.register(alias.did), ["client_error"])
        proof = prove_ownership(alias, alias.did, bob.did, bob.mediator.document, now=reactor.seconds())
        self.assertEqual(await bob.register(alias.did, proofs=[proof]), ["success"])
        self.assertEqual(await bob.registered(), [bob.did, alias.did])
        self.assertEqual(await bob.register(alias.did), ["no_change"])
        message_envelope = anoncrypt(
            compose_message(BASIC_MESSAGE, {"content": "hello"}, to=[alias.did]), alias.document
        )
        forward = anoncrypt(
            build_forward(alias.did, [message_envelope], to=[bob.mediator.did]), bob.mediator.document
        )
        self.assertEqual((await bob.post(forward)).status, 202)
        self.assertEqual((await bob.status()).message_count, 1)
