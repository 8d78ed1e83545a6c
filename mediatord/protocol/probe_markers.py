"""Markers of the daemon's own probe requests, which are exempt from rate limits, metrics and the event log."""

from __future__ import annotations

from base64 import urlsafe_b64encode

# Carries a secret of this daemon's processes. Lower case, as the HTTP parser delivers header names.
PROBE_HEADER = "x-mediatord-readiness"
# Client identity of probes. It is used in place of an address, and is never a valid one.
PROBE_CLIENT = "itself"

# Service type in probe DIDs, and the beginning of that did:peer:2 element: its prefix whose base64 does not depend on
# what follows.
PROBE_SERVICE_TYPE = "mediatord-readiness"
_SERVICE_PREFIX = f'{{"t":"{PROBE_SERVICE_TYPE}","s":"'.encode()
PROBE_DID_INFIX = f".S{urlsafe_b64encode(_SERVICE_PREFIX[: len(_SERVICE_PREFIX) // 3 * 3]).decode()}"


def resembles_probe_did(did: str) -> bool:
    """Whether a DID has the form of a probe DID; only a holder of the mediator's keys can verify that it is one."""
    return PROBE_DID_INFIX in did
