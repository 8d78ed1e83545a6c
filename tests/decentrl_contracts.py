"""Concludes contracts between two Decentrl wallets."""

from __future__ import annotations

from mediatord.wallet.decentrl_client import YEAR_SECONDS, ConcludedContract, DecentrlWallet


async def make_contract(
    requestor: DecentrlWallet, recipient: DecentrlWallet, lifetime: float = YEAR_SECONDS
) -> tuple[ConcludedContract, ConcludedContract]:
    """
    Conclude a contract between two wallets (reference 7.5), as the requestor and as the recipient have it.

    :param lifetime: seconds.
    """
    proposal = await requestor.request_contract(recipient.did, lifetime)
    pending = (await recipient.pending_requests()).items
    request = next(item for item in pending if item.requestor_ephemeral_public_key == proposal.public)
    accepted = recipient.accept(request)
    await recipient.save_contract(accepted)
    await recipient.respond(accepted)
    await recipient.acknowledge_requests([request])
    concluded = await requestor.conclude()
    return next(contract for contract in concluded if contract.id == accepted.id), accepted
