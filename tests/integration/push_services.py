"""Push services in a process of their own, for daemons that are processes too."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS, prepare_daemon

_POLL_SECONDS = 0.05
# Short enough to see more than one wake-up in a test.
TIMES = {"quiet_after_poll": "1s", "min_interval": "2s"}


class PushServices:
    """
    FCM and a Web Push service over TLS on loopback; see :mod:`tests.push.__main__`.

    :ivar directory: with `ca.pem`, the authority of their certificates.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mediatord-push-"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.push", str(self.directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.urls: dict[str, str] = json.loads((self.directory / "services.json").read_bytes())
        key = ec.generate_private_key(ec.SECP256R1())
        vapid = self.directory / "vapid.pem"
        vapid.touch(0o600)
        vapid.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def close(self) -> None:
        """End the process, and remove its files."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_SECONDS)
        shutil.rmtree(self.directory)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that trusts their certificates."""
        return {"SSL_CERT_FILE": str(self.directory / "ca.pem")}

    def settings(self, **push: Any) -> dict[str, Any]:
        """Configuration of a daemon that uses them. :param push: changes to its section."""
        configured = {
            "fcm": {"credentials": str(self.directory / "fcm.json"), "url": self.urls["fcm"]},
            "web_push": {"key_file": str(self.directory / "vapid.pem"), "contact": "mailto:admin@mediator.example"},
            **TIMES,
            **push,
        }
        return {"push": configured, "outbound": {"allow_private": ["127.0.0.0/8"]}}

    def prepare_daemon(self, settings: dict[str, Any] | None = None, **push: Any) -> Daemon:
        """A daemon that uses them, not running. :param settings: beside those of push."""
        daemon = prepare_daemon({**(settings or {}), **self.settings(**push)})
        daemon.environment.update(self.environment)
        return daemon

    def subscribe(self, server_key: str) -> dict[str, Any]:
        """A new subscription of a browser, as `PushSubscription.toJSON()` returns it."""
        subscription: dict[str, Any] = self._call("POST", "/subscribe", {"server_key": server_key})
        return subscription

    def set_answers(self, service: str, *answers: dict[str, Any], always: dict[str, Any] | None = None) -> None:
        """What `fcm`, `token` or `web_push` answers next, or from now on."""
        self._call("POST", "/answers", {"service": service, "answers": answers, "always": always})

    def received(self) -> dict[str, Any]:
        """What the services have received so far."""
        received: dict[str, Any] = self._call("GET", "/received")
        return received

    def await_received(self, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """
        Wait until what was received satisfies a condition; blocks.

        :raise AssertionError: it does not in time.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached(received := self.received()):
            assert time.monotonic() < deadline, received
            time.sleep(_POLL_SECONDS)
        return received

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.urls["control"] + path, data, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
            content = response.read()
        return json.loads(content) if content else None
