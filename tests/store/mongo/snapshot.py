"""
Snapshots of databases with data of all kinds, one for each schema version.

Those of released versions are final: a file is rewritten only until its version is released.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bson import json_util
from pymongo.database import Database
from twisted.internet.defer import Deferred
from twisted.internet.task import react

from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    Contract,
    ContractRequest,
    IDecentrlStore,
    PendingEvent,
    PublicEvent,
    StoredEvent,
)
from mediatord.store.interfaces.devices import DEVICE_ID_BYTES, Device
from mediatord.store.interfaces.messages import Payload, QueueLimits
from mediatord.store.interfaces.store import ignore_observation
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.store import MongoStore
from tests.mongod import fresh_database, shared_replica_set
from tests.store.mongo.mongo_test_case import ALICE, CLOCK, INBOX

VECTORS = Path(__file__).parents[2] / "vectors"
# Schema versions with a snapshot; the last is the current one.
RECORDED = (1, 2, 3)
WALLET, PEER = "did:example:wallet", "did:example:peer"
FAR_FUTURE = 4_102_444_800.0
DEVICE = Device(b"device".ljust(DEVICE_ID_BYTES), "web_push", b"sealed", FAR_FUTURE)

CONNECTION = V1Connection(
    "did:key:z6MkWallet",
    "did:key:z6MkOwn",
    "request",
    "https://wallet.example/",
    ("did:key:z6MkRouting",),
    has_base58_keys=True,
    implicit_pickup="raw",
)


async def fill(store: MongoStore) -> None:
    """Store the data that `test_schema` expects."""
    for did in (ALICE, "did:example:old"):
        await store.grant(did)
    await store.update_recipients(ALICE, [(INBOX, "add"), ("did:key:z6MkGone", "add")], max_recipients=9)
    await store.enqueue(INBOX, [Payload("m", b"{}", "json")], expires_at=FAR_FUTURE)
    await store.enqueue(
        "did:key:z6MkGone", [Payload("left-over", b"{}", "base64")], expires_at=FAR_FUTURE, due_at=FAR_FUTURE - 1
    )
    await store.mark_delivered(["m"])
    await store.update_recipients(ALICE, [("did:key:z6MkGone", "remove")], max_recipients=9)
    await store.move_account("did:example:old", "did:example:new")
    await store.mark_draft03("did:example:new")
    await store.remember_did("did:peer:4z", "did:peer:4z:long")
    await store.claim_nonce(b"nonce", FAR_FUTURE)
    await _fill_decentrl(store.decentrl)
    await store.devices.set_device(ALICE, DEVICE, 1)
    await store.devices.record_polls({ALICE: 0.0})
    await store.v1_connections.put_connection(CONNECTION, max_pending=1)


async def _fill_decentrl(decentrl: IDecentrlStore) -> None:
    guards = [CommandGuard(b"nonce %d" % number, FAR_FUTURE) for number in range(6)]
    await decentrl.save_contract(guards[0], Contract("registration", None, WALLET, FAR_FUTURE, b"1" * 32, b"{}"))
    await decentrl.save_contract(guards[1], Contract("contract", WALLET, PEER, FAR_FUTURE, b"2" * 32, b"{}"))
    await decentrl.request_contract(guards[2], ContractRequest("request", PEER, WALLET, "encrypted", "key"))
    await decentrl.enqueue_event(guards[3], PendingEvent("pending", WALLET, PEER, "payload", 1.0))
    stored = StoredEvent("stored", WALLET, PEER, "payload", ("tag",), 5.0, "contract")
    await decentrl.save_events(guards[4], WALLET, [stored])
    await decentrl.publish(guards[5], WALLET, PublicEvent("public", "event", ("tag",), 6.0, "signature", "channel"))


def read_snapshot(database: Database[dict[str, Any]]) -> dict[str, Any]:
    """Documents and indexes of all collections."""
    found = {}
    for name in sorted(database.list_collection_names()):
        indexes = [
            {key: value for key, value in index.items() if key != "v"} for index in database[name].list_indexes()
        ]
        found[name] = {
            "indexes": [index for index in indexes if index["name"] != "_id_"],
            "documents": list(database[name].find().sort("_id", 1)),
        }
    return found


def restore_snapshot(database: Database[dict[str, Any]], version: int) -> None:
    """Fill a database with a snapshot."""
    for name, found in json_util.loads(_snapshot_file(version).read_text("utf-8")).items():
        if found["indexes"]:
            database.command("createIndexes", name, indexes=found["indexes"])
        if found["documents"]:
            database[name].insert_many(found["documents"])


def _snapshot_file(version: int) -> Path:
    return VECTORS / f"mongodb-{version}.json"


async def write_snapshot() -> None:
    """Write the snapshot of the latest version."""
    servers = shared_replica_set()
    with fresh_database(servers) as name:
        address = parse_mongo_uri(servers.uri(name))
        server = ReplicaSetClient(address, CLOCK, observe=ignore_observation, on_up=lambda up: None, connections=1)
        store = MongoStore(server, CLOCK, QueueLimits())
        await store.open()
        await fill(store)
        await store.close()
        # Else the server would delete it some time after a snapshot was restored.
        servers.client[name]["wakeups"].update_many(
            {}, {"$set": {"changed": datetime.fromtimestamp(FAR_FUTURE, UTC)}}
        )
        text = json_util.dumps(
            read_snapshot(servers.client[name]), indent=1, json_options=json_util.RELAXED_JSON_OPTIONS
        )
    _snapshot_file(RECORDED[-1]).write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    react(lambda _: Deferred.fromCoroutine(write_snapshot()))
