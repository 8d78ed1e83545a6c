"""Compares the store's ledger with the clients' ledger."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from pymongo import MongoClient

from mediatord.store.interfaces.messages import LEDGER_ENTRIES, MessageLedger, StoreLedger
from mediatord.store.mongo.schema import LEDGER, MESSAGES, PENDING_EVENTS
from tests.integration.daemon import Daemon
from tests.integration.delivery_ledger import LedgerBalance
from tests.mongod import shared_replica_set

_ROWS = {"didcomm": MESSAGES.name, "decentrl": PENDING_EVENTS.name}


def read_mongo_ledger(client: MongoClient[dict[str, Any]], database: str) -> StoreLedger:
    """Read the ledger in one snapshot."""
    with client.start_session(snapshot=True) as session:
        pages = list(client[database][LEDGER.name].find({}, session=session))
        protocols = []
        for protocol, collection in _ROWS.items():
            counted = client[database][collection].aggregate([{"$count": "n"}], session=session)
            waiting = sum(row["n"] for row in counted)
            sums = {entry: sum(page.get(protocol, {}).get(entry, 0) for page in pages) for entry in LEDGER_ENTRIES}
            protocols.append(MessageLedger(**sums, waiting=waiting))
    return StoreLedger(*protocols)


def read_shared_mongo_ledger(daemon: Daemon) -> StoreLedger:
    """Read the ledger of a daemon on the shared MongoDB servers."""
    uri = str(daemon.configuration()["storage"]["mongodb"]["uri"])
    return read_mongo_ledger(shared_replica_set().client, urlsplit(uri).path.strip("/"))


def subtract_ledger(before: MessageLedger, after: MessageLedger) -> MessageLedger:
    """Entries between two readings; `waiting` is that of the second one."""
    entered = {
        field.name: getattr(after, field.name) - getattr(before, field.name) for field in fields(MessageLedger)[:-1]
    }
    return MessageLedger(**entered, waiting=after.waiting)


def find_ledger_mismatches(
    balance: LedgerBalance, after: MessageLedger, entered: MessageLedger, *, withdraws: bool
) -> list[str]:
    """
    Differences between the ledgers of clients and store after a load. Everything was acknowledged.

    :param after: ledger at the end.
    :param entered: entries of the load.
    :param withdraws: whether the store may have undone refused messages.
    """
    unknown = balance.cut + (balance.refused if withdraws else 0)
    checks = [
        (after.difference == 0, f"difference {after.difference}"),
        (after.waiting == 0, f"{after.waiting} still wait"),
        (
            balance.accepted <= entered.accepted <= balance.accepted + unknown,
            f"{entered.accepted} were stored, {balance.accepted} accepted and {unknown} in doubt",
        ),
        (
            balance.received - entered.withdrawn <= entered.acknowledged <= balance.received,
            f"{entered.acknowledged} were acknowledged, {balance.received} came, {entered.withdrawn} taken back",
        ),
        (entered.expired == 0, f"{entered.expired} expired"),
        (entered.evicted == 0, f"{entered.evicted} were evicted"),
        (entered.removed == 0, f"{entered.removed} were removed"),
        (withdraws or entered.withdrawn == 0, f"{entered.withdrawn} were taken back"),
        (withdraws or balance.doubtful == 0, f"{balance.doubtful} were refused and stored all the same"),
    ]
    return [complaint for is_met, complaint in checks if not is_met]
