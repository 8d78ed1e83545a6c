// What @decentrl/event-store 0.5.4 imports of the DID parser of @decentrl/identity, which is not published
// (reference section 2).

const ALPHABET = '123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz';
const KEY_BYTES = 32;

const base58Decode = (text) => {
	let number = 0n;
	for (const character of text) {
		const digit = ALPHABET.indexOf(character);
		if (digit < 0) throw new Error('not base58');
		number = number * 58n + BigInt(digit);
	}
	const digits = number ? number.toString(16) : '';
	const zeros = '00'.repeat(text.match(/^1*/)[0].length);
	return Buffer.from(zeros + (digits.length % 2 ? `0${digits}` : digits), 'hex');
};

// With the prefix of its kind or without.
const keyOf = (multibase, prefix) => {
	const bytes = base58Decode(multibase.slice(1));
	const key = bytes.length === KEY_BYTES + 2 && bytes.subarray(0, 2).equals(prefix) ? bytes.subarray(2) : bytes;
	if (multibase[0] !== 'z' || key.length !== KEY_BYTES) throw new Error('not a key');
	return new Uint8Array(key);
};

export const parseDecentrlDid = (did) => {
	const [scheme, method, alias, signing, prekey, mediator, ...more] = did.split(':');
	if (scheme !== 'did' || method !== 'decentrl' || mediator === undefined || more.length) return null;
	try {
		return {
			alias: Buffer.from(alias, 'base64').toString('utf8'),
			signingKey: keyOf(signing, Buffer.from([0xed, 0x01])),
			encryptionKey: keyOf(prekey, Buffer.from([0xec, 0x01])),
			mediatorDid: Buffer.from(mediator, 'base64').toString('utf8'),
		};
	} catch {
		return null;
	}
};
