"""
Runs FCM and a Web Push service in a process: ``python -m tests.push DIRECTORY``.

Writes `ca.pem`, `fcm.json` (key file of the service account) and `services.json` (base URLs `fcm`, `web_push`,
`control`) into the directory, prints `ready`, and runs until its standard input ends.

The control server is plain HTTP: `POST /subscribe` {server_key} creates a subscription; `POST /answers` {service:
`fcm` | `token` | `web_push`, answers: [{status, body, headers, behaviour}], always} sets the next answers; `GET
/received` lists numbers of requests and connections, delivered FCM messages, and decrypted Web Push messages by
endpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import orjson
from twisted.internet import reactor as _reactor  # noqa: TID251  this is a program
from twisted.internet.protocol import Protocol
from twisted.internet.stdio import StandardIO

from tests.certificate_authority import CertificateAuthority
from tests.push.fcm_server import FCMServer
from tests.push.scripted_server import LOOPBACK, Answer, ReceivedRequest, ScriptedServer
from tests.push.web_push_server import WebPushServer

reactor: Any = _reactor


class ControlServer(ScriptedServer):
    """Scripts the services, and shows what they received."""

    def __init__(self, fcm: FCMServer, web_push: WebPushServer) -> None:
        super().__init__()
        self._fcm, self._web_push = fcm, web_push
        self._services: dict[str, ScriptedServer] = {"fcm": fcm, "token": fcm.tokens, "web_push": web_push}

    def answer(self, request: ReceivedRequest) -> Answer:
        match request.method, request.path:
            case "POST", "/subscribe":
                return Answer.of_json(200, self._web_push.subscribe(request.json["server_key"]).subscription)
            case "POST", "/answers":
                self._set_answers(**request.json)
                return Answer(204)
            case "GET", "/received":
                return Answer.of_json(200, self._list_received())
        return Answer(404)

    def _set_answers(
        self, service: str, answers: list[dict[str, Any]] | None = None, always: dict[str, Any] | None = None
    ) -> None:
        server = self._services[service]
        server.script.clear()
        server.script.extend(map(_parse_answer, answers or []))
        server.always = None if always is None else _parse_answer(always)

    def _list_received(self) -> dict[str, Any]:
        return {
            "requests": {name: len(server.received) for name, server in self._services.items()},
            "connections": {name: server.connections for name, server in self._services.items()},
            "fcm": self._fcm.delivered,
            "web_push": {
                agent.endpoint: [message.decode() for message in agent.messages]
                for agent in self._web_push.agents.values()
            },
        }


def _parse_answer(value: dict[str, Any]) -> Answer:
    return Answer(**{**value, "body": str(value.get("body", "")).encode()})


class _EndOfInput(Protocol):
    def connectionLost(self, reason: object = None) -> None:
        reactor.stop()


def main() -> None:
    """Run until the standard input ends."""
    parser = argparse.ArgumentParser(prog="tests.push")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    authority = CertificateAuthority(directory, "ca")
    certificate = authority.issue("push", [LOOPBACK, "localhost"])
    fcm, web_push = FCMServer(certificate), WebPushServer(certificate)
    control = ControlServer(fcm, web_push)
    for server in (fcm, web_push, control):
        server.start(reactor)
    fcm.write_credentials(directory / "fcm.json")
    urls = {"fcm": fcm.url, "web_push": web_push.url, "control": control.url}
    (directory / "services.json").write_bytes(orjson.dumps(urls))
    StandardIO(_EndOfInput())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    reactor.run()


if __name__ == "__main__":
    main()
