"""Scenarios of Decentrl: durable commands to offline recipients, and pages of short and long histories."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import cycle, islice, product
from math import ceil
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from urllib.parse import urlencode

import click

from mediatord.bench.load_generator import TargetServer, post
from mediatord.bench.measured_mediator import DATABASE_FILE, StoredMessageCheck, count_stored_rows
from mediatord.bench.plan import DAEMON_SETTINGS, BenchmarkPlan
from mediatord.bench.processes import read_line, spawn_module
from mediatord.bench.raw_clients import KeepAliveClient, encode_request
from mediatord.bench.results import (
    PER_CPU_SECOND,
    PER_SECOND,
    Figures,
    ResultTable,
    compute_percentile,
    format_size,
    run_interleaved,
    scenario,
)
from mediatord.bench.wallet_group import SystemClock, fetch, run_blocking
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.crypto import sign_event
from mediatord.protocol.encoding import encode_base64
from mediatord.wallet.decentrl_client import (
    PRIVATE_CHANNEL,
    PUBLIC_CHANNEL,
    ContractRequest,
    DecentrlIdentity,
    DecentrlMediator,
    DecentrlWallet,
    derive_public_key,
    propose_contract,
    read_mediator_document,
)
from mediatord.wallet.didcomm_client import HTTPResponse
from mediatord.wallet.temporary_daemon import run_temporary_daemon

_JSON = "application/json"
_SENDERS, _RECIPIENTS = 8, 20


class BlockingDecentrlWallet(DecentrlWallet):
    """A wallet whose requests block, for :func:`~mediatord.bench.wallet_group.run_blocking`."""

    def __init__(self, alias: str, mediator: DecentrlMediator, connection: KeepAliveClient) -> None:
        identity = DecentrlIdentity.generate(alias, mediator.did)
        super().__init__(identity, mediator, None, SystemClock())  # type: ignore[arg-type]
        self.connection = connection

    async def post(self, body: bytes, *, at: DecentrlMediator | None = None) -> HTTPResponse:
        """POST a command to the mediator."""
        result = self.connection.post(body, _JSON)
        return HTTPResponse(result.status, result.headers, result.body)

    def encode(self, payload: dict[str, Any] | str, *where: Any) -> bytes:
        """A command signed now, as of :meth:`command`."""
        return encoding.dumps(self.command(payload, *where))

    def accept_contract_of(self, sender: DecentrlWallet) -> None:
        """Save a contract, which `sender` proposes."""
        proposed = propose_contract(sender.identity, self.did, sender.now()).payload(
            derive_public_key(self.identity.prekey)
        )
        request = ContractRequest.model_validate({**proposed, "id": "", "sender_did": sender.did})
        run_blocking(self.save_contract(self.accept(request)))


def _register_wallets(url: str, *aliases: str) -> list[BlockingDecentrlWallet]:
    mediator = read_mediator_document(encoding.loads_object(fetch(f"{url}/.well-known/did.json")))
    connection = KeepAliveClient(mediator.url)
    wallets = [BlockingDecentrlWallet(alias, mediator, connection) for alias in aliases]
    for wallet in wallets:
        run_blocking(wallet.register())
    return wallets


def sign_private_commands(
    pairs: Sequence[tuple[BlockingDecentrlWallet, BlockingDecentrlWallet]], size: int, count: int
) -> Iterator[bytes]:
    """
    TWO_WAY_PRIVATE commands signed now.

    :param pairs: senders and recipients, in turn.
    :param size: characters of the payload, random base64.
    """
    for sender, recipient in islice(cycle(pairs), count):
        payload = encode_base64(secrets.token_bytes(size))[:size]
        yield sender.encode(payload, recipient.did, PRIVATE_CHANNEL)


_OF_SITE, _OF_SITE_PER_CPU = "x stock Site", "x per CPU-s"
_MEDIATORD, _SITE = "mediatord, durable", "stock Site, verify and store"
# A short chat message, encrypted.
_SMALLEST_PAYLOAD = 300
# Commands per second that are signed for the warm-up; later runs sign for the last rate with a reserve. A server that
# is faster has a shorter run.
_INITIAL_RATE = 4000.0
_RESERVE = 1.5


@scenario(
    "Commands, durable before the answer",
    (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", _OF_SITE, _OF_SITE_PER_CPU),
)
def measure_commands(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Commands that are verified and stored before the response, beside a Twisted site that does only that."""
    with (
        run_temporary_daemon(DAEMON_SETTINGS) as daemon,
        TemporaryDirectory(prefix="mediatord-bench-") as place,
        spawn_module("mediatord.bench.baseline_servers", "commands", f"{place}/{DATABASE_FILE}") as site,
    ):
        wallets = _register_wallets(daemon.url, *(f"wallet {number}" for number in range(_SENDERS + _RECIPIENTS)))
        pairs = list(product(wallets[:_SENDERS], wallets[_SENDERS:]))
        for sender, recipient in pairs:
            recipient.accept_contract_of(sender)
        servers = {
            _MEDIATORD: TargetServer(wallets[0].mediator.url, daemon.pid, _JSON, ("200",)),
            _SITE: TargetServer(f"http://127.0.0.1:{read_line(site)}/", site.pid, _JSON, ("200",)),
        }
        checks = {
            name: StoredMessageCheck(partial(count_stored_rows, path / DATABASE_FILE, rows), table.failures, ("200",))
            for name, path, rows in ((_MEDIATORD, daemon.directory, "pending_event"), (_SITE, Path(place), "event"))
        }
        rates = dict[str, float]()

        def run(name: str, size: int, seconds: float) -> Figures:
            count = plan.clients + ceil(rates.get(name, _INITIAL_RATE) * seconds * _RESERVE)
            bodies = list(sign_private_commands(pairs, size, count))
            figures = checks[name].check(post(servers[name], bodies, plan.clients, seconds, once=True))
            rates[name] = figures[PER_SECOND]
            return figures

        for size in (_SMALLEST_PAYLOAD, *plan.sizes):
            rates.clear()
            for name in checks:
                run(name, size, plan.warm_up_seconds)
            contenders = {name: partial(run, name, size, plan.seconds) for name in checks}
            ratios = {_OF_SITE: (_SITE, PER_SECOND), _OF_SITE_PER_CPU: (_SITE, PER_CPU_SECOND)}
            table.compare(contenders, plan.rounds, f"{format_size(size)}  ", ratios)
            measured = table.rows[f"{format_size(size)}  {_MEDIATORD}"][_OF_SITE]
            table.add_target(f"durable commands {format_size(size)}, x stock Site", 0.45, measured)
    check = checks[_MEDIATORD]
    table.notes = [
        f"{plan.clients} connections, one daemon process. The stock Site verifies, and stores with group commit.",
        f"{check.accepted} commands were answered 200 and {check.stored} rows were stored.",
    ]


