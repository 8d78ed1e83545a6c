"""A complete sample of every request, with optional members."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MEDIATOR = "did:web:mediator.example"
ALICE = (
    "did:decentrl:YWxpY2U:z6Mkon3Necd6NkkyfoGoHxid2znGc59LU3K7mubaRcFbLfLX:"
    "z6LSqaU49Tn4sboPj9gbrxmcJ7sHF5gu6bzAASfJnh9meXK6:ZGlkOndlYjptZWRpYXRvci5leGFtcGxl"
)
NONCE = "6f1c1d52-6a0b-4e0e-9a37-0d6f3a1b2c3d"
SIGNATURE = "mARV7l20vMxGwMYCyxe3Fpg9a360DNkpSqnEccemwI/M1yVZcPBL1JPFyOv6vYnKb6IhdSu7O2fbft3FcW8vCg=="
SECRET = "c2VjcmV0IHNlY3JldA=="

CONTRACT = {
    "requestor_did": ALICE,
    "recipient_did": MEDIATOR,
    "requestor_signing_key_id": f"{ALICE}#signing",
    "recipient_signing_key_id": f"{MEDIATOR}#signing",
    "requestor_encryption_public_key": SECRET,
    "recipient_encryption_public_key": SECRET,
    "expires_at": 1791536000,
    "timestamp": 1760000000,
}
SIGNED_CONTRACT = {
    "communication_contract": CONTRACT,
    "requestor_signature": SECRET,
    "recipient_signature": SECRET,
}
PAGINATION = {"page": 2, "page_size": 100}

DIRECT: Mapping[str, Mapping[str, Any]] = {
    "REQUEST_COMMUNICATION_CONTRACT": {
        "encrypted_contract_request": SECRET,
        "requestor_ephemeral_public_key": SECRET,
    },
    "COMMUNICATION_CONTRACT_RESPONSE": {"signed_communication_contract": SIGNED_CONTRACT},
    "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS": {"pagination": PAGINATION},
    "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS": {"communication_contract_ids": ["1", "2"]},
    "SAVE_COMMUNICATION_CONTRACT": {"signed_communication_contract": SIGNED_CONTRACT},
    "QUERY_COMMUNICATION_CONTRACTS": {
        "filter": {"did": ALICE, "expires_at_before": 1730659200, "expires_at_after": 1699123456},
        "pagination": PAGINATION,
    },
    "QUERY_PENDING_EVENTS": {"filter": {"sender_did": ALICE}, "pagination": PAGINATION},
    "ACKNOWLEDGE_PENDING_EVENTS": {"event_ids": ["1", "2"]},
    "SAVE_EVENTS": {
        "events": [
            {
                "sender_did": ALICE,
                "recipient_did": ALICE,
                "contract_id": "c1",
                "timestamp": 1699123456,
                "payload": SECRET,
                "encrypted_tags": [SECRET],
            }
        ]
    },
    "QUERY_EVENTS": {
        "filter": {
            "after_timestamp": 1699000000,
            "before_timestamp": 1699999999,
            "participant_did": ALICE,
            "encrypted_tags": [SECRET],
            "unprocessed_only": True,
        },
        "pagination": PAGINATION,
    },
    "UPDATE_EVENT_TAGS": {"events": [{"event_id": "1", "encrypted_tags": [SECRET]}]},
    "SET_PUSH_DEVICE": {"encrypted_push_device": SECRET, "sender_ephemeral_public_key": SECRET},
    "QUERY_PUSH_DEVICES": {"sender_ephemeral_public_key": SECRET},
    "REMOVE_PUSH_DEVICES": {"service": "web_push"},
}
PUBLIC: Mapping[str, Mapping[str, Any]] = {
    "PUBLISH_PUBLIC_EVENT": {
        "event": SECRET,
        "tags": [SECRET],
        "timestamp": 1710000000,
        "event_signature": SECRET,
        "channel_id": "blog",
    },
    "DELETE_PUBLIC_EVENT": {"public_event_id": "1"},
}
CHANNELS = {
    **dict.fromkeys(DIRECT, "DIRECT_AUTHENTICATED"),
    **dict.fromkeys(PUBLIC, "ONE_WAY_PUBLIC"),
    "TWO_WAY_PRIVATE": "TWO_WAY_PRIVATE",
}


def payload(name: str) -> Any:
    """A complete payload of this type, as a new copy."""
    members = {**DIRECT, **PUBLIC}.get(name)
    return SECRET if members is None else {"type": name, **json.loads(json.dumps(members))}


def command(name: str, **header: Any) -> dict[str, Any]:
    """A complete command, as a new copy."""
    return {
        "header": {
            "channel": CHANNELS[name],
            "sender_did": ALICE,
            "sender_signing_key_id": f"{ALICE}#signing",
            "recipient_did": MEDIATOR,
            "timestamp": 1760000000000,
            "nonce": NONCE,
            **header,
        },
        "payload": payload(name),
        "signature": SIGNATURE,
    }


def authenticate(**members: Any) -> dict[str, Any]:
    """The first frame of a socket."""
    return {
        "type": "AUTHENTICATE",
        "did": ALICE,
        "signing_key_id": f"{ALICE}#signing",
        "timestamp": 1760000000000,
        "nonce": NONCE,
        "signature": SIGNATURE,
        **members,
    }
