"""What the database says of how much it has, and how much there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pymongo import MongoClient

Document = dict[str, Any]


def find_miscounts(client: MongoClient[Document], database: str) -> list[str]:
    """Accounts and recipients whose counters are wrong, and ledgers that are, all as of one moment."""
    with client.start_session(snapshot=True) as session:
        pages = list(client[database]["ledger"].find({}, session=session))
        events = client[database]["pending_events"].count_documents({}, session=session)
        accounts, recipients, messages = (
            list(client[database][name].find({}, {"payload": 0}, session=session))
            for name in ("accounts", "recipients", "messages")
        )
    there = {"didcomm": len(messages), "decentrl": events}
    return describe_miscounts(accounts, recipients, messages) + describe_ledger_gaps(pages, there)


def describe_miscounts(
    accounts: Iterable[Document], recipients: Iterable[Document], messages: Iterable[Document]
) -> list[str]:
    """What is wrong with these, one line each."""
    number: Counter[Any] = Counter()
    size: Counter[Any] = Counter()
    registered: Counter[Any] = Counter()
    for message in messages:
        number[message["recipient"]] += 1
        size[message["recipient"]] += message["size"]
    wrong = []
    for one in recipients:
        key = one["_id"]
        registered[one["account"]] += "registered" in one
        there = {"messages": number.pop(key, 0), "bytes": size[key], "waited_for": key in size}
        said = {name: one.get(name, False) for name in there}
        if said != there:
            wrong.append(f"recipient {one['did']}: {said} but {there}")
    wrong += [f"messages of no recipient: {count}" for count in number.values()]
    for one in accounts:
        if one["recipients"] != registered[one["_id"]]:
            wrong.append(f"account {one['did']}: {one['recipients']} recipients but {registered[one['_id']]}")
    return wrong


def describe_ledger_gaps(pages: Iterable[Document], there: Mapping[str, int]) -> list[str]:
    """
    What the ledger says of each protocol if it is not what there is, one line each.

    :param there: messages that wait, by protocol.
    """
    wrong = []
    for protocol, waiting in there.items():
        entries: Counter[str] = Counter()
        for page in pages:
            entries.update(page.get(protocol, {}))
        gone = sum(entries.values()) - entries["accepted"]
        if entries["accepted"] - gone != waiting:
            wrong.append(f"ledger of {protocol}: {dict(entries)} but {waiting} waiting")
    return wrong