_BATCH = 1000
_PAGE_SIZE = 20
_FIRST_SECOND, _SECONDS_APART = 1_700_000_000, 30
_KINDS, _EVENTS_PER_TOPIC, _PEERS = 5, 50, 20
# Groups of one event for each peer within a batch: sent and received in turn, the last one stays unprocessed.
_GROUPS = 50
_PAYLOAD_BYTES = 225
# What is queried: no event of this kind stays unprocessed, and every other topic has three events with this peer.
_QUERIED_KIND, _QUERIED_PEER = 2, 3
_PUBLIC_TEXT = "x" * 300


@dataclass(frozen=True, slots=True)
class _PageRequest:
    """
    A page to read.

    :param encode: an HTTP request for it.
    :param change: changes the list that the page belongs to, but not its length.
    :param total: number of matching events.
    """

    connection: KeepAliveClient
    encode: Callable[[], bytes]
    change: Callable[[], None]
    total: int

    def read(self) -> float:
        """
        Read the page; the seconds it took.

        :raise RuntimeError: its length is wrong.
        """
        response = self.connection.exchange(self.encode())
        if response.status != 200:
            raise RuntimeError(f"the daemon answered {response.status} to a query")
        value = encoding.loads_object(response.body)
        page = value.get("payload", value)
        if (page["pagination"]["total"], len(page["events"])) != (self.total, min(_PAGE_SIZE, self.total)):
            raise RuntimeError(f"a page of {len(page['events'])} out of {page['pagination']['total']} events")
        return self.connection.latencies_us[-1] / 1e6


