"""Runs the programs of this directory, and drives wallets of Credo in one of them."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.environments import PROJECT

INSTALLED = PROJECT / ".node-credo"

# Time-out of a command, which may wait for other wallets; the program's own ones are shorter.
PATIENCE_SECONDS = 120

# How a wallet gets its mail, by Credo's names.
LIVE = "PickUpV2LiveMode"
POLLING = "PickUpV2"
BATCHES = "PickUpV1"
IMPLICIT = "Implicit"
STRATEGIES = (LIVE, POLLING, BATCHES, IMPLICIT)

# How Credo's mediator forwards: straight to the sockets and responses that are open, its default, or by its queue,
# which gives nothing to implicit pickup.
DIRECT = "DirectDelivery"
QUEUE_AND_LIVE = "QueueAndLiveModeDelivery"

# Credo's own is five seconds.
_POLLING_MILLISECONDS = 400


class CredoFailed(Exception):
    """A command failed; the text is Credo's."""


def explain_absence() -> str:
    """Why Credo cannot run here, and how to install it; empty if it can."""
    if shutil.which("node") is None or not (INSTALLED / ".installed").exists():
        return ".node-credo is not installed; `make .node-credo` does that, given npm, Node 20.19 and a C++ compiler"
    return ""


def require_credo() -> None:
    """Skip the test if Credo is not installed."""
    if reason := explain_absence():
        pytest.skip(reason)


class CredoProcess:
    """
    A program of this directory in a Node process, which ends with its standard input.

    :param program: its file.
    """

    def __init__(self, program: str, *arguments: str) -> None:
        node = shutil.which("node")
        assert node is not None, "there is no node"
        (library,) = INSTALLED.glob("askar/lib/python*/site-packages/aries_askar")
        # Credo would send loopback requests through a proxy.
        variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [node, Path(__file__).with_name(program), *arguments],
            cwd=INSTALLED,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**variables, "LIB_ASKAR_PATH": str(library)},
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def write(self, value: Any) -> None:
        """Send it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        """The next line that it writes."""
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], PATIENCE_SECONDS)
        line = stdout.readline() if ready else b""
        assert line, f"Credo did not answer:\n{self.read_errors()}"
        return json.loads(line)

    def read_errors(self) -> str:
        """Its standard error."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()


@dataclass(frozen=True)
class CredoMediator:
    """Credo's mediator as a running process; its queue is in its memory."""

    invitation: str
    pid: int


@contextmanager
def run_credo_mediator(directory: Path, forwarding: str = DIRECT) -> Iterator[CredoMediator]:
    """
    Run Credo's mediator on loopback within this context.

    :param directory: an empty one, for its keys and records.
    :param forwarding: :data:`DIRECT` or :data:`QUEUE_AND_LIVE`.
    """
    process = CredoProcess("mediator.mjs", str(directory), forwarding)
    try:
        yield CredoMediator(process.read()["invitation"], process.pid)
    finally:
        process.close()


