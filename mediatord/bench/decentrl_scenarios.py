"""Scenarios of Decentrl: durable commands to offline recipients, and pages of short and long histories."""

from __future__ import annotations

import json
import secrets
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import cycle, islice, product
from math import ceil
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any
from urllib.parse import urlencode, urlsplit

import click

from mediatord.bench.load_generator import HTTPResult, KeepAliveClient, TargetServer, post_each_once, write_bodies
from mediatord.bench.mediator_under_test import (
    DATABASE_FILE,
    StoredMessageCheck,
    count_stored_rows,
    open_temporary_directory,
)
from mediatord.bench.processes import read_line, spawn_module
from mediatord.bench.scenario import (
    DAEMON_SETTINGS,
    PER_CPU_SECOND,
    PER_SECOND,
    WARM_UP_SHARE,
    BenchmarkPlan,
    Figures,
    InterleavedResults,
    PerformanceTarget,
    ResultTable,
    compute_percentile,
    format_size,
    run_interleaved,
)
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import ChannelType
from mediatord.protocol.decentrl.crypto import sign_event
from mediatord.protocol.encoding import encode_base64
from mediatord.wallet.decentrl_client import DecentrlMediator, read_mediator_document
from mediatord.wallet.decentrl_messages import (
    DIRECT_CHANNEL,
    PRIVATE_CHANNEL,
    PUBLIC_CHANNEL,
    ContractRequest,
    DecentrlIdentity,
    accept_contract,
    compose_command,
    derive_public_key,
    encode_command,
    propose_contract,
)
from mediatord.wallet.temporary_daemon import run_temporary_daemon

_JSON = "application/json"
_SENDERS, _RECIPIENTS = 8, 20
_DISCOVERY_TIMEOUT_SECONDS = 30


@dataclass(frozen=True, slots=True)
class CommandSigner:
    """An identity that signs commands for its mediator."""

    identity: DecentrlIdentity
    mediator: DecentrlMediator

    @property
    def did(self) -> str:
        """The identity's DID."""
        return self.identity.did

    def command(
        self,
        payload: dict[str, Any] | str,
        recipient_did: str | None = None,
        channel: ChannelType = DIRECT_CHANNEL,
    ) -> bytes:
        """A command signed now; to the mediator if no recipient is given."""
        to, now_ms = recipient_did or self.mediator.did, int(_unix_time() * 1000)
        return encode_command(compose_command(self.identity, channel, to, payload, timestamp_ms=now_ms))

    def accept_contract_of(self, sender: DecentrlIdentity) -> bytes:
        """A command that saves a contract which `sender` proposed."""
        proposed = propose_contract(sender, self.did, _unix_time()).payload(derive_public_key(self.identity.prekey))
        request = ContractRequest.model_validate({**proposed, "id": "", "sender_did": sender.did})
        signed = accept_contract(request, self.identity, _unix_time()).signed
        return self.command({"type": "SAVE_COMMUNICATION_CONTRACT", "signed_communication_contract": signed})


@dataclass(frozen=True, slots=True)
class CommandSigners:
    """Registered identities; each sender may write to each recipient."""

    mediator: DecentrlMediator
    senders: tuple[CommandSigner, ...]
    recipients: tuple[CommandSigner, ...]


def post_json(http: KeepAliveClient, command: bytes) -> dict[str, Any]:
    """
    POST a command; the JSON object of the response.

    :raise RuntimeError: the daemon rejected it.
    """
    return _read_json(http.post(command, _JSON))


def _read_json(response: HTTPResult) -> dict[str, Any]:
    value: dict[str, Any] = encoding.loads_object(response.body)
    if response.status != 200:
        raise RuntimeError(f"the daemon answered {response.status} {value.get('code', '')}")
    return value


def _fetch_mediator(url: str) -> DecentrlMediator:
    with urllib.request.urlopen(f"{url}/.well-known/did.json", timeout=_DISCOVERY_TIMEOUT_SECONDS) as response:
        return read_mediator_document(json.load(response))