def _page_ranges(events: int) -> dict[str, range]:
    """Page numbers in a list of so many events, one of which is read."""
    pages = events // _PAGE_SIZE
    return {
        "first page": range(1),
        "page in the middle": range(pages // 2, pages // 2 + 1),
        "last page": range(pages - 1, pages),
        "any page": range(pages),
    }


def _event_time(number: int) -> int:
    return _FIRST_SECOND + number * _SECONDS_APART


class _EventHistory:
    """
    The stored and the public events of one identity, as a wallet keeps them.

    Every stored event has a peer, a kind and a topic. Received events are stored unprocessed with one tag and get all
    tags later. Everything follows from the number of an event and repeats after a batch, so the totals are known.
    """

    def __init__(self, wallet: BlockingDecentrlWallet) -> None:
        self._wallet = wallet
        self._random = Random(1)
        self._changed: tuple[str, list[str]] = "", []
        mediator_did = wallet.mediator.did
        self._peers = [DecentrlIdentity.generate(f"peer {number}", mediator_did).did for number in range(_PEERS)]
        self._tag = lru_cache(1000)(wallet.identity.tag)  # a signature, most of the time of an event

    def store(self, count: int) -> Iterator[int]:
        """Store events batch by batch; the number of each batch."""
        for first in range(0, count, _BATCH):
            events = [self._event(number) for number in range(first, first + _BATCH)]
            self._post({"type": "SAVE_EVENTS", "events": events})
            self._process(first)
            yield _BATCH

    def publication(self, number: int) -> bytes:
        """The command that publishes an event."""
        tags = ["blog", f"kind-{number // _PAGE_SIZE % _KINDS}", f"topic-{number // _EVENTS_PER_TOPIC}"]
        timestamp = _event_time(number)
        publication = {
            "type": "PUBLISH_PUBLIC_EVENT",
            "event": _PUBLIC_TEXT,
            "tags": tags,
            "timestamp": timestamp,
            "event_signature": sign_event(_PUBLIC_TEXT, tags, timestamp, self._wallet.identity.seed),
        }
        return self._wallet.encode(publication, None, PUBLIC_CHANNEL)

    def pages(self, stored: int, published: int) -> dict[str, _PageRequest]:
        """The pages to read, by name, if there are so many events."""
        page, public, middle = self._stored_page, self._public_page, stored // 2
        peer: dict[str, Any] = {"participant_did": self._peers[_QUERIED_PEER]}
        kind: dict[str, Any] = {"encrypted_tags": [self._tag(f"kind.{_QUERIED_KIND}")]}
        topic = {"encrypted_tags": [self._tag(f"topic.{middle // _EVENTS_PER_TOPIC}")]}
        first = published // 2
        between = {"after": _event_time(first), "before": _event_time(first + _PAGE_SIZE - 1)}
        return {
            **{name: page(stored, {}, numbers) for name, numbers in _page_ranges(stored).items()},
            "one tag": page(stored // _KINDS, kind),
            "one participant": page(stored // _PEERS, peer),
            "unprocessed": page(stored // _GROUPS, {"unprocessed_only": True}),
            "narrow time range": page(_PAGE_SIZE, _time_filter(middle, _PAGE_SIZE)),
            "rare tag and participant": page(3, topic | peer),
            "common tag and participant": page(stored // _KINDS // _PEERS, kind | peer),
            **{
                f"public, {name}": public(published, {}, numbers) for name, numbers in _page_ranges(published).items()
            },
            "public, one tag": public(published // _KINDS, {"tags": f"kind-{_QUERIED_KIND}"}),
            "public, narrow time range": public(_PAGE_SIZE, between),
        }

    def _stored_page(self, total: int, wanted: Mapping[str, Any], pages: range = range(1)) -> _PageRequest:
        def encode() -> bytes:
            query = _compose_query(self._random.choice(pages), _PAGE_SIZE, wanted)
            return encode_request(self._wallet.mediator.url, self._wallet.encode(query), _JSON)

        return _PageRequest(self._wallet.connection, encode, self._change_tags, total)

    def _public_page(self, total: int, wanted: Mapping[str, Any], pages: range = range(1)) -> _PageRequest:
        def encode() -> bytes:
            query = urlencode({**wanted, "page": self._random.choice(pages), "page_size": _PAGE_SIZE})
            return encode_request(f"{self._wallet.mediator.public_url(self._wallet.did)}?{query}", method="GET")

        return _PageRequest(self._wallet.connection, encode, self._change_publications, total)

    def _change_tags(self) -> None:
        """Reverse the tags of one event."""
        event_id, tags = self._changed
        self._changed = event_id, tags[::-1]
        self._post({"type": "UPDATE_EVENT_TAGS", "events": [{"event_id": event_id, "encrypted_tags": tags[::-1]}]})

    def _change_publications(self) -> None:
        """Publish an event and delete it."""
        run_blocking(self._wallet.unpublish(run_blocking(self._wallet.publish(_PUBLIC_TEXT))))

    def _post(self, payload: dict[str, Any]) -> dict[str, Any]:
        return run_blocking(self._wallet.ask(payload))

    def _event(self, number: int) -> dict[str, Any]:
        peer, own = self._peers[number % _PEERS], self._wallet.did
        received = number // _PEERS % 2 == 1
        return {
            "sender_did": peer if received else own,
            "recipient_did": own if received else peer,
            "timestamp": _event_time(number),
            "payload": encode_base64(secrets.token_bytes(_PAYLOAD_BYTES)),
            "encrypted_tags": self._tags(number)[: 1 if received else None],
        }

    def _process(self, first: int) -> None:
        """Give the received events of a batch all their tags, except the last group."""
        query = _compose_query(0, _BATCH, {"unprocessed_only": True, **_time_filter(first, _BATCH)})
        updates = []
        for event in self._post(query)["payload"]["events"]:
            number = (int(event["timestamp"]) - _FIRST_SECOND) // _SECONDS_APART
            if number // _PEERS % _GROUPS != _GROUPS - 1:
                updates.append({"event_id": event["id"], "encrypted_tags": self._tags(number)})
        self._post({"type": "UPDATE_EVENT_TAGS", "events": updates})
        self._changed = updates[0]["event_id"], updates[0]["encrypted_tags"]

    def _tags(self, number: int) -> list[str]:
        peer, kind, topic = self._peers[number % _PEERS], number // _PEERS % _KINDS, number // _EVENTS_PER_TOPIC
        return [self._tag(f"participant.{peer}"), self._tag(f"kind.{kind}"), self._tag(f"topic.{topic}")]


def _compose_query(page: int, size: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "QUERY_EVENTS", "filter": {**wanted}, "pagination": {"page": page, "page_size": size}}


def _time_filter(first: int, count: int) -> dict[str, int]:
    return {"after_timestamp": _event_time(first), "before_timestamp": _event_time(first + count - 1)}


# A command of the history holds a thousand events.
_PAGE_SETTINGS = {**DAEMON_SETTINGS, "MEDIATORD_LIMITS__MAX_MESSAGE_BYTES": "8388608"}
_SMALL, _LARGE = "small", "large"
_PUBLIC_SHARE = 10
_PUBLICATIONS_AT_ONCE = 5000
# There are many lists to read, and a page takes milliseconds.
_ROUND_SHARE = 0.1
_MIN_READS = 3
_RATE, _MILLISECONDS, _OF_SMALL = "pages/s", "p50 ms", "x small"


@scenario(
    "Pages of a long history and of a short one",
    (*(f"{name} {figure}" for figure in (_MILLISECONDS, _RATE) for name in (_SMALL, _LARGE)), _OF_SMALL),
)
def measure_pages(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Reading pages of a long history beside those of a short one, unchanged and after a change."""
    counts = {_SMALL: _BATCH, _LARGE: max(plan.events // _BATCH * _BATCH, _BATCH)}
    with ExitStack() as stack:
        pages = {
            name: stack.enter_context(_fill_daemon(name, count, plan, table.notes)) for name, count in counts.items()
        }
        for page, changing in product(pages[_SMALL], (False, True)):
            row = f"{page}, after a change" if changing else page
            for found in pages.values():
                found[page].read()
            contenders = {name: partial(_read_pages, plan, found[page], changing) for name, found in pages.items()}
            rounds = run_interleaved(contenders, plan.rounds)
            table.rows[row] = {f"{name} {key}": one for name in counts for key, one in rounds.medians(name).items()}
            ratio = table.rows[row][_OF_SMALL] = rounds.ratio(_LARGE, _SMALL, _RATE)
            table.add_target(f"rate of {row}, x small", 0.5, ratio)


@contextmanager
def _fill_daemon(name: str, stored: int, plan: BenchmarkPlan, notes: list[str]) -> Iterator[dict[str, _PageRequest]]:
    """Start a daemon, store and publish events of one identity; the pages to read."""
    with run_temporary_daemon(_PAGE_SETTINGS) as daemon:
        (wallet,) = _register_wallets(daemon.url, "owner")
        history, server = _EventHistory(wallet), TargetServer(wallet.mediator.url, daemon.pid, _JSON, ("200",))
        published = max(_BATCH, stored // _PUBLIC_SHARE // _BATCH * _BATCH)
        start, label = perf_counter(), f"{stored:,} stored and {published:,} public events"
        with click.progressbar(length=stored + published, label=label, file=sys.stderr) as bar:
            for done in history.store(stored):
                bar.update(done)
            for first in range(0, published, _PUBLICATIONS_AT_ONCE):
                numbers = range(first, min(first + _PUBLICATIONS_AT_ONCE, published))
                load = post(server, [history.publication(number) for number in numbers], plan.clients, once=True)
                if load.accepted != len(numbers):
                    raise RuntimeError(f"not all public events were accepted: {dict(load.statuses)}")
                bar.update(len(numbers))
        notes.append(f"{name}: {label}, stored in {perf_counter() - start:,.0f} s")
        yield history.pages(stored, published)


def _read_pages(plan: BenchmarkPlan, page: _PageRequest, changing: bool) -> Figures:
    spent: list[float] = []
    while len(spent) < _MIN_READS or sum(spent) < plan.seconds * _ROUND_SHARE:
        if changing:
            page.change()
        spent.append(page.read())
    return {_RATE: len(spent) / sum(spent), _MILLISECONDS: compute_percentile(spent, 0.5) * 1000}
