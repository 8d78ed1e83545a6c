// What @decentrl/event-store 0.5.4 imports of @decentrl/crypto, which is not published: written from the reference
// (sections 4 and 5) on Node's own cryptography, and sharing nothing with mediatord.

import { createCipheriv, createDecipheriv, createPrivateKey, createPublicKey, randomBytes, sign, verify } from 'node:crypto';

// The DER that goes before a raw key: RFC 8410 section 7, and SubjectPublicKeyInfo.
const PRIVATE_ED25519 = Buffer.from('302e020100300506032b657004220420', 'hex');
const PUBLIC_ED25519 = Buffer.from('302a300506032b6570032100', 'hex');
const NONCE_BYTES = 12;
const TAG_BYTES = 16;

export const base64Encode = (bytes) => Buffer.from(bytes).toString('base64');

export const base64Decode = (text) => new Uint8Array(Buffer.from(text, 'base64'));

// Members in the order of their names at every depth; undefined ones are dropped, as JSON.stringify does.
const sorted = (value) => {
	if (Array.isArray(value)) return value.map(sorted);
	if (value === null || typeof value !== 'object') return value;
	return Object.fromEntries(Object.keys(value).sort().map((name) => [name, sorted(value[name])]));
};

const canonical = (value) => Buffer.from(JSON.stringify(sorted(value)), 'utf8');

const signed = (message, privateKey) => {
	const key = createPrivateKey({ key: Buffer.concat([PRIVATE_ED25519, privateKey]), format: 'der', type: 'pkcs8' });
	return sign(null, message, key).toString('base64');
};

export const signJsonObject = (value, privateKey) => signed(canonical(value), privateKey);

export const verifyJsonSignature = (value, signature, publicKey) => {
	const key = createPublicKey({ key: Buffer.concat([PUBLIC_ED25519, publicKey]), format: 'der', type: 'spki' });
	return verify(null, canonical(value), key, Buffer.from(signature, 'base64'));
};

export const generateEncryptedTag = (privateKey, tag) => signed(Buffer.from(tag, 'utf8'), privateKey);

export const encryptString = (text, key) => {
	const nonce = randomBytes(NONCE_BYTES);
	const cipher = createCipheriv('aes-256-gcm', key, nonce);
	return Buffer.concat([nonce, cipher.update(text, 'utf8'), cipher.final(), cipher.getAuthTag()]).toString('base64');
};

export const decryptString = (text, key) => {
	const data = Buffer.from(text, 'base64');
	const decipher = createDecipheriv('aes-256-gcm', key, data.subarray(0, NONCE_BYTES));
	decipher.setAuthTag(data.subarray(-TAG_BYTES));
	return Buffer.concat([decipher.update(data.subarray(NONCE_BYTES, -TAG_BYTES)), decipher.final()]).toString('utf8');
};