def _register_signer(mediator: DecentrlMediator, http: KeepAliveClient, alias: str) -> CommandSigner:
    signer = CommandSigner(DecentrlIdentity.generate(alias, mediator.did), mediator)
    proposal = propose_contract(signer.identity, mediator.did, _unix_time())
    post_json(http, signer.command(proposal.payload(mediator.prekey)))
    return signer


def _register_signers(url: str) -> CommandSigners:
    mediator = _fetch_mediator(url)
    with KeepAliveClient(mediator.url) as http:
        senders = tuple(_register_signer(mediator, http, f"sender {number}") for number in range(_SENDERS))
        recipients = tuple(_register_signer(mediator, http, f"recipient {number}") for number in range(_RECIPIENTS))
        for recipient, sender in product(recipients, senders):
            post_json(http, recipient.accept_contract_of(sender.identity))
    return CommandSigners(mediator, senders, recipients)


def sign_private_commands(signers: CommandSigners, size: int, count: int) -> Iterator[bytes]:
    """
    TWO_WAY_PRIVATE commands signed now, from every sender to every recipient in turn.

    :param size: characters of the payload, random base64.
    """
    for sender, recipient in islice(cycle(product(signers.senders, signers.recipients)), count):
        payload = encode_base64(secrets.token_bytes(size))[:size]
        yield sender.command(payload, recipient.did, PRIVATE_CHANNEL)


def _unix_time() -> float:
    return datetime.now(UTC).timestamp()


_COMMAND_GOAL = 0.45
_OF_SITE, _OF_SITE_PER_CPU = "x stock Site", "x per CPU-s"
_MEDIATORD, _SITE = "mediatord, durable", "stock Site, verify and store"
_COMMAND_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", _OF_SITE, _OF_SITE_PER_CPU)
# A short chat message, encrypted.
_SMALLEST_PAYLOAD = 300
# Commands per second that are signed for the warm-up; later runs sign for the last rate with a reserve. A server that
# is faster has a shorter run.
_INITIAL_RATE = 4000.0
_RESERVE = 1.5


