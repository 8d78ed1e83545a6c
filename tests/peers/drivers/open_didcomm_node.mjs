// Opens envelopes with the npm package didcomm-node (Rust, compiled to WebAssembly). Its protocol is that of opening.py.
//
// Run it in the directory that has the package.

import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const here = pathToFileURL(`${process.cwd()}/`);
const installed = createRequire(here);
const { Message } = installed('didcomm-node');
const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, here))).version;

const BATCH = 20;

const write = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);

const resolversOf = ({ did, kid, jwk }) => {
	const { d, ...publicKeyJwk } = jwk;
	const method = { id: kid, type: 'JsonWebKey2020', controller: did, publicKeyJwk };
	const document = { id: did, keyAgreement: [kid], authentication: [], verificationMethod: [method], service: [] };
	const secret = { id: kid, type: 'JsonWebKey2020', privateKeyJwk: jwk };
	return [
		{ resolve: async (wanted) => (wanted === did ? document : null) },
		{
			get_secret: async (wanted) => (wanted === kid ? secret : null),
			find_secrets: async (wanted) => wanted.filter((candidate) => candidate === kid),
		},
	];
};

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const job = JSON.parse(readFileSync((await lines.next()).value));
const [documents, secrets] = resolversOf(job.key);

const open = async (packed) => {
	const [opened] = await Message.unpack(packed, documents, secrets, {});
	const message = opened.as_value();
	opened.free();
	return [message.body.next, JSON.stringify(message.attachments[0].data.json)];
};

const run = async (envelopes, seconds) => {
	const until = performance.now() + 1000 * seconds;
	const before = process.cpuUsage();
	let opened = 0;
	while (performance.now() < until) {
		for (let count = 0; count < BATCH; count += 1) {
			await open(envelopes[opened % envelopes.length]);
			opened += 1;
		}
	}
	const { user, system } = process.cpuUsage(before);
	return { opened, cpu_seconds: (user + system) / 1e6 };
};

const check = async (envelopes) => {
	const pairs = [];
	for (const packed of envelopes) {
		const [next, payload] = await open(packed);
		pairs.push([next, JSON.parse(payload).tag]);
	}
	return pairs;
};

write({ versions: { node: process.versions.node, 'didcomm-node': version('didcomm-node') } });
for await (const line of lines) {
	const [command, size, seconds] = line.split(' ');
	const envelopes = job.envelopes[size];
	write(command === 'check' ? await check(envelopes) : await run(envelopes, Number(seconds)));
}
