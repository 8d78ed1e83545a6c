"""
An S3 server on loopback that keeps objects in memory, and that can fail at an exact request.

Runs in the environment `.s3`, without mediatord: prints its port, and ends at the end of its standard input.

PUT of `/-/stop` takes JSON: after a PUT to a path that ends with `trigger`, the server carries out `changes` further
requests that change something, and nothing after them: it refuses requests, or with `hang` does not answer. GET tells
whether it has come to that. DELETE ends it; what was not answered until then is refused.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Environ = dict[str, Any]
_CHANGES = ("PUT", "POST", "DELETE")
_CONTROL = "/-/stop"


class StoppingServer:
    """WSGI application before that of the server."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._lock = threading.Lock()
        self._is_open = threading.Event()
        self._rule: dict[str, Any] | None = None
        self._left: int | None = None

    def __call__(self, environ: Environ, respond: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _CONTROL:
            return self._control(environ, respond)
        if self._admit(environ):
            return self._application(environ, respond)
        if (rule := self._rule) and rule["hang"]:
            self._is_open.wait()
        # S3A does not repeat these.
        respond("403 Forbidden", [("Content-Length", "0"), ("Connection", "close")])
        return []

    def _admit(self, environ: Environ) -> bool:
        with self._lock:
            if self._rule is None:
                return True
            if self._left is None:
                if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith(self._rule["trigger"]):
                    self._left = self._rule["changes"]
                return True
            if self._left > 0 and environ["REQUEST_METHOD"] in _CHANGES:
                self._left -= 1
                return True
            return self._left > 0

    def _control(self, environ: Environ, respond: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        with self._lock:
            if method != "GET":
                self._is_open.set()
                self._is_open = threading.Event()
                self._left = None
                length = int(environ.get("CONTENT_LENGTH") or 0)
                self._rule = json.loads(environ["wsgi.input"].read(length)) if method == "PUT" else None
            body = json.dumps(self._left == 0).encode()
        respond("200 OK", [("Content-Length", str(len(body)))])
        return [body]


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = StoppingServer(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
