"""
Runs a command beside a temporary MongoDB: `python -m tests.with_mongod COMMAND ... {uri} ...`.

`{uri}` is replaced by the URI of a replica set of one member, in memory if there is room, without a database.
"""

from __future__ import annotations

import subprocess
import sys
from urllib.parse import urlsplit, urlunsplit

from tests.replica_set import ReplicaSet


def main(command: list[str]) -> int:
    """Return the exit status of the command."""
    with ReplicaSet() as servers:
        uri = urlunsplit(urlsplit(servers.uri("any"))._replace(path="/"))
        return subprocess.call([argument.replace("{uri}", uri) for argument in command])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
