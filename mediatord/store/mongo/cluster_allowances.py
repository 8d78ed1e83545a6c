"""Updates of allowances that the server works out, so that one round trip does for a taking."""

from __future__ import annotations

from typing import Any

from mediatord.store.allowances import SLOTS, wait_for
from mediatord.store.mongo.cluster_schema import ALLOWANCES
from mediatord.store.mongo.requests import Document, Request, modifying

_NOW: Document = {"$toLong": "$$NOW"}
# What is lost with a primary was taken a moment before: nobody waits for a majority.
_QUICKLY = {"writeConcern": {"w": 1}}


def taking(key: bytes, amount: int, limit: int, period: float) -> Request:
    """One more lot if there is enough left; see :func:`~mediatord.store.allowances.with_taking`."""
    milliseconds = period * 1000
    slot = milliseconds / SLOTS
    at = {"$multiply": [{"$ceil": {"$divide": ["$now", slot]}}, slot]}
    counting = {"$gt": ["$$lot.at", {"$subtract": ["$now", milliseconds]}]}
    lots = {"$filter": {"input": {"$ifNull": ["$lots", []]}, "as": "lot", "cond": counting}}
    enough = {"$lte": [{"$add": [{"$sum": "$lots.n"}, amount]}, limit]}
    added = {"$let": {"vars": {"at": {"$max": [at, {"$last": "$lots.at"}]}}, "in": _with_lot(amount)}}
    until = {"$add": ["$$NOW", round(milliseconds + slot)]}
    until_then = {"$cond": ["$taken", until, {"$ifNull": ["$until", until]}]}
    pipeline = [
        {"$set": {"now": _NOW}},
        {"$set": {"lots": lots}},
        {"$set": {"taken": enough}},
        {"$set": {"lots": {"$cond": ["$taken", added, "$lots"]}, "until": until_then}},
    ]
    return modifying(ALLOWANCES, {"_id": key}, pipeline, upsert=True, new=True).having(_QUICKLY)


def wait(found: Document, amount: int, limit: int, period: float) -> float:
    """How long to wait, after :func:`taking`, for what was not taken."""
    if found["taken"]:
        return 0.0
    lots = [(lot["at"] / 1000, lot["n"]) for lot in found["lots"]]
    return wait_for(lots, amount, limit=limit, period=period, now=found["now"] / 1000) or period


def putting_back(key: bytes, amount: int) -> Request:
    """The latest lots are gone, so much together."""
    rest: Document = {"at": "$$this.at", "n": {"$subtract": ["$$this.n", "$$value.left"]}}
    step = {
        "left": {"$max": [{"$subtract": ["$$value.left", "$$this.n"]}, 0]},
        "lots": {
            "$cond": [
                {"$gt": ["$$this.n", "$$value.left"]},
                {"$concatArrays": [[rest], "$$value.lots"]},
                "$$value.lots",
            ]
        },
    }
    start = {"left": amount, "lots": []}
    undone: Any = {"$reduce": {"input": {"$reverseArray": "$lots"}, "initialValue": start, "in": step}}
    pipeline = [{"$set": {"lots": {"$let": {"vars": {"undone": undone}, "in": "$$undone.lots"}}}}]
    return modifying(ALLOWANCES, {"_id": key}, pipeline).having(_QUICKLY)


def _with_lot(amount: int) -> Document:
    """All lots, this amount in that of `$$at`, which is the last one or a new one."""
    before = {"$filter": {"input": "$lots", "as": "lot", "cond": {"$lt": ["$$lot.at", "$$at"]}}}
    same = {"$filter": {"input": "$lots", "as": "lot", "cond": {"$gte": ["$$lot.at", "$$at"]}}}
    there = {"$let": {"vars": {"same": same}, "in": {"$sum": "$$same.n"}}}
    return {"$concatArrays": [before, [{"at": "$$at", "n": {"$add": [there, amount]}}]]}
