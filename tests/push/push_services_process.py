"""FCM and a Web Push service in a process of their own, for tests with daemons."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import orjson

from tests.push.scripted_server import Answer

_PATIENCE_SECONDS = 60
_ROOT = Path(__file__).parents[2]


class PushServices:
    """
    The services of ``python -m tests.push``.

    :ivar authority: PEM file of the authority that issued their certificate.
    :ivar fcm_credentials: key file of a service account, for `push.fcm.credentials`.
    :ivar fcm_url: for `push.fcm.url`.
    """

    def __init__(self, directory: Path) -> None:
        urls = orjson.loads((directory / "services.json").read_bytes())
        self.authority = directory / "ca.pem"
        self.fcm_credentials = directory / "fcm.json"
        self.fcm_url: str = urls["fcm"]
        self._control: str = urls["control"]

    def subscribe(self, server_key: str) -> dict[str, Any]:
        """A new Web Push subscription, as `PushSubscription.toJSON()`."""
        subscription: dict[str, Any] = self._call("/subscribe", {"server_key": server_key})
        return subscription

    def set_answers(self, service: str, answers: Sequence[Answer] = (), always: Answer | None = None) -> None:
        """
        Answer the next requests, and all after them, other than the service would.

        :param service: `fcm`, `token` or `web_push`.
        """
        value = {
            "service": service,
            "answers": [_to_json(answer) for answer in answers],
            "always": None if always is None else _to_json(always),
        }
        self._call("/answers", value)

    def get_received(self) -> dict[str, Any]:
        """
        Numbers of `requests` and `connections` by service, messages that `fcm` delivered, and decrypted messages of
        `web_push` by endpoint.
        """
        received: dict[str, Any] = self._call("/received")
        return received

    def _call(self, path: str, value: object = None) -> Any:
        body = None if value is None else orjson.dumps(value)
        with build_opener(ProxyHandler({})).open(
            Request(self._control + path, body), timeout=_PATIENCE_SECONDS
        ) as answer:
            content = answer.read()
        return orjson.loads(content) if content else None


def _to_json(answer: Answer) -> dict[str, object]:
    return {**vars(answer), "body": answer.body.decode()}


@contextmanager
def run_push_services(directory: Path) -> Iterator[PushServices]:
    """
    Run the services.

    :param directory: an empty one, for their files.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "tests.push", directory], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield PushServices(directory)
        finally:
            process.stdin.close()
            try:
                process.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
