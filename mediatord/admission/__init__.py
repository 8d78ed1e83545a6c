"""Rate limits of addresses, senders and accounts, in one process or over several."""

from mediatord.admission.allowances import Allowances
from mediatord.admission.buckets import SMALL, Admission, OnLimit, weight

__all__ = ["SMALL", "Admission", "Allowances", "OnLimit", "weight"]
