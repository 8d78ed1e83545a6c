"""
The floor of HTTP: an ordinary `twisted.web` Site that reads a POST and answers an empty 202, as a process of its own.

Everything is at its default, as a server written in an hour would have it.
"""

from __future__ import annotations

import sys
from typing import Any

from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import serverFromString
from twisted.web.resource import Resource
from twisted.web.server import Request, Site


class _Accepting(Resource):
    isLeaf = True

    def render_POST(self, request: Request) -> bytes:
        request.setResponseCode(202)
        return b""


async def _serve(reactor: Any) -> None:
    port = await serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(Site(_Accepting()))
    sys.stdout.write(f"{port.getHost().port}\n")
    sys.stdout.flush()
    # Until the benchmark ends the process.
    await Deferred()


if __name__ == "__main__":
    task.react(_serve)
