"""
Collections of the Decentrl half and their indexes.

`_id` is the id that the caller chose, except of a party: there it is the key that stands for its DID, as `party`,
`sender` and `peer` do in the other collections. `seq` is filled in by the server: the order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

from mediatord.store.mongo.schema import Collection, Index

PARTIES = "parties"
REGISTRATIONS = "registrations"


@dataclass(frozen=True, slots=True)
class Table:
    """
    A collection of what is kept for parties, and counted.

    :param counter: of its documents, in the party.
    :param bytes: of their `size` and `tags_size`, likewise; empty if nobody counts them.
    :param payloads: collection of what is long in them, under the same `_id`; empty if that is in them.
    """

    name: str
    counter: str
    bytes: str = ""
    payloads: str = ""


CONTRACTS = Table("contracts", "contracts")
REQUESTS = Table("contract_requests", "requests")
PENDING = Table("pending_events", "pending", "pending_bytes")
STORED = Table("stored_events", "stored", "archive_bytes", "stored_payloads")
PUBLIC = Table("public_events", "published", "archive_bytes", "public_payloads")

PARTY_UNUSED = "party_unused"
REGISTRATION_OF_PARTY = "registration_of_party"
REGISTRATION_UNTIL = "registration_until"
CONTRACT_OF_PARTY = "contract_of_party"
CONTRACT_OF_PAIR = "contract_of_pair"
CONTRACT_DIGEST = "contract_digest"
REQUEST_OF_PARTY = "request_of_party"
REQUEST_OF_PAIR = "request_of_pair"
PENDING_OF_PARTY = "pending_of_party"
PENDING_OF_PAIR = "pending_of_pair"
PENDING_ARRIVED = "pending_arrived"
# Of stored and of public events.
LABELLED = "labelled"

_LABELLED = Index(LABELLED, {"labels": 1, "at": 1, "seq": 1})

COLLECTIONS = (
    # `did`, `registered_until`, `edition` and counters; `waited_for` while there are pending events, and `unused` as
    # long as nothing is kept for it: a change of what an index depends on costs the server twice as much.
    Collection(
        PARTIES,
        (
            Index("party_waited_for", {"waited_for": 1}, partial={"waited_for": {"$exists": True}}),
            Index(PARTY_UNUSED, {"unused": 1, "registered_until": 1}, partial={"unused": {"$exists": True}}),
        ),
    ),
    # `party`, `until`, `digest`, `text`.
    Collection(
        REGISTRATIONS,
        (Index(REGISTRATION_OF_PARTY, {"party": 1, "until": 1}), Index(REGISTRATION_UNTIL, {"until": 1})),
    ),
    # `party`, `peer`, `peer_did`, `until`, `digest`, `text`, `seq`.
    Collection(
        CONTRACTS.name,
        (
            Index(CONTRACT_OF_PARTY, {"party": 1, "seq": 1, "until": 1}),
            Index(CONTRACT_OF_PAIR, {"party": 1, "peer": 1, "seq": 1, "until": 1}),
            Index(CONTRACT_DIGEST, {"party": 1, "digest": 1}, unique=True),
        ),
    ),
    # `party`, `sender`, `sender_did`, `text`, `public_key`, `seq`.
    Collection(
        REQUESTS.name,
        (Index(REQUEST_OF_PARTY, {"party": 1, "seq": 1}), Index(REQUEST_OF_PAIR, {"party": 1, "sender": 1})),
    ),
    # `party`, `recipient_did`, `sender`, `sender_did`, `received_at`, `size`, `payload`, `seq`.
    Collection(
        PENDING.name,
        (
            Index(PENDING_OF_PARTY, {"party": 1, "seq": 1}),
            Index(PENDING_OF_PAIR, {"party": 1, "sender": 1, "seq": 1}),
            # All that is asked of these, so that only keys are read.
            Index(PENDING_ARRIVED, {"party": 1, "received_at": 1, "_id": 1}),
        ),
    ),
    # `party`, `labels`, `at`, `tags`, `tags_size`, `size` of the payload, `seq`.
    Collection(STORED.name, (_LABELLED,)),
    Collection(PUBLIC.name, (_LABELLED,)),
    # `sender_did`, `recipient_did`, `contract_id`, `payload`; `event`, `signature`, `channel`.
    Collection(STORED.payloads),
    Collection(PUBLIC.payloads),
)
