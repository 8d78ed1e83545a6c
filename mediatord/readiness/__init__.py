"""
Readiness: whether a message that comes in by the daemon's own listeners is stored, pushed and acknowledged.

The daemon is a wallet of its own mediator for that, over real connections, as long as somebody asks.
"""

from mediatord.readiness.cycle import Cycle, Failed, Rooms
from mediatord.readiness.identity import Kin, Own, own
from mediatord.readiness.watch import Ask, Readiness, Surroundings, Verdict
from mediatord.readiness.way import Place, way_to

__all__ = [
    "Ask",
    "Cycle",
    "Failed",
    "Kin",
    "Own",
    "Place",
    "Readiness",
    "Rooms",
    "Surroundings",
    "Verdict",
    "own",
    "way_to",
]
