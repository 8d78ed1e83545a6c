// What @decentrl/event-store 0.5.4 imports of the command services of @decentrl/identity, which is not published:
// the envelope of DCTRL-0004 section 4.

import { randomUUID } from 'node:crypto';

import { signJsonObject } from '../crypto/index.mjs';

const commandOn = (channel) => (senderDid, signingKeyId, recipientDid, payload, keys) => {
	const header = {
		channel,
		sender_did: senderDid,
		sender_signing_key_id: signingKeyId,
		recipient_did: recipientDid,
		timestamp: Date.now(),
		nonce: randomUUID(),
	};
	return { header, payload, signature: signJsonObject({ header, payload }, keys.signing.privateKey) };
};

export const generateDirectAuthenticatedMediatorCommand = commandOn('DIRECT_AUTHENTICATED');
export const generateTwoWayPrivateMediatorCommand = commandOn('TWO_WAY_PRIVATE');
export const generateOneWayPublicMediatorCommand = commandOn('ONE_WAY_PUBLIC');
