"""
What waits for whom, as the store's own place says it: read and taken out beside a daemon that may be running.

A store is not opened as the daemon opens it, which would take what a running one has pushed for pending again.
"""

from __future__ import annotations

from mediatord.cli.queues.values import Entry, Queue, Scope, Waiting
from mediatord.config import Config
from mediatord.service import StartupError

__all__ = ["Entry", "Queue", "Scope", "Waiting", "waiting_in"]


def waiting_in(config: Config) -> Waiting:
    """
    What waits in the store of this configuration.

    :raise StartupError: nobody can look into it from outside.
    """
    storage = config.storage
    if storage.backend == "memory":
        raise StartupError("storage.backend: nobody but the daemon itself knows what is in its memory")
    if storage.backend == "sqlite":
        from mediatord.cli.queues.sqlite import WaitingInFile

        return WaitingInFile(storage.sqlite.path)
    try:
        from mediatord.cli.queues.mongodb import WaitingInMongoDB
    except ImportError as error:
        if error.name is None or error.name.startswith("mediatord"):
            raise
        raise StartupError('storage.backend mongodb needs pip install "mediatord[mongodb]"') from None
    return WaitingInMongoDB(storage.mongodb.uri)
