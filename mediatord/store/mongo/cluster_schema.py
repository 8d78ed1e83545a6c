"""
Collections of what nodes know of each other, and their indexes.

Times are those of the server, as it knows them itself. That the server may delete what is long over is only tidiness:
what counts is always asked for.
"""

from __future__ import annotations

from mediatord.store.mongo.requests import Document
from mediatord.store.mongo.schema import Collection, Index

NODES = "nodes"
PRESENCE = "presence"
TURNS = "turns"
ALLOWANCES = "allowances"
PICKUPS = "pickups"

# Takes part in every join and every end, so that of two at the same time one sees the other.
ROSTER = ""
MEETING: Document = {"q": {"_id": ROSTER}, "u": {"$inc": {"joins": 1}}, "upsert": True}

COLLECTIONS = (
    # `_id` is the boot. `name`, `address`, `seal`, `identity`, `until`. The roster has only `joins`.
    Collection(NODES),
    # `did`, `boot`: nothing that has to be renewed.
    Collection(
        PRESENCE,
        (Index("presence_of_did", {"did": 1, "boot": 1}, unique=True), Index("presence_of_node", {"boot": 1})),
    ),
    # `_id` is the turn. `boot`, `until`.
    Collection(TURNS, (Index("turn_over", {"until": 1}, expire_after=3600),)),
    # `_id` is the key. `lots`, of `at` in milliseconds and `n`; `until`, when none of them counts; of the latest
    # taking `taken`, whether there was enough, and `now`.
    Collection(ALLOWANCES, (Index("allowance_over", {"until": 1}, expire_after=60),)),
    # `_id` is that of a message or pending event that was handed out by pickup. `until`, when that counts no more.
    Collection(PICKUPS, (Index("pickup_over", {"until": 1}, expire_after=60),)),
)
