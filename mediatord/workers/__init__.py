"""
Several processes of one host that share listeners and a store (`workers: N`).

The parent is a supervisor: it holds the listening sockets, starts the workers, replaces those that end or hang, and
adds up what they measure. A worker is the ordinary daemon with a name, a log directory and a node-to-node address of
its own. The two talk in lines of JSON over pipes, and a worker whose pipe closes ends at once: nothing outlives the
supervisor, whichever way that goes.
"""

from mediatord.workers.adoption import Adopting
from mediatord.workers.arrivals import SharedArrivals
from mediatord.workers.brief import Brief, WorkerPlace
from mediatord.workers.crew import Patience
from mediatord.workers.sockets import Sharing
from mediatord.workers.supervisor import Orders, Supervisor
from mediatord.workers.worker import Worker

__all__ = [
    "Adopting",
    "Brief",
    "Orders",
    "Patience",
    "SharedArrivals",
    "Sharing",
    "Supervisor",
    "Worker",
    "WorkerPlace",
]
