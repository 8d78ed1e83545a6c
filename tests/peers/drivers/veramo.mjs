// A mediator made of Veramo's plugins: forwards are queued in SQLite and then answered 202.
//
//   node veramo.mjs DATABASE
//
// It writes {"did", "kid", "versions"}, reads a JSON list of recipient DIDs to mediate for, and writes its port. Keys,
// identifiers and grants are in memory; the database has only the queue. A forward is answered 202 once the plugins have
// processed it, anything else 400. Run it in the directory that has the packages.

import { readFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const here = pathToFileURL(`${process.cwd()}/`);
const installed = createRequire(here);
const load = (name) => import(pathToFileURL(installed.resolve(name)));
const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, here))).version;

const { createAgent } = await load('@veramo/core');
const { DataStore, DataStoreORM, Entities, migrations } = await load('@veramo/data-store');
const comm = await load('@veramo/did-comm');
const { DIDManager, MemoryDIDStore } = await load('@veramo/did-manager');
const { PeerDIDProvider, getResolver } = await load('@veramo/did-provider-peer');
const { DIDResolverPlugin } = await load('@veramo/did-resolver');
const { KeyManager, MemoryKeyStore, MemoryPrivateKeyStore } = await load('@veramo/key-manager');
const { KeyManagementSystem } = await load('@veramo/kms-local');
const { KeyValueStore } = await load('@veramo/kv-store');
const { MediationManagerPlugin } = await load('@veramo/mediation-manager');
const { MessageHandler } = await load('@veramo/message-handler');
const { Resolver } = await load('did-resolver');
const { DataSource } = await load('typeorm');

const FORWARD = 'https://didcomm.org/routing/2.0/forward';

const inMemory = () => new KeyValueStore({ store: new Map() });

const database = await new DataSource({
	type: 'better-sqlite3',
	database: process.argv[2],
	enableWAL: true,
	entities: Entities,
	migrations,
	migrationsRun: true,
	logging: false,
}).initialize();

const agent = createAgent({
	plugins: [
		new KeyManager({ store: new MemoryKeyStore(), kms: { local: new KeyManagementSystem(new MemoryPrivateKeyStore()) } }),
		new DIDManager({
			providers: { 'did:peer': new PeerDIDProvider({ defaultKms: 'local' }) },
			store: new MemoryDIDStore(),
			defaultProvider: 'did:peer',
		}),
		new DIDResolverPlugin({ resolver: new Resolver(getResolver()) }),
		new comm.DIDComm({ transports: [] }),
		new MessageHandler({
			messageHandlers: [
				new comm.DIDCommMessageHandler(),
				new comm.CoordinateMediationV3MediatorMessageHandler(),
				new comm.PickupMediatorMessageHandler(),
				new comm.RoutingMessageHandler(),
			],
		}),
		new MediationManagerPlugin(true, inMemory(), inMemory(), inMemory()),
		new DataStore(database),
		new DataStoreORM(database),
	],
});

const bodyOf = async (request) => {
	const pieces = [];
	for await (const piece of request) pieces.push(piece);
	return Buffer.concat(pieces).toString();
};

const statusOf = async (raw) => {
	try {
		const message = await agent.handleMessage({ raw, save: false });
		return message.type === FORWARD ? 202 : 400;
	} catch {
		return 400;
	}
};

const server = createServer(async (request, response) => {
	response.statusCode = await statusOf(await bodyOf(request));
	response.end();
});

const write = (line) => process.stdout.write(`${line}\n`);
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

const service = { id: '#didcomm', type: 'DIDCommMessaging', serviceEndpoint: 'http://127.0.0.1/' };
const { did } = await agent.didManagerCreate({ options: { num_algo: 2, service } });
const { didDocument } = await agent.resolveDid({ didUrl: did });
const [agreement] = didDocument.keyAgreement;
const kid = typeof agreement === 'string' ? agreement : agreement.id;
const versions = ['@veramo/core', 'better-sqlite3', 'typeorm'].map((name) => [name, version(name)]);
write(JSON.stringify({ did, kid, versions: Object.fromEntries([['node', process.versions.node], ...versions]) }));

for (const recipientDid of JSON.parse((await lines.next()).value)) {
	await agent.mediationManagerAddRecipientDid({ recipientDid, requesterDid: recipientDid });
}
server.listen(0, '127.0.0.1', () => write(server.address().port));
