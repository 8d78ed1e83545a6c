"""The mediator's invitations of DIDComm v1: Out-of-Band 1.1 and, for older wallets, Connections 1.0."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode
from uuid import NAMESPACE_URL, uuid5

from mediatord.protocol.didcomm_v1.did_document import DID_COMMUNICATION
from mediatord.protocol.didcomm_v1.keys import encode_base58_key
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG
from mediatord.protocol.encoding import dumps, encode_base64url

# By this goal, wallets know a mediator.
GOAL_CODE = "aries.vc.mediate"
_GOAL = "Mediate"
_ACCEPTED_PROFILES = ["didcomm/aip2;env=rfc19", "didcomm/aip1"]
_HANDSHAKE_PROTOCOLS = [f"{DIDCOMM_ORG}didexchange/1.1", f"{DIDCOMM_ORG}didexchange/1.0"]
# Query parameters of URLs that contain an invitation.
OOB_PARAMETER, CONNECTION_PARAMETER = "oob", "c_i"

JSONObject = dict[str, Any]


def derive_invitation_id(public_url: str) -> str:
    """
    The id of the invitation of the mediator at a URL.

    It is the same as long as the URL is: wallets read the invitation at each start, and for another id they connect
    again and lose their keys.
    """
    return str(uuid5(NAMESPACE_URL, f"{public_url}#didcomm-v1"))


def build_invitation(public_url: str, endpoint: str, key: str, label: str) -> JSONObject:
    """
    The Out-of-Band 1.1 invitation, which any number of wallets may answer.

    It has one service, and a goal beside its code: ACA-Py refuses any other number, and a code alone.

    :param endpoint: http(s) URL.
    :param key: of the invitation.
    """
    service = {
        "id": "#inline-0",
        "type": DID_COMMUNICATION,
        "recipientKeys": [key],
        "serviceEndpoint": endpoint,
    }
    return {
        "@type": f"{DIDCOMM_ORG}out-of-band/1.1/invitation",
        "@id": derive_invitation_id(public_url),
        "label": label,
        "goal_code": GOAL_CODE,
        "goal": _GOAL,
        "accept": _ACCEPTED_PROFILES,
        "handshake_protocols": _HANDSHAKE_PROTOCOLS,
        "services": [service],
    }


def build_connection_invitation(public_url: str, endpoint: str, key: str, label: str) -> JSONObject:
    """The Connections 1.0 invitation, likewise. The parameters are those of :func:`build_invitation`."""
    return {
        "@type": f"{DIDCOMM_ORG}connections/1.0/invitation",
        "@id": derive_invitation_id(public_url),
        "label": label,
        "recipientKeys": [encode_base58_key(key)],
        "serviceEndpoint": endpoint,
    }


def build_url(address: str, parameter: str, invitation: JSONObject) -> str:
    """The URL that contains an invitation. Base64url has no padding, which Credo 0.7 does not read."""
    return f"{address}?{urlencode({parameter: encode_base64url(dumps(invitation))})}"
