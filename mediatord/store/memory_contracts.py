"""The contracts, registrations and contract requests of the memory store."""

from __future__ import annotations

from collections.abc import Sequence

from mediatord.errors import OverQuota
from mediatord.interfaces.decentrl import Caps, Contract, ContractFilter, ContractRequest, Found, Slice
from mediatord.store.memory_timelines import Label, Search, Shelves


class Registrations:
    """Contracts that the mediator owns: by the DID that is registered, then by digest."""

    def __init__(self, caps: Caps) -> None:
        self._most = caps.contracts_with_one
        self._kept: dict[str, dict[bytes, Contract]] = {}

    def save(self, registration: Contract, now: float) -> None:
        """Keep it; those that have expired go, and if there are too many the one that expires first."""
        did = registration.peer_did
        live = {digest: one for digest, one in self._kept.get(did, {}).items() if one.expires_at > now}
        if registration.digest in live:
            return
        kept = {**live, registration.digest: registration}
        while len(kept) > self._most:
            del kept[min(kept, key=lambda digest: kept[digest].expires_at)]
        self._kept[did] = kept

    def size(self, now: float) -> int:
        """Bytes of all that have not expired."""
        return sum(len(one.text) for kept in self._kept.values() for one in kept.values() if one.expires_at > now)

    def until(self, did: str, now: float) -> float | None:
        """When the last of them expires; None when that has happened."""
        latest = max((one.expires_at for one in self._kept.get(did, {}).values()), default=now)
        return latest if latest > now else None


class Contracts:
    """Contracts that identities own."""

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self._shelves: Shelves[Contract] = Shelves()
        self._digests: set[tuple[str, bytes]] = set()
        self._until: dict[tuple[str, str], float] = {}

    def save(self, owner: str, contract: Contract, now: float) -> None:
        """:raise OverQuota: it would be one too many, and none has expired that could make room."""
        if (owner, contract.digest) in self._digests:
            return
        mine, peer = self._shelves.of(owner), _peer(contract.peer_did)
        self._shelves.check_ids([contract])
        if mine.count(peer) >= self._caps.contracts_with_one:
            self._make_room(owner, Search(([peer],)), now)
        elif len(mine) >= self._caps.contracts:
            self._make_room(owner, Search(), now)
        self._shelves.add(owner, contract, [peer])
        self._digests.add((owner, contract.digest))
        pair = owner, contract.peer_did
        self._until[pair] = max(contract.expires_at, self._until.get(pair, contract.expires_at))

    def _make_room(self, owner: str, search: Search, now: float) -> None:
        mine = self._shelves.of(owner)
        kept = mine.find(search, Slice(0, len(mine))).items
        oldest = next((one for one in kept if one.expires_at <= now), None)
        if oldest is None:
            raise OverQuota()
        self._shelves.remove(owner, [oldest.id])
        self._digests.discard((owner, oldest.digest))

    def allow(self, owner: str, peer: str, now: float) -> bool:
        """Whether the owner has a contract with the peer that has not expired."""
        return self._until.get((owner, peer), now) > now

    def find(self, owner: str, wanted: ContractFilter, part: Slice) -> Found[Contract]:
        mine = self._shelves.of(owner)
        search = Search() if wanted.did in (None, owner) else Search(([_peer(wanted.did or "")],))
        if wanted.expires_after is None and wanted.expires_before is None:
            return mine.find(search, part)
        items = [one for one in mine.find(search, Slice(0, len(mine))).items if _expires(one, wanted)]
        return Found(tuple(items[part.offset : part.offset + part.limit]), len(items))


class Requests:
    """Contract requests, until they are acknowledged."""

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self._shelves: Shelves[ContractRequest] = Shelves()

    def add(self, request: ContractRequest) -> None:
        """:raise OverQuota: too many wait already."""
        waiting, sender = self._shelves.of(request.recipient_did), ("sender", request.sender_did)
        if len(waiting) >= self._caps.requests or waiting.count(sender) >= self._caps.requests_of_one:
            raise OverQuota()
        self._shelves.check_ids([request])
        self._shelves.add(request.recipient_did, request, [sender])

    def find(self, recipient: str, part: Slice) -> Found[ContractRequest]:
        return self._shelves.of(recipient).find(Search(), part)

    def acknowledge(self, recipient: str, ids: Sequence[str]) -> None:
        self._shelves.remove(recipient, ids)


def _peer(did: str) -> Label:
    return "peer", did


def _expires(contract: Contract, wanted: ContractFilter) -> bool:
    """Whether it does between the bounds."""
    after, before = wanted.expires_after, wanted.expires_before
    return (after is None or contract.expires_at >= after) and (before is None or contract.expires_at <= before)