class CredoWallet:
    """
    A wallet with a mediator, in the process of :class:`CredoWallets`.

    :param settings: of its start.
    :ivar running: whether it was started and has not been stopped.
    """

    def __init__(self, process: CredoProcess, name: str, settings: dict[str, Any]) -> None:
        self._process, self._name, self._settings = process, name, settings
        self.running = False

    def start(self) -> None:
        """
        Start it with its keys and records, if it has any; else connect to the mediator and await the grant.

        :raise CredoFailed: it was not granted.
        """
        self.running = True
        self._request("start", **self._settings)

    def stop(self) -> None:
        """Close its sockets and its store."""
        self.running = False
        self._request("stop")

    def find_mediator(self) -> dict[str, Any]:
        """Its record of the mediator: `connectionId`, `state`, `endpoint`, and a `pickupStrategy` that it found."""
        return dict(self._request("mediator"))

    def accept(self, url: str) -> str:
        """Accept an invitation; the id of the complete connection."""
        return str(self._request("accept", url=url))

    def connect(self, other: CredoWallet) -> tuple[str, str]:
        """
        Invite another wallet through the mediator, with a new key.

        :return: the id of the connection here, and there.
        """
        invitation = self._request("invite")
        theirs = other.accept(invitation["url"])
        return self._request("accepted", invitation=invitation["id"]), theirs

    def send(self, connection: str, content: str) -> None:
        """Send a text."""
        self._request("send", connection=connection, content=content)

    def await_texts(self, count: int) -> list[str]:
        """
        The texts that it has received, oldest first.

        :param count: of texts to wait for.
        :raise CredoFailed: they did not come in time.
        """
        return list(self._request("texts", count=count))

    def ping(self, connection: str) -> None:
        """
        Send a trust ping.

        :raise CredoFailed: the response did not come in time.
        """
        self._request("ping", connection=connection)

    def ping_mediator(self) -> None:
        """As :meth:`ping`, to the mediator."""
        self.ping(self.find_mediator()["connectionId"])

    def reuse(self, invitation: str) -> str:
        """
        Accept an invitation of an agent that it has a connection with already, and propose to use that again.

        :return: the id of the connection that is used, which is the old one if the agent accepted.
        """
        return str(self._request("reuse", url=invitation))

    def forget(self, connection: str) -> None:
        """Delete a connection, and have its key removed by the mediator."""
        self._request("forget", connection=connection)

    def received(self) -> list[dict[str, Any]]:
        """All messages that it has received since its start, in plaintext."""
        return list(self._request("messages"))

    def received_types(self) -> list[str]:
        """Their types, without the prefix."""
        return [message["@type"].removeprefix("https://didcomm.org/") for message in self.received()]

    def _request(self, command: str, **options: Any) -> Any:
        self._process.write({"wallet": self._name, "command": command, **options})
        response = self._process.read()
        if "error" in response:
            raise CredoFailed(response["error"])
        return response["value"]


class CredoWallets:
    """A Node process with wallets of Credo, and their stores; skips the test if Credo is not installed."""

    def __init__(self) -> None:
        require_credo()
        self._directory = tempfile.TemporaryDirectory(prefix="mediatord-credo-")
        self._process = CredoProcess("wallet.mjs")
        self._count = 0
        self._wallets: list[CredoWallet] = []

    def create(
        self,
        invitation: str,
        strategy: str | None,
        *,
        peer_did: int = 4,
        knows_pickup_2: bool = True,
        **options: Any,
    ) -> CredoWallet:
        """
        A wallet that is not started yet.

        :param invitation: the mediator's, as URL.
        :param strategy: how it gets its mail; with None it asks the mediator for its features.
        :param peer_did: the method of did:peer, 1, 2 or 4, that it connects with.
        :param knows_pickup_2: whether it understands Message Pickup 2.0.
        :param options: of Credo's DidCommModule.
        """
        self._count += 1
        name = f"wallet-{self._count}"
        directory = Path(self._directory.name, name)
        directory.mkdir()
        settings = {
            "directory": str(directory),
            "invitation": invitation,
            "polling": _POLLING_MILLISECONDS,
            "peerDid": peer_did,
            "knowsPickup2": knows_pickup_2,
            "options": options,
        }
        if strategy is not None:
            settings["strategy"] = strategy
        wallet = CredoWallet(self._process, name, settings)
        self._wallets.append(wallet)
        return wallet

    def read_errors(self) -> str:
        """What failed in the background."""
        return self._process.read_errors()

    def stop(self) -> None:
        """Stop all wallets that run; those that poll load the process and the mediator."""
        for wallet in self._wallets:
            if wallet.running:
                wallet.stop()
        self._wallets.clear()

    def close(self) -> None:
        """End the process and delete the stores."""
        self._process.close()
        self._directory.cleanup()
