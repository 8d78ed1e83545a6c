// Wallets of Credo in one process. Each line of standard input is a command, {"wallet", "command", ...}; each line of
// standard output its result, {"value"} or {"error"}.
import { createInterface } from "node:readline";
import { createAgent, didcomm } from "./agents.mjs";

const PATIENCE_MILLISECONDS = 60_000;

class Wallet {
  constructor({ directory, label, invitation, strategy, polling, peerDid, knowsPickup2, options }) {
    this.label = label;
    this.received = [];
    this.agent = createAgent(directory, {
      transports: {
        outbound: [new didcomm.DidCommHttpOutboundTransport(), new didcomm.DidCommWsOutboundTransport()],
      },
      connections: { autoAcceptConnections: true, peerNumAlgoForDidExchangeRequests: peerDid },
      mediator: false,
      mediationRecipient: {
        mediatorInvitationUrl: invitation,
        mediatorPickupStrategy: strategy,
        mediatorPollingInterval: polling,
      },
      ...(!knowsPickup2 && { messagePickup: { protocols: [new didcomm.DidCommMessagePickupV1Protocol()] } }),
      ...options,
    });
    this.api = this.agent.modules.didcomm;
    this.agent.events.on(didcomm.DidCommEventTypes.DidCommMessageProcessed, ({ payload }) =>
      this.received.push(payload.message.toJSON()),
    );
  }

  // Resolves once the check, made now and after each event of the type, returns something.
  async waitFor(what, type, check) {
    let listener;
    let timer;
    try {
      return await new Promise((resolve, reject) => {
        const look = () => check().then((found) => found && resolve(found), reject);
        listener = look;
        this.agent.events.on(type, listener);
        timer = setTimeout(() => reject(new Error(`no ${what} in time`)), PATIENCE_MILLISECONDS);
        look();
      });
    } finally {
      clearTimeout(timer);
      this.agent.events.off(type, listener);
    }
  }

  // Its mediator, once that has granted mediation.
  async mediator() {
    const { connectionId, state, endpoint, pickupStrategy } = await this.api.mediationRecipient.findDefaultMediator();
    return { connectionId, state, endpoint, pickupStrategy };
  }

  // A new invitation, whose key the mediator has been given.
  async invite() {
    const { id, outOfBandInvitation } = await this.api.oob.createInvitation({ label: this.label });
    return { id, url: outOfBandInvitation.toUrl({ domain: "http://127.0.0.1" }) };
  }

  // Accepts an invitation; the id of the completed connection.
  async accept({ url }) {
    const { connectionRecord } = await this.api.oob.receiveInvitationFromUrl(url, { label: this.label });
    return (await this.api.connections.returnWhenIsConnected(connectionRecord.id, {
      timeoutMs: PATIENCE_MILLISECONDS,
    })).id;
  }

  // The id of the completed connection of whoever accepted an invitation.
  accepted({ invitation }) {
    return this.waitFor("connection", didcomm.DidCommConnectionEventTypes.DidCommConnectionStateChanged, async () => {
      const [connection] = await this.api.connections.findAllByOutOfBandId(invitation);
      return connection?.isReady && connection.id;
    });
  }

  async send({ connection, content }) {
    await this.api.basicMessages.sendMessage(connection, content);
  }

  // Texts that have arrived, oldest first, once there are that many.
  texts({ count }) {
    const received = { role: didcomm.DidCommBasicMessageRole.Receiver };
    return this.waitFor("text", didcomm.DidCommBasicMessageEventTypes.DidCommBasicMessageStateChanged, async () => {
      const records = await this.api.basicMessages.findAllByQuery(received);
      records.sort((one, other) => one.createdAt - other.createdAt);
      return records.length >= count && records.map((record) => record.content);
    });
  }

  async ping({ connection }) {
    const { threadId } = await this.api.connections.sendPing(connection, {});
    await this.waitFor("response to the ping", didcomm.DidCommEventTypes.DidCommMessageProcessed, async () =>
      this.received.some((message) => message["~thread"]?.thid === threadId),
    );
  }

  // Deletes a connection, and has its key removed by the mediator.
  async forget({ connection }) {
    await this.api.connections.deleteById(connection);
  }

  // Accepts an invitation of an agent that it is connected with; the id of the connection that is used.
  async reuse({ url }) {
    const { connectionRecord } = await this.api.oob.receiveInvitationFromUrl(url, {
      label: this.label,
      reuseConnection: true,
    });
    return connectionRecord.id;
  }

  // Messages that it has received since its start, in plaintext.
  messages() {
    return this.received;
  }

  stop() {
    return this.agent.shutdown();
  }
}

const wallets = new Map();

// Credo leaves polls unhandled that fail; phones go on, and so does this process.
process.on("unhandledRejection", (error) => console.error(`${error.name}: ${error.message}`));

async function execute({ wallet: name, command, ...options }) {
  if (command === "start") {
    const wallet = new Wallet({ label: name, ...options });
    wallets.set(name, wallet);
    // It connects and awaits the grant, unless it has one.
    await wallet.agent.initialize();
    return null;
  }
  // What did not start needs no stop.
  return (await wallets.get(name)?.[command](options)) ?? null;
}

for await (const line of createInterface({ input: process.stdin })) {
  let answer;
  try {
    answer = { value: await execute(JSON.parse(line)) };
  } catch (error) {
    answer = { error: `${error.name}: ${error.message}` };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
process.exit(0);
