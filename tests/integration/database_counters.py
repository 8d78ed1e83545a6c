"""Checks the counters and the ledger of a MongoDB database against its documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pymongo import MongoClient

Document = dict[str, Any]


def find_miscounts(client: MongoClient[Document], database: str) -> list[str]:
    """Wrong counters of accounts and recipients, and wrong ledgers, in one snapshot."""
    with client.start_session(snapshot=True) as session:
        pages = list(client[database]["ledger"].find({}, session=session))
        events = client[database]["pending_events"].count_documents({}, session=session)
        accounts, recipients, messages = (
            list(client[database][name].find({}, {"payload": 0}, session=session))
            for name in ("accounts", "recipients", "messages")
        )
    queued = {"didcomm": len(messages), "decentrl": events}
    return describe_miscounts(accounts, recipients, messages) + describe_ledger_gaps(pages, queued)


def describe_miscounts(
    accounts: Iterable[Document], recipients: Iterable[Document], messages: Iterable[Document]
) -> list[str]:
    """One line for each wrong counter."""
    counts: Counter[Any] = Counter()
    sizes: Counter[Any] = Counter()
    registered: Counter[Any] = Counter()
    for message in messages:
        counts[message["recipient"]] += 1
        sizes[message["recipient"]] += message["size"]
    errors = []
    for recipient in recipients:
        key = recipient["_id"]
        registered[recipient["account"]] += "registered" in recipient
        actual = {"messages": counts.pop(key, 0), "bytes": sizes[key], "waited_for": key in sizes}
        recorded = {name: recipient.get(name, False) for name in actual}
        if recorded != actual:
            errors.append(f"recipient {recipient['did']}: {recorded} but {actual}")
    errors += [f"messages of no recipient: {count}" for count in counts.values()]
    for account in accounts:
        if account["recipients"] != registered[account["_id"]]:
            errors.append(
                f"account {account['did']}: {account['recipients']} recipients but {registered[account['_id']]}"
            )
    return errors


def describe_ledger_gaps(pages: Iterable[Document], queued: Mapping[str, int]) -> list[str]:
    """
    One line for each protocol whose ledger does not match the queued messages.

    :param queued: number of queued messages, by protocol.
    """
    errors = []
    for protocol, waiting in queued.items():
        entries: Counter[str] = Counter()
        for page in pages:
            entries.update(page.get(protocol, {}))
        removed = sum(entries.values()) - entries["accepted"]
        if entries["accepted"] - removed != waiting:
            errors.append(f"ledger of {protocol}: {dict(entries)} but {waiting} waiting")
    return errors
