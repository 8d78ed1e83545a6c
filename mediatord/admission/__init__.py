"""Who is served, and how much: lists, rate limits in one process or over several; and where deposits come from."""

from mediatord.admission.access import AccessList
from mediatord.admission.allowances import Allowances
from mediatord.admission.buckets import SMALL, Admission, OnLimit, Trusted, weight
from mediatord.admission.origins import Origins
from mediatord.admission.registrations import RegistrationLimits, RegistrationQuota

__all__ = [
    "SMALL",
    "Admission",
    "AccessList",
    "Allowances",
    "OnLimit",
    "Trusted",
    "Origins",
    "RegistrationLimits",
    "RegistrationQuota",
    "weight",
]