def measure_commands(plan: BenchmarkPlan) -> ResultTable:
    """Commands that are verified and stored before the response, beside a Twisted site that does only that."""
    rows: dict[str, Figures] = {}
    targets: list[PerformanceTarget] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
        place = open_temporary_directory(stack)
        database, site_database = daemon.directory / DATABASE_FILE, place / DATABASE_FILE
        site = stack.enter_context(spawn_module("mediatord.bench.baseline_servers", "commands", str(site_database)))
        signers = _register_signers(daemon.url)
        server = TargetServer.from_url(signers.mediator.url, daemon.pid, _JSON, "200")
        stock = TargetServer(site.pid, int(read_line(site)), server.path, _JSON, "200")
        checks = {
            _MEDIATORD: StoredMessageCheck(server, lambda: count_stored_rows(database, "pending_event")),
            _SITE: StoredMessageCheck(stock, lambda: count_stored_rows(site_database, "event")),
        }
        rates = dict.fromkeys(checks, _INITIAL_RATE)

        def run(name: str, size: int, seconds: float) -> Figures:
            count = plan.clients + ceil(rates[name] * seconds * _RESERVE)
            write_bodies(place / "bodies", list(sign_private_commands(signers, size, count)))
            check = checks[name]
            figures = check.check(post_each_once(check.server, place / "bodies", plan.clients, seconds))
            rates[name] = figures[PER_SECOND]
            return figures

        for size in (_SMALLEST_PAYLOAD, *plan.sizes):
            rates |= dict.fromkeys(checks, _INITIAL_RATE)
            for name in checks:
                run(name, size, plan.seconds * WARM_UP_SHARE)
            rounds = run_interleaved({name: partial(run, name, size, plan.seconds) for name in checks}, plan.rounds)
            for name in checks:
                rows[f"{format_size(size)}  {name}"] = rounds.medians(name) | {
                    _OF_SITE: rounds.ratio(name, _SITE, PER_SECOND),
                    _OF_SITE_PER_CPU: rounds.ratio(name, _SITE, PER_CPU_SECOND),
                }
            measured = rows[f"{format_size(size)}  {_MEDIATORD}"][_OF_SITE]
            targets.append(
                PerformanceTarget(f"durable commands {format_size(size)}, x stock Site", _COMMAND_GOAL, measured)
            )
    check = checks[_MEDIATORD]
    notes = (
        f"{plan.clients} connections, one daemon process. The stock Site verifies, and stores with group commit.",
        f"{check.accepted} commands were answered 200 and {check.stored} rows were stored.",
    )
    failures = tuple(f"{name}: {failure}" for name, one in checks.items() for failure in one.failures)
    return ResultTable("Commands, durable before the answer", _COMMAND_COLUMNS, rows, tuple(targets), notes, failures)


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

    :param change: changes the list that the page belongs to, but not its length.
    :param total: number of matching events.
    """

    ask: Callable[[], HTTPResult]
    change: Callable[[], None]
    total: int

    def read(self) -> float:
        """
        Read the page; the seconds it took.

        :raise RuntimeError: its length is wrong.
        """
        response = self.ask()
        value = _read_json(response)
        page = value.get("payload", value)
        if (page["pagination"]["total"], len(page["events"])) != (self.total, min(_PAGE_SIZE, self.total)):
            raise RuntimeError(f"a page of {len(page['events'])} out of {page['pagination']['total']} events")
        return response.seconds


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


class _StoredHistory:
    """
    The stored events of one identity, as a wallet keeps them.

    Every event has a peer, a kind and a topic. Received events are stored unprocessed with one tag and get all tags
    later. Everything follows from the number of an event and repeats after a batch, so the totals are known.
    """

    def __init__(self, signer: CommandSigner, http: KeepAliveClient) -> None:
        self._signer = signer
        self._http = http
        self._random = Random(1)
        self._changed: tuple[str, list[str]] = "", []
        mediator_did = signer.mediator.did
        self._peers = [DecentrlIdentity.generate(f"peer {number}", mediator_did).did for number in range(_PEERS)]
        self._tag = lru_cache(1000)(signer.identity.tag)  # a signature, most of the time of an event

    def fill(self, count: int) -> Iterator[int]:
        """Store events batch by batch; the number of each batch."""
        for first in range(0, count, _BATCH):
            events = [self._event(number) for number in range(first, first + _BATCH)]
            self._post({"type": "SAVE_EVENTS", "events": events})
            self._process(first)
            yield _BATCH

    def pages(self, count: int) -> dict[str, _PageRequest]:
        """The pages to read, by name, if there are `count` events."""
        middle = count // 2
        peer: dict[str, Any] = {"participant_did": self._peers[_QUERIED_PEER]}
        kind: dict[str, Any] = {"encrypted_tags": [self._tag(f"kind.{_QUERIED_KIND}")]}
        topic = {"encrypted_tags": [self._tag(f"topic.{middle // _EVENTS_PER_TOPIC}")]}
        return {
            **{name: self._page(count, {}, pages) for name, pages in _page_ranges(count).items()},
            "one tag": self._page(count // _KINDS, kind),
            "one participant": self._page(count // _PEERS, peer),
            "unprocessed": self._page(count // _GROUPS, {"unprocessed_only": True}),
            "narrow time range": self._page(_PAGE_SIZE, _time_filter(middle, _PAGE_SIZE)),
            "rare tag and participant": self._page(3, topic | peer),
            "common tag and participant": self._page(count // _KINDS // _PEERS, kind | peer),
        }

    def _page(self, total: int, wanted: Mapping[str, Any], pages: range = range(1)) -> _PageRequest:
        def ask() -> HTTPResult:
            query = self._query(self._random.choice(pages), _PAGE_SIZE, wanted)
            return self._http.post(self._signer.command(query), _JSON)

        return _PageRequest(ask, self._change, total)

    def _change(self) -> None:
        """Reverse the tags of one event."""
        event_id, tags = self._changed
        self._changed = event_id, tags[::-1]
        self._post({"type": "UPDATE_EVENT_TAGS", "events": [{"event_id": event_id, "encrypted_tags": tags[::-1]}]})

    def _post(self, payload: dict[str, Any]) -> dict[str, Any]:
        return post_json(self._http, self._signer.command(payload))

    def _query(self, page: int, size: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "QUERY_EVENTS", "filter": {**wanted}, "pagination": {"page": page, "page_size": size}}

    def _event(self, number: int) -> dict[str, Any]:
        peer, own = self._peers[number % _PEERS], self._signer.did
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
        query = self._query(0, _BATCH, {"unprocessed_only": True, **_time_filter(first, _BATCH)})
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


def _time_filter(first: int, count: int) -> dict[str, int]:
    return {"after_timestamp": _event_time(first), "before_timestamp": _event_time(first + count - 1)}


class _PublicChannel:
    """The public events of one identity. :param reader: connection for reading, `http` for commands."""

    def __init__(self, signer: CommandSigner, http: KeepAliveClient, reader: KeepAliveClient) -> None:
        self._signer = signer
        self._http = http
        self._reader = reader
        self._random = Random(1)
        self._path = urlsplit(signer.mediator.public_url(signer.did)).path

    def publication(self, number: int) -> bytes:
        """The command that publishes an event."""
        tags = ["blog", f"kind-{number // _PAGE_SIZE % _KINDS}", f"topic-{number // _EVENTS_PER_TOPIC}"]
        timestamp = _event_time(number)
        publication = {
            "type": "PUBLISH_PUBLIC_EVENT",
            "event": _PUBLIC_TEXT,
            "tags": tags,
            "timestamp": timestamp,
            "event_signature": sign_event(_PUBLIC_TEXT, tags, timestamp, self._signer.identity.seed),
        }
        return self._signer.command(publication, channel=PUBLIC_CHANNEL)

    def pages(self, count: int) -> dict[str, _PageRequest]:
        """The pages to read, by name, if there are `count` events."""
        middle = count // 2
        between = {"after": _event_time(middle), "before": _event_time(middle + _PAGE_SIZE - 1)}
        return {
            **{f"public, {name}": self._page(count, {}, pages) for name, pages in _page_ranges(count).items()},
            "public, one tag": self._page(count // _KINDS, {"tags": f"kind-{_QUERIED_KIND}"}),
            "public, narrow time range": self._page(_PAGE_SIZE, between),
        }

    def _page(self, total: int, wanted: Mapping[str, Any], pages: range = range(1)) -> _PageRequest:
        def ask() -> HTTPResult:
            page = {"page": self._random.choice(pages), "page_size": _PAGE_SIZE}
            return self._reader.get(f"{self._path}?{urlencode({**wanted, **page})}")

        return _PageRequest(ask, self._change, total)

    def _change(self) -> None:
        """Publish an event and delete it."""
        event_id = post_json(self._http, self.publication(0))["public_event_id"]
        deletion = {"type": "DELETE_PUBLIC_EVENT", "public_event_id": event_id}
        post_json(self._http, self._signer.command(deletion, channel=PUBLIC_CHANNEL))


_PAGE_GOAL = 0.5
# A command of the history holds a thousand events.
_PAGE_SETTINGS = {**DAEMON_SETTINGS, "MEDIATORD_LIMITS__MAX_MESSAGE_BYTES": "8388608"}
_SMALL, _LARGE = "small", "large"
_PUBLIC_SHARE = 10
_PUBLICATIONS_AT_ONCE = 5000
# There are many lists to read, and a page takes milliseconds.
_ROUND_SHARE = 0.1
_MIN_READS = 3
_RATE, _MILLISECONDS, _OF_SMALL = "pages/s", "p50 ms", "x small"
_PAGE_COLUMNS = (*(f"{name} {figure}" for figure in (_MILLISECONDS, _RATE) for name in (_SMALL, _LARGE)), _OF_SMALL)


def measure_pages(plan: BenchmarkPlan) -> ResultTable:
    """Reading pages of a long history beside those of a short one, unchanged and after a change."""
    large = max(plan.events // _BATCH * _BATCH, _BATCH)
    notes: list[str] = []
    rows: dict[str, Figures] = {}
    with ExitStack() as stack:
        place = open_temporary_directory(stack)
        small_pages, large_pages = (
            stack.enter_context(_fill_daemon(name, count, plan, place / "bodies", notes))
            for name, count in ((_SMALL, _BATCH), (_LARGE, large))
        )
        for name in small_pages:
            for suffix, changing in (("", False), (", after a change", True)):
                rounds = _compare_pages(plan, small_pages[name], large_pages[name], changing=changing)
                figures = {
                    f"{one} {key}": figure for one in rounds.found for key, figure in rounds.medians(one).items()
                }
                rows[f"{name}{suffix}"] = figures | {_OF_SMALL: rounds.ratio(_LARGE, _SMALL, _RATE)}
    targets = tuple(
        PerformanceTarget(f"rate of {name}, x small", _PAGE_GOAL, row[_OF_SMALL]) for name, row in rows.items()
    )
    return ResultTable("Pages of a long history and of a short one", _PAGE_COLUMNS, rows, targets, tuple(notes))


@contextmanager
def _fill_daemon(
    name: str, stored: int, plan: BenchmarkPlan, bodies: Path, notes: list[str]
) -> Iterator[dict[str, _PageRequest]]:
    """Start a daemon, store and publish events of one identity; the pages to read."""
    with ExitStack() as stack:
        daemon = stack.enter_context(run_temporary_daemon(_PAGE_SETTINGS))
        mediator = _fetch_mediator(daemon.url)
        http, reader = (stack.enter_context(KeepAliveClient(mediator.url)) for _ in range(2))
        signer = _register_signer(mediator, http, "owner")
        history, channel = _StoredHistory(signer, http), _PublicChannel(signer, http, reader)
        server = TargetServer.from_url(mediator.url, daemon.pid, _JSON, "200")
        published = max(_BATCH, stored // _PUBLIC_SHARE // _BATCH * _BATCH)
        start, label = perf_counter(), f"{stored:,} stored and {published:,} public events"
        with click.progressbar(length=stored + published, label=label, file=sys.stderr) as bar:
            for done in history.fill(stored):
                bar.update(done)
            for first in range(0, published, _PUBLICATIONS_AT_ONCE):
                numbers = range(first, min(first + _PUBLICATIONS_AT_ONCE, published))
                _publish(server, channel, numbers, bodies, plan.clients)
                bar.update(len(numbers))
        notes.append(f"{name}: {label}, stored in {perf_counter() - start:,.0f} s")
        yield history.pages(stored) | channel.pages(published)


def _publish(
    server: TargetServer, channel: _PublicChannel, numbers: Sequence[int], bodies: Path, connections: int
) -> None:
    write_bodies(bodies, [channel.publication(number) for number in numbers])
    load = post_each_once(server, bodies, connections)
    if load.accepted != len(numbers):
        raise RuntimeError(f"not all public events were accepted: {load.statuses}")


def _compare_pages(
    plan: BenchmarkPlan, small: _PageRequest, large: _PageRequest, *, changing: bool
) -> InterleavedResults:
    def run(page: _PageRequest) -> Figures:
        spent: list[float] = []
        while len(spent) < _MIN_READS or sum(spent) < plan.seconds * _ROUND_SHARE:
            if changing:
                page.change()
            spent.append(page.read())
        return {_RATE: len(spent) / sum(spent), _MILLISECONDS: compute_percentile(spent, 0.5) * 1000}

    for page in (small, large):
        page.read()
    return run_interleaved({_SMALL: partial(run, small), _LARGE: partial(run, large)}, plan.rounds)
