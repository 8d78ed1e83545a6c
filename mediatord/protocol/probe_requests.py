"""
What the daemon sends to itself, to see whether it is well: by what such requests are known, and who counts as their
client. They are charged to nobody, and stand in no counter and no event.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode

# Holds a secret of this daemon's processes, in lower case as HTTP heads are read.
PROBE_HEADER = "x-mediatord-readiness"
# In the place of an address, and never one.
PROBE_CLIENT = "itself"

# The type of the service in DIDs of the daemon's own, and how the element that has it begins in each: as much of it
# as base64 does not mix with what follows.
PROBE_SERVICE_TYPE = "mediatord-readiness"
_SERVICE_PREFIX = f'{{"t":"{PROBE_SERVICE_TYPE}","s":"'.encode()
PROBE_DID_INFIX = f".S{urlsafe_b64encode(_SERVICE_PREFIX[: len(_SERVICE_PREFIX) // 3 * 3]).decode()}"


def resembles_probe_did(did: str) -> bool:
    """Whether a DID has the form of the daemon's own; only who has the mediator's keys can tell whether it is one."""
    return PROBE_DID_INFIX in did
