"""Tells twistd and twist about mediatord. No __init__.py may stand beside or above this file."""

from twisted.application.service import ServiceMaker

mediatord = ServiceMaker("mediatord", "mediatord.tap", "Mediator for DIDComm v2 and Decentrl wallets", "mediatord")
