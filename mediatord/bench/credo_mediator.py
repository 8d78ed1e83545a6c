"""Credo's own mediator, a program of the source tree that needs Node and packages from npm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryDirectory
from urllib.parse import parse_qs, urlsplit

from mediatord.bench.processes import read_line
from mediatord.protocol.encoding import decode_base64, loads_object
from mediatord.wallet.didcomm_v1_messages import V1Invitation
from mediatord.wallet.temporary_daemon import stop_process

_SOURCE_TREE = Path(__file__).parents[2]
_INSTALLED = _SOURCE_TREE / ".node-credo"
_PROGRAM = _SOURCE_TREE / "tests" / "foreign" / "credo" / "mediator.mjs"
# It queues messages, and delivers them to the sockets of wallets in live mode.
_FORWARDING = "QueueAndLiveModeDelivery"


def explain_absence() -> str:
    """Why it cannot run here, and how to install it; empty if it can."""
    if shutil.which("node") and (_INSTALLED / ".installed").exists() and _PROGRAM.exists():
        return ""
    return "needs a source tree in which `make .node-credo` was run, with Node 20.19"


@contextmanager
def run_credo_mediator() -> Iterator[tuple[V1Invitation, int]]:
    """Run it on loopback, with its queue in memory; its invitation and its process."""
    node, libraries = shutil.which("node"), _INSTALLED.glob("askar/lib/python*/site-packages/aries_askar")
    assert node is not None, "there is no node"
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    variables["LIB_ASKAR_PATH"] = str(next(libraries))
    with TemporaryDirectory(prefix="mediatord-bench-") as place:
        process = Popen(
            [node, _PROGRAM, place, _FORWARDING],
            cwd=_INSTALLED,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # warnings about its load
            text=True,
            env=variables,
        )
        try:
            yield _read_invitation(loads_object(read_line(process).encode())["invitation"]), process.pid
        finally:
            stop_process(process)


def _read_invitation(url: str) -> V1Invitation:
    """It names a service for each transport, of which wallets of ours take one."""
    (encoded,) = parse_qs(urlsplit(url).query)["oob"]
    value = loads_object(decode_base64(encoded))
    http = next(one for one in value["services"] if one["serviceEndpoint"].startswith("http:"))
    return V1Invitation.from_json(value | {"services": [http]})
