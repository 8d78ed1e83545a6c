"""Event stores of the published Decentrl client in one Node process, driven by the tests."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mediatord.protocol.encoding import encode_base64
from mediatord.wallet.decentrl_client import ConcludedContract, DecentrlWallet, derive_public_key
from tests.foreign.environments import PROJECT

INSTALLED = PROJECT / ".node-decentrl"
DRIVER = Path(__file__).with_name("event_store.mjs")

# Time-out of a call, which sends several requests to a local mediator.
PATIENCE_SECONDS = 120


class ClientFailed(Exception):
    """
    A call of the client threw an exception.

    :param code: the client's error code.
    :param status: status of the HTTP response that caused it; None without one.
    :param reply: body of that response.
    """

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("message")))
        self.code = error.get("code")
        self.status = error.get("status")
        self.reply = error.get("reply")


class EventStores:
    """A Node process with an event store per identity; skips the test if the client is not installed."""

    def __init__(self) -> None:
        node = shutil.which("node")
        if node is None or not (INSTALLED / ".installed").exists():
            pytest.skip(".node-decentrl is not installed; `make .node-decentrl` does that, given npm and Node 20.6")
        # The client would send loopback requests through a proxy.
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [node, DRIVER],
            cwd=INSTALLED,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )

    def open(self, name: str, wallet: DecentrlWallet, agreements: Iterable[ConcludedContract]) -> None:
        """
        An event store with the identity and the contracts of a wallet, which is registered already.

        :param agreements: contracts that it is to know.
        """
        identity = {
            "did": wallet.did,
            "mediatorDid": wallet.mediator.did,
            "mediatorEndpoint": wallet.mediator.url,
            "keys": _keys(wallet),
        }
        contracts = [
            {
                "id": agreement.id,
                "participantDid": agreement.peer_did,
                "signedCommunicationContract": agreement.signed,
                "rootSecret": encode_base64(agreement.root_secret),
            }
            for agreement in agreements
        ]
        self._request({"open": name, "identity": identity, "contracts": contracts})

    def call(self, name: str | None, method: str, *arguments: Any) -> Any:
        """
        Call a method of a store, or of the class without a store.

        :raise ClientFailed: it threw.
        """
        return self._request({"as": name, "call": method, "with": arguments})

    def read_warnings(self) -> str:
        """Warnings of the client."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def _request(self, request: Mapping[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], PATIENCE_SECONDS)
        line = stdout.readline() if ready else b""
        assert line, f"the client did not answer:\n{self.read_warnings()}"
        response = json.loads(line)
        if "error" in response:
            raise ClientFailed(response["error"])
        return response["value"]


def _keys(wallet: DecentrlWallet) -> dict[str, Any]:
    identity = wallet.identity
    return {
        "signing": {"privateKey": encode_base64(identity.seed), "publicKey": encode_base64(identity.signing_key)},
        "encryption": {
            "privateKey": encode_base64(identity.prekey),
            "publicKey": encode_base64(derive_public_key(identity.prekey)),
        },
        "storageKey": encode_base64(identity.storage_key),
    }
