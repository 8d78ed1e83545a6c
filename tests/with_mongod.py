"""
Runs a command beside a MongoDB of its own: `python -m tests.with_mongod COMMAND ... {uri} ...`.

`{uri}` stands for the URI of a replica set of one member, in memory if there is room, without a database.
"""

from __future__ import annotations

import subprocess
import sys
from urllib.parse import urlsplit, urlunsplit

from tests.replica_set import ReplicaSet


def main(command: list[str]) -> int:
    """The command's exit status."""
    with ReplicaSet() as servers:
        uri = urlunsplit(urlsplit(servers.uri("any"))._replace(path="/"))
        return subprocess.call([word.replace("{uri}", uri) for word in command])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
