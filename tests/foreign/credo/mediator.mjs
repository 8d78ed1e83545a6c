// Runs Credo's own mediator on loopback, HTTP and WebSocket at one free port, until standard input ends. It prints
// its invitation as JSON. Arguments: a directory for its store, and a forwarding strategy. Its queue is in memory.
import { createServer } from "node:http";
import {
  createAgent,
  didcomm,
  DidCommHttpInboundTransport,
  DidCommWsInboundTransport,
  express,
  WebSocketServer,
} from "./agents.mjs";

const [directory, messageForwardingStrategy] = process.argv.slice(2);

const app = express();
const server = createServer(app);
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
// The transport would listen on all interfaces.
app.listen = () => server;
const address = `127.0.0.1:${server.address().port}`;

const agent = createAgent(directory, {
  endpoints: [`http://${address}`, `ws://${address}`],
  transports: {
    inbound: [
      new DidCommHttpInboundTransport({ app, port: 0 }),
      new DidCommWsInboundTransport({ server: new WebSocketServer({ server }) }),
    ],
    outbound: [new didcomm.DidCommHttpOutboundTransport(), new didcomm.DidCommWsOutboundTransport()],
  },
  connections: { autoAcceptConnections: true },
  mediator: { autoAcceptMediationRequests: true, messageForwardingStrategy },
  mediationRecipient: false,
});
await agent.initialize();
const { outOfBandInvitation } = await agent.modules.didcomm.oob.createInvitation({
  label: "Credo's mediator",
  multiUseInvitation: true,
});
process.stdout.write(`${JSON.stringify({ invitation: outOfBandInvitation.toUrl({ domain: `http://${address}` }) })}\n`);
process.stdin.resume();
process.stdin.on("end", () => process.exit(0));
