"""The services that make a daemon one node of several."""

from __future__ import annotations

from collections.abc import Callable, Collection

from twisted.application.service import Service

from mediatord.cluster.hint import HINTS_PATH, PROBE_PATH
from mediatord.cluster.inbox import Half, Inbox, probed
from mediatord.cluster.listener import NodeSite
from mediatord.cluster.membership import Means, Membership
from mediatord.cluster.rounds import CATCH_UP, LATE, SWEEP, CatchUp, Rounds, Sweep
from mediatord.cluster.serving import Serving
from mediatord.interfaces import Arrival, StoredMessage
from mediatord.interfaces.decentrl import PendingEvent
from mediatord.service import Listener
from mediatord.wiring.base import Base
from mediatord.wiring.cluster import ClusterSide
from mediatord.wiring.decentrl import DecentrlHalf
from mediatord.wiring.didcomm import DIDCommHalf
from mediatord.wiring.life import Endings


def build_membership(
    base: Base, cluster: ClusterSide, give_up: Callable[[str], None], joined: Callable[[], None]
) -> Membership:
    """
    What joins and leaves.

    :param joined: called when this node has joined for the first time.
    """
    cluster.tell_joined = joined
    means = Means(cluster.calling.probe, give_up, cluster.announcer.stop, cluster.sole)
    return Membership(base.reactor, base.store.cluster, cluster.node, means, cluster)


def build_node(
    base: Base, cluster: ClusterSide, didcomm: DIDCommHalf, decentrl: DecentrlHalf, membership: Membership
) -> list[Service]:
    """What serves other nodes and what comes again and again, in the order in which to start it."""
    clock, boot = base.reactor, cluster.node.boot
    messages, events = _messages(base, didcomm), _events(base, decentrl)
    inbox = Inbox(messages, events, decentrl.pushing.push_contracts_updated)
    uses = {HINTS_PATH: inbox.hints, PROBE_PATH: probed}
    serving = Serving(clock, boot, cluster.sealing, uses, base.journal.metrics.cluster_refused)
    catch_up = CatchUp(clock, (messages, events), base.connections.backlogs.forget)
    journal, turn = base.journal, cluster.turn
    sweep = Sweep(clock, base.store.cluster, boot, turn.is_mine, journal.others_fell_back, cluster.name_of)
    return [
        Rounds(clock, lambda: membership.settled, ((catch_up.round, CATCH_UP), (sweep.round, SWEEP))),
        Endings("hints", cluster.stop),
        Listener(cluster.listen, NodeSite(clock, serving.serve), clock),
    ]


def _messages(base: Base, didcomm: DIDCommHalf) -> Half[StoredMessage]:
    live, store = didcomm.live, base.store
    return Half(
        live=lambda: base.connections.live(lambda reader: reader is not None),
        find=store.find,
        arrived=lambda dids, window, limit: store.arrived(dids, window, limit=limit),
        push=live.push_remote,
        is_missed=lambda one: not live.was_pushed(one.id) and _has_readers(base, one),
        push_late=lambda message, at: live.push_remote(message, by=at + LATE),
        was_pushed=live.was_pushed,
        picked_up=store.cluster.picked_up,
        served=_all_of_them,
    )


async def _all_of_them(dids: Collection[str]) -> Collection[str]:
    return dids


def _events(base: Base, decentrl: DecentrlHalf) -> Half[PendingEvent]:
    pushing, store = decentrl.pushing, base.store.decentrl

    async def registered(dids: Collection[str]) -> Collection[str]:
        """Those whose registration has not expired since their event was accepted."""
        return {did for did in dids if await store.registered_until(did) is not None}

    return Half(
        live=lambda: base.connections.live(lambda reader: reader is None),
        find=store.find_pending,
        arrived=lambda dids, window, limit: store.arrived_pending(dids, window, limit=limit),
        push=pushing.push_remote,
        is_missed=lambda one: not pushing.was_pushed(one.id) and _has_readers(base, one),
        push_late=lambda event, at: pushing.push_remote(event, by=at + LATE),
        was_pushed=pushing.was_pushed,
        picked_up=base.store.cluster.picked_up,
        served=registered,
    )


def _has_readers(base: Base, arrival: Arrival) -> bool:
    return bool(base.connections.subscribers(arrival.did, by=arrival.at + LATE, message=arrival.id))
