"""
Collections of the DIDComm half and their indexes.

Times are seconds since the epoch, by the clock of whoever wrote them. `seq` is filled in by the server: the order of
arrival. Accounts and recipients have short ids of their own, so that indexes of messages stay small and an account
can go by another DID.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from mediatord.protocol.canonical_did import canonical_did, did_digest
from mediatord.store.mongo.cursors import finding
from mediatord.store.mongo.ledger import LEDGER
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.pulse import PULSE
from mediatord.store.mongo.replies import Duplicate
from mediatord.store.mongo.requests import Document, deleting, updating
from mediatord.store.mongo.schema import Collection, Index, Migration
from mediatord.store.recipient_names import RecipientNames

ACCOUNTS = "accounts"
RECIPIENTS = "recipients"
MESSAGES = "messages"
RETIRED = "retired"
DOCUMENTS = "documents"
NONCES = "nonces"
OWNERS = "owners"

# Documents that a migration reads together.
_AT_A_TIME = 500

# `did`, `created_at`, `draft03`; `recipients`, under how many names DIDs are registered, and `places`, how many ever
# were; `seen_at`, the last authenticated contact, to a day; `fresh`, until it is known that the account is used.
_ACCOUNTS = Collection(
    ACCOUNTS,
    (
        Index("account_did", {"did": 1}, unique=True),
        Index("account_fresh", {"created_at": 1}, partial={"fresh": {"$exists": True}}),
        Index("account_seen", {"seen_at": 1}),
    ),
)

# A DID that an account has registered, or had registered when something came that still waits. `account`, `did` in
# its canonical form, `did_digest`, equal for all its forms, `registered`, its place in the order of registration,
# absent when it is not; `names`, the spellings it was registered under, unless that is the DID alone (see
# RecipientNames); `messages` and `bytes` that wait, `changes` of those, and `waited_for`, which is there when any do.
_RECIPIENTS = Collection(
    RECIPIENTS,
    (
        Index(
            "recipient_did_registered",
            {"did_digest": 1},
            unique=True,
            partial={"did_digest": {"$exists": True}, "registered": {"$exists": True}},
        ),
        Index("recipient_did", {"did_digest": 1, "account": 1}),
        Index("recipient_order", {"account": 1, "registered": 1}),
        # By nothing that changes with every message: an index that depends on a counter doubles what an update costs.
        Index("recipient_waited_for", {"waited_for": 1}, partial={"waited_for": {"$exists": True}}),
    ),
)

# `_id` is the message id. `recipient`, `account`, `seq`, `form`, `size`, `received_at`, `expires_at`, `digest`,
# `pushes`, `payload`; `network` and `sender`, the halves of its origin, as far as they are known; `due_at` while
# delayed, and `wakes_at`, the same if it is due before it expires; once it is not delayed `arrived_at`, since when it
# can be pushed; `delivered`, the boot of the node that pushed it last, if it was pushed.
_MESSAGES = Collection(
    MESSAGES,
    (
        Index("message_of_recipient", {"recipient": 1, "seq": 1}),
        # Those that are not delayed in order of arrival, whatever else waits; what has expired is known by its key.
        Index("message_of_account", {"account": 1, "due_at": 1, "seq": 1, "expires_at": 1}),
        Index("message_digest", {"account": 1, "digest": 1}),
        Index("message_expiry", {"expires_at": 1, "seq": 1}),
        Index("message_wakes", {"wakes_at": 1, "seq": 1}, partial={"wakes_at": {"$exists": True}}),
        # These two have all that is counted of what is not visible.
        Index("message_over", {"account": 1, "expires_at": 1, "recipient": 1, "size": 1}),
        Index(
            "message_delayed",
            {"account": 1, "recipient": 1, "due_at": 1, "expires_at": 1, "size": 1},
            partial={"due_at": {"$exists": True}},
        ),
        # All that is asked of these, so that only keys are read.
        Index("message_delivered", {"delivered": 1, "_id": 1}, partial={"delivered": {"$exists": True}}),
        Index(
            "message_arrived",
            {"account": 1, "arrived_at": 1, "_id": 1},
            partial={"arrived_at": {"$exists": True}},
        ),
    ),
)

# `_id` is the key. `until`, `seq`, and `token`, which says whose claim it is.
_NONCES = Collection(NONCES, (Index("nonce_order", {"seq": 1}), Index("nonce_until", {"until": 1})))

# `owner`, of the sessions that write it; `didcomm` and `decentrl`, each with what there is of the entries. The
# page that is carried forward has no owner, but `settled`, once there is nobody left who keeps none.
_LEDGER = Collection(LEDGER)

COLLECTIONS = (
    _ACCOUNTS,
    _RECIPIENTS,
    _MESSAGES,
    _NONCES,
    Collection(RETIRED),
    Collection(DOCUMENTS),
    Collection(PULSE),
    Collection(OWNERS),
    _LEDGER,
)


async def _begin_a_ledger(_operations: object, _deadline: float) -> None:
    """Whoever opens the books finds what waits; see :mod:`.books`."""


async def _make_canonical(operations: Operations, deadline: float) -> None:
    """
    DIDs that were kept in other forms. Of several accounts that turn out to be of one DID one stays, with what all of
    them have.
    """
    await _rename_accounts(operations, deadline)
    await _digest_recipients(operations, deadline)
    await _rename_keys(operations, deadline, RETIRED)
    await _rename_keys(operations, deadline, DOCUMENTS)
    # When an account from before was last in contact is not known.
    now = [{"$set": {"seen_at": {"$divide": [{"$toLong": "$$NOW"}, 1000]}}}]
    unseen = {"q": {"seen_at": {"$exists": False}}, "u": now, "multi": True}
    await operations.write(updating(ACCOUNTS, [unseen]), deadline)


async def _rename_accounts(operations: Operations, deadline: float) -> None:
    async for one in _all_of(operations, deadline, ACCOUNTS):
        did = canonical_did(one["did"])
        if did == one["did"]:
            continue
        # One that only went over to another form of its DID goes by it still.
        await operations.write(deleting(RETIRED, {"_id": did}), deadline)
        try:
            change = {"q": {"_id": one["_id"]}, "u": {"$set": {"did": did}}}
            await operations.write(updating(ACCOUNTS, [change]), deadline)
        except Duplicate:
            await _merge_account(operations, deadline, one, did)


async def _merge_account(operations: Operations, deadline: float, other: Document, did: str) -> None:
    """All that an account has goes to the one with this DID; again from the start, if that was interrupted."""
    (first,) = await operations.query(finding(ACCOUNTS, {"did": did}), deadline)
    for name in (RECIPIENTS, MESSAGES):
        moved = {"q": {"account": other["_id"]}, "u": {"$set": {"account": first["_id"]}}, "multi": True}
        await operations.write(updating(name, [moved]), deadline)
    registered = {"account": first["_id"], "registered": {"$exists": True}}
    found = await operations.query(finding(RECIPIENTS, registered), deadline)
    number = sum(len(one.get("names", (None,))) for one in found)
    places = max(first.get("places", 0), other.get("places", 0))
    counted = {"q": {"_id": first["_id"]}, "u": {"$set": {"recipients": number, "places": places}}}
    await operations.write(updating(ACCOUNTS, [counted]), deadline)
    await operations.write(deleting(ACCOUNTS, {"_id": other["_id"]}), deadline)


async def _rename_keys(operations: Operations, deadline: float, name: str) -> None:
    async for one in _all_of(operations, deadline, name):
        did = canonical_did(one["_id"])
        if did == one["_id"]:
            continue
        if name != RETIRED or not await operations.query(finding(ACCOUNTS, {"did": did}), deadline):
            kept = {"q": {"_id": did}, "u": {"$setOnInsert": one | {"_id": did}}, "upsert": True}
            await operations.write(updating(name, [kept]), deadline)
        await operations.write(deleting(name, {"_id": one["_id"]}), deadline)


async def _all_of(operations: Operations, deadline: float, name: str) -> AsyncIterator[Document]:
    """Some at a time, in the order of their ids; one that is changed meanwhile may come twice."""
    after: Document = {}
    while found := await operations.query(finding(name, after, sort={"_id": 1}, limit=_AT_A_TIME), deadline):
        for one in found:
            yield one
        after = {"_id": {"$gt": found[-1]["_id"]}}


async def _digest_recipients(operations: Operations, deadline: float) -> None:
    """Of several that turn out to be one DID the first that is met stays registered."""
    missing = {"did_digest": {"$exists": False}}
    while found := await operations.query(finding(RECIPIENTS, missing, sort={"_id": 1}, limit=_AT_A_TIME), deadline):
        for one in found:
            did = canonical_did(one["did"])
            names = RecipientNames(did, None)
            place = one.get("registered")
            if place is not None:
                names.add(one["did"], place)
            change: Document = {"did": did, "did_digest": did_digest(did)}
            if names.stored is not None:
                change["names"] = names.stored
            this = {"_id": one["_id"]}
            try:
                await operations.write(updating(RECIPIENTS, [{"q": this, "u": {"$set": change}}]), deadline)
            except Duplicate:
                change.pop("names", None)
                left_over = {"$set": change, "$unset": {"registered": 1}}
                fewer = {"q": {"_id": one["account"]}, "u": {"$inc": {"recipients": -1}}}
                await operations.write(updating(RECIPIENTS, [{"q": this, "u": left_over}]), deadline)
                await operations.write(updating(ACCOUNTS, [fewer]), deadline)


# Of version 2 is what has a ledger: who does not keep it may not change messages. Of version 3 is what knows
# recipients by digests and accounts by canonical forms: who does not would let a DID have two owners.
MIGRATIONS = (Migration(_begin_a_ledger, readable_from=2), Migration(_make_canonical, readable_from=3))
