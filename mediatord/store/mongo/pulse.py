"""A collection that is there to be asked and written to when nothing but the server is meant."""

from __future__ import annotations

from mediatord.store.mongo.cursors import finding
from mediatord.store.mongo.requests import Request, updating

PULSE = "pulse"


def feeling() -> Request:
    """Any question."""
    return finding(PULSE, {"_id": PULSE})


def beating(id: str = PULSE) -> list[Request]:
    """
    Any write: a server that has lost its majority can still be read.

    :param id: of the document; who writes another is in nobody's way.
    """
    return updating(PULSE, [{"q": {"_id": id}, "u": [{"$set": {"at": "$$NOW"}}], "upsert": True}])
