"""
mediatord's listener alone: a message is answered with an empty 202 as soon as it was read.

It writes its versions and its port as JSON. The site is the daemon's, with its limits, timeouts and headers; only
the processing of messages is replaced.

Usage: ``python serve_mediatord.py DIRECTORY``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import serverFromString

from mediatord.app.core_services import CoreServices
from mediatord.app.protocol_services import DecentrlServices, DIDCommServices
from mediatord.app.public_site import build_site
from mediatord.config.settings import Config
from mediatord.didcomm.messages import ACCEPTED, MessageOrigin, UnpackedMessage
from mediatord.http.site import MediatorSite, SiteLimits
from mediatord.identity.key_file import create_keys
from mediatord.ratelimit.admission import RequestReply
from mediatord.runtime.memory_reclaimer import tune_garbage_collector

_MAX_BODY, _MAX_PER_HOST = 1_048_576, 1_000_000


async def accept(raw: bytes, origin: MessageOrigin, opened: UnpackedMessage | None) -> RequestReply:
    """Accept any message."""
    return ACCEPTED


def site(reactor: Any, directory: Path) -> MediatorSite:
    """The daemon's site in front of :func:`accept`."""
    create_keys(directory / "keys.jwks")
    config = Config.model_validate({"storage": {"backend": "memory"}}).resolved(directory)
    base = CoreServices(reactor, config)
    front = build_site(base, DIDCommServices(base, config), DecentrlServices(base, config), config).context
    return MediatorSite(replace(front, receive=accept), SiteLimits(_MAX_BODY, _MAX_PER_HOST))


async def serve(reactor: Any, directory: str) -> None:
    endpoint = serverFromString(reactor, "tcp:0:backlog=1024:interface=127.0.0.1")
    port = await endpoint.listen(site(reactor, Path(directory)))
    versions = {name: version(name) for name in ("mediatord", "Twisted")}
    sys.stdout.write(json.dumps({"versions": versions, "port": port.getHost().port}) + "\n")
    sys.stdout.flush()
    # As the running daemon does.
    tune_garbage_collector()
    # Until the benchmark ends the process.
    await Deferred()


if __name__ == "__main__":
    task.react(serve, sys.argv[1:])
