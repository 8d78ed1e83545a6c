"""
Runs ACA-Py agents: child processes with an Askar wallet in a temporary directory, on free loopback ports.

::

    wallet = ACAPyAgent("wallet")
    with run_agents(wallet):
        mediator = wallet.connect(invitation)
        wallet.use_mediator(wallet.request_mediation(mediator))
        wallet.stop()
        wallet.start()

Nothing is set that would suit a mediator: an agent runs as its documentation says.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Thread
from typing import Any
from urllib.parse import urlencode

from mediatord.wallet.temporary_daemon import find_free_port
from tests.foreign.environments import environment_without_proxies, find_python

ENVIRONMENT = ".venv-acapy"
DID_EXCHANGE_1_1 = "https://didcomm.org/didexchange/1.1"
DID_EXCHANGE_1_0 = "https://didcomm.org/didexchange/1.0"

# Longer than anything takes on a busy machine; a mediator's retries are included.
PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.05
_REQUEST_SECONDS = 60.0
_CONNECTED = ("active", "completed")

# The kernel kills an agent when the thread that started it ends; this one lasts as long as the process.
_starter = ThreadPoolExecutor(1, "acapy-starter")
_admin = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ACAPyAgent:
    """
    An agent, see :func:`run_agents`. Its wallet and ports last until it is closed.

    :param options: in addition to those that every agent has.
    """

    def __init__(self, label: str, *options: str) -> None:
        self.label = label
        self._options = options
        self._python = find_python(ENVIRONMENT)
        self._directory = Path(tempfile.mkdtemp(prefix="mediatord-acapy-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._admin_port = find_free_port()
        self.port = find_free_port()
        self._webhooks = _Webhooks()

    def start(self) -> None:
        """
        Start it and wait until it is ready.

        :raise AssertionError: it ended, or was not ready in time; the text has its output.
        """
        assert self._process is None, "the agent is running"
        with open(self._directory / "output", "ab") as output:
            self._process = _starter.submit(
                subprocess.Popen,
                [
                    *("setpriv", "--pdeathsig", "KILL", "--", str(self._python), "-W", "ignore"),
                    *("-m", "acapy_agent", "start", "--no-ledger", "--label", self.label),
                    *("--admin", "127.0.0.1", str(self._admin_port), "--admin-insecure-mode"),
                    *("--inbound-transport", "http", "127.0.0.1", str(self.port), "--outbound-transport", "http"),
                    *("--endpoint", f"http://127.0.0.1:{self.port}", "--webhook-url", self._webhooks.url),
                    *("--wallet-type", "askar", "--wallet-name", "wallet", "--wallet-key", "key", "--auto-provision"),
                    *("--auto-accept-invites", "--auto-accept-requests", *self._options),
                ],
                env={**environment_without_proxies(), "ACAPY_HOME": str(self._directory)},
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ).result()
        self._await(self._is_ready, "is not ready")

    def stop(self) -> None:
        """Stop it with SIGTERM, as a user who closes the wallet does."""
        process, self._process = self._running(), None
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Kill it if it runs, and delete its wallet."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._webhooks.close()
        shutil.rmtree(self._directory)

    def output(self) -> str:
        """Standard output and standard error of the agent."""
        return (self._directory / "output").read_text("utf-8", errors="replace")

    def request(self, method: str, path: str, body: object = None, **query: object) -> dict[str, Any]:
        """
        Send a request to the admin API.

        :raise AssertionError: another status than 200; the text has the answer.
        """
        self._running()
        url = f"http://127.0.0.1:{self._admin_port}{path}?{urlencode(query)}"
        data = None if method == "GET" else json.dumps({} if body is None else body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with _admin.open(request, timeout=_REQUEST_SECONDS) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from None

    def create_invitation(self) -> dict[str, Any]:
        """A new invitation of one use, by way of the default mediator if there is one."""
        body = {"handshake_protocols": [DID_EXCHANGE_1_1, DID_EXCHANGE_1_0]}
        return dict(self.request("POST", "/out-of-band/create-invitation", body)["invitation"])

    def receive_invitation(self, invitation: Mapping[str, Any]) -> str:
        """Accept an invitation; return the id of the connection, which is not complete yet."""
        record = self.request(
            "POST", "/out-of-band/receive-invitation", dict(invitation), use_existing_connection="false"
        )
        return str(record["connection_id"])

    def connect(self, invitation: Mapping[str, Any]) -> str:
        """Accept an invitation; return the id of the complete connection."""
        connection = self.receive_invitation(invitation)
        self.await_connection(connection)
        return connection

    def await_connection(self, connection: str) -> dict[str, Any]:
        """Wait until a connection is complete; return its record."""
        return self._await_state(f"/connections/{connection}", *_CONNECTED)

    def find_connection(self, invitation: Mapping[str, Any]) -> str:
        """Wait until somebody has accepted our invitation; return the id of the complete connection."""
        path, id_ = "/connections", invitation["@id"]

        def find() -> list[dict[str, Any]]:
            records = self.request("GET", path, invitation_msg_id=id_)["results"]
            return [record for record in records if record["state"] in _CONNECTED]

        self._await(lambda: bool(find()), "was not connected to")
        return str(find()[0]["connection_id"])

    def request_mediation(self, connection: str) -> str:
        """Request mediation and wait for the grant; return the id of the mediation."""
        id_ = self.request("POST", f"/mediation/request/{connection}")["mediation_id"]
        self._await_state(f"/mediation/requests/{id_}", "granted")
        return str(id_)

    def use_mediator(self, mediation: str | None) -> None:
        """Have later connections lead through this mediator, or through none."""
        if mediation is None:
            self.request("DELETE", "/mediation/default-mediator")
        else:
            self.request("PUT", f"/mediation/{mediation}/default-mediator")

    def await_default_mediator(self) -> dict[str, Any]:
        """Wait until a mediator that was named at the start has granted; return the record of the mediation."""
        record: dict[str, Any] = {}

        def reached() -> bool:
            # Until there is one, the status is 404.
            with suppress(AssertionError):
                record.update(self.request("GET", "/mediation/default-mediator"))
            return record.get("state") == "granted"

        self._await(reached, "has no default mediator")
        return record

    def keylist(self, mediation: str) -> list[str]:
        """The keys that the mediator has confirmed, in base58 or as did:key, as the agent stores them."""
        connection = self.request("GET", f"/mediation/requests/{mediation}")["connection_id"]
        found = self.request("GET", "/mediation/keylists", conn_id=connection, role="client")["results"]
        return [str(record["recipient_key"]) for record in found]

    def await_keylist(self, mediation: str, length: int) -> list[str]:
        """Wait until the mediator has confirmed exactly so many keys; return them."""
        self._await(lambda: len(self.keylist(mediation)) == length, f"has not {length} keys at its mediator")
        return self.keylist(mediation)

    def send_message(self, connection: str, content: str) -> None:
        """Send a basic message; the agent tries five times to deliver it, 10 s apart."""
        self.request("POST", f"/connections/{connection}/send-message", {"content": content})

    def await_messages(self, count: int) -> list[str]:
        """Wait for so many basic messages that have not been returned before; return all of those, in order."""
        self._webhooks.await_(count, self.label)
        return self._webhooks.take_messages()

    def _await_state(self, path: str, *states: str) -> dict[str, Any]:
        record: dict[str, Any] = {}

        def reached() -> bool:
            record.update(self.request("GET", path))
            return record["state"] in states

        self._await(reached, f"has {path} in another state than {states[-1]}")
        return record

    def _await(self, reached: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            status = self._running().poll()
            assert status is None, f"{self.label}: exit status {status}:\n{self.output()}"
            assert time.monotonic() < deadline, f"{self.label} {otherwise}:\n{self.output()[-8000:]}"
            time.sleep(_POLL_SECONDS)

    def _is_ready(self) -> bool:
        try:
            with _admin.open(
                f"http://127.0.0.1:{self._admin_port}/status/ready", timeout=_REQUEST_SECONDS
            ) as response:
                return bool(json.load(response)["ready"])
        except OSError:
            return False

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the agent is not running"
        return self._process


@contextmanager
def run_agents(*agents: ACAPyAgent) -> Iterator[None]:
    """Run agents, which are started at the same time."""
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(ACAPyAgent.start, agents))
        yield
    finally:
        for agent in agents:
            agent.close()


class _Webhooks:
    """
    Receives an agent's webhooks, which has no other record of basic messages.

    :ivar messages: contents of basic messages, as they came.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._changed = Condition()
        webhooks = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802  the base class's name
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path.startswith("/topic/basicmessages/"):
                    webhooks._add(json.loads(body)["content"])
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _add(self, content: str) -> None:
        with self._changed:
            self.messages.append(content)
            self._changed.notify_all()

    def await_(self, count: int, label: str) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: len(self.messages) >= count, PATIENCE_SECONDS)
            assert reached, f"{label} has {self.messages} in place of {count} messages"

    def take_messages(self) -> list[str]:
        with self._changed:
            taken, self.messages = self.messages, []
            return taken

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
