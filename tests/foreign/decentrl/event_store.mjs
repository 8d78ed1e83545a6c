// Drives @decentrl/event-store for the tests, with one request and one response per line:
//
//   {"open": "alice", "identity": {"did", "mediatorDid", "mediatorEndpoint", "keys": {...}}, "contracts": [...]}
//   {"as": "alice", "call": "publishEvent", "with": [event, options]}
//   {"call": "fetchPublicEvents", "with": [options]}
//
// Keys are base64. A response is {"value": ...}, or {"error": {"name", "code", "message", "status", "reply"}}.
// Run it in the directory that has the package in its node_modules.

import { createRequire, register } from 'node:module';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

register('./extensions.mjs', import.meta.url);
const installed = createRequire(pathToFileURL(`${process.cwd()}/`));
const { DecentrlEventStore } = await import(pathToFileURL(installed.resolve('@decentrl/event-store')));

const stores = new Map();

const bytes = (text) => new Uint8Array(Buffer.from(text, 'base64'));

const keysOf = ({ signing, encryption, storageKey }) => ({
	signing: { privateKey: bytes(signing.privateKey), publicKey: bytes(signing.publicKey) },
	encryption: { privateKey: bytes(encryption.privateKey), publicKey: bytes(encryption.publicKey) },
	storageKey: bytes(storageKey),
});

const handle = async (request) => {
	if (request.open) {
		const identity = { ...request.identity, keys: keysOf(request.identity.keys) };
		stores.set(request.open, new DecentrlEventStore({ identity, communicationContracts: () => request.contracts }));
		return null;
	}
	const target = request.as ? stores.get(request.as) : DecentrlEventStore;
	return (await target[request.call](...request.with)) ?? null;
};

// The package keeps the error of the HTTP library, which has the response, in the details of its own error.
const describeError = (error) => {
	const response = (error.details?.error ?? error).response;
	return { name: error.name, code: error.code, message: error.message, status: response?.status, reply: response?.data };
};

console.warn = (...words) => console.error(...words);
for await (const line of createInterface({ input: process.stdin })) {
	const reply = await handle(JSON.parse(line)).then((value) => ({ value }), (error) => ({ error: describeError(error) }));
	process.stdout.write(`${JSON.stringify(reply)}\n`);
}
