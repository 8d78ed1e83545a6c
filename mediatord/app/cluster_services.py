"""The services that make a daemon one node of several."""

from __future__ import annotations

from collections.abc import Callable, Collection

from twisted.application.service import Service

from mediatord.app.cluster import ClusterSubsystem
from mediatord.app.core_services import CoreServices
from mediatord.app.decentrl import DecentrlServices
from mediatord.app.didcomm import DIDCommServices
from mediatord.app.lifecycle import ShutdownStep
from mediatord.cluster.anti_entropy import (
    ANTI_ENTROPY_INTERVAL,
    MAX_VISIBILITY_DELAY,
    SWEEP_INTERVAL,
    AntiEntropy,
    LapsedNodeSweeper,
    PeriodicClusterTasks,
)
from mediatord.cluster.membership import Membership, MembershipCallbacks
from mediatord.cluster.notification_receiver import LocalDelivery, NotificationReceiver, answer_probe
from mediatord.cluster.peer_protocol import NOTIFICATIONS_PATH, PROBE_PATH
from mediatord.cluster.peer_server import PeerServer, PeerSite
from mediatord.net.listeners import Listener
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import MessageArrival, StoredMessage


def build_membership(
    base: CoreServices, cluster: ClusterSubsystem, give_up: Callable[[str], None], joined: Callable[[], None]
) -> Membership:
    """
    What joins and leaves.

    :param joined: called when this node has joined for the first time.
    """
    cluster.on_first_join = joined
    callbacks = MembershipCallbacks(
        cluster.peer_client.probe, give_up, cluster.presence_publisher.stop, cluster.is_worker
    )
    return Membership(base.reactor, base.store.cluster, cluster.node, callbacks, cluster)


def build_cluster_services(
    base: CoreServices,
    cluster: ClusterSubsystem,
    didcomm: DIDCommServices,
    decentrl: DecentrlServices,
    membership: Membership,
) -> list[Service]:
    """What serves other nodes and what comes again and again, in the order in which to start it."""
    clock, boot = base.reactor, cluster.node.boot
    messages, events = _build_message_delivery(base, didcomm), _build_event_delivery(base, decentrl)
    receiver = NotificationReceiver(messages, events, decentrl.event_pusher.push_contracts_updated)
    operations = {NOTIFICATIONS_PATH: receiver.receive, PROBE_PATH: answer_probe}
    server = PeerServer(
        clock, boot, cluster.authenticator, operations, base.recorder.metrics.count_refused_peer_request
    )
    anti_entropy = AntiEntropy(clock, (messages, events), base.connections.backlogs.forget)
    recorder, leader_lease = base.recorder, cluster.leader_lease
    sweeper = LapsedNodeSweeper(
        clock, base.store.cluster, boot, leader_lease.is_leader, recorder.record_remote_push_failures, cluster.name_of
    )
    return [
        PeriodicClusterTasks(
            clock,
            lambda: membership.is_settled,
            ((anti_entropy.round, ANTI_ENTROPY_INTERVAL), (sweeper.round, SWEEP_INTERVAL)),
        ),
        ShutdownStep("hints", cluster.stop),
        Listener(cluster.listen, PeerSite(clock, server.serve), clock),
    ]


def _build_message_delivery(base: CoreServices, didcomm: DIDCommServices) -> LocalDelivery[StoredMessage]:
    live, store = didcomm.live, base.store
    return LocalDelivery(
        live=lambda: base.connections.live(lambda reader: reader is not None),
        find=store.find_messages,
        arrived=lambda dids, window, limit: store.find_arrivals(dids, window, limit=limit),
        push=live.push_remote,
        is_missed=lambda one: not live.was_pushed(one.id) and _has_subscribers(base, one),
        push_late=lambda message, at: live.push_remote(message, by=at + MAX_VISIBILITY_DELAY),
        was_pushed=live.was_pushed,
        picked_up=store.cluster.find_picked_up,
        served=_accept_all,
    )


async def _accept_all(dids: Collection[str]) -> Collection[str]:
    return dids


def _build_event_delivery(base: CoreServices, decentrl: DecentrlServices) -> LocalDelivery[PendingEvent]:
    event_pusher, store = decentrl.event_pusher, base.store.decentrl

    async def registered(dids: Collection[str]) -> Collection[str]:
        """Those whose registration has not expired since their event was accepted."""
        return {did for did in dids if await store.registered_until(did) is not None}

    return LocalDelivery(
        live=lambda: base.connections.live(lambda reader: reader is None),
        find=store.find_pending,
        arrived=lambda dids, window, limit: store.find_pending_arrivals(dids, window, limit=limit),
        push=event_pusher.push_remote,
        is_missed=lambda one: not event_pusher.was_pushed(one.id) and _has_subscribers(base, one),
        push_late=lambda event, at: event_pusher.push_remote(event, by=at + MAX_VISIBILITY_DELAY),
        was_pushed=event_pusher.was_pushed,
        picked_up=base.store.cluster.find_picked_up,
        served=registered,
    )


def _has_subscribers(base: CoreServices, arrival: MessageArrival) -> bool:
    return bool(base.connections.subscribers(arrival.did, by=arrival.at + MAX_VISIBILITY_DELAY, message=arrival.id))
