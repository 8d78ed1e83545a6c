// What the wallet and the mediator share: Credo's packages from the working directory, and an agent with its store.
import { join } from "node:path";
import { createRequire } from "node:module";
import { cwd } from "node:process";

const require = createRequire(`${cwd()}/`);
// It registers the native library, which @credo-ts/askar wants when it is loaded.
export const { askar } = require("@openwallet-foundation/askar-nodejs");
export const core = require("@credo-ts/core");
export const didcomm = require("@credo-ts/didcomm");
export const { agentDependencies, DidCommHttpInboundTransport, DidCommWsInboundTransport } = require("@credo-ts/node");
const { AskarModule } = require("@credo-ts/askar");
export const express = require("express");
export const { WebSocketServer } = require("ws");

const STORE_KEY = askar.storeGenerateRawKey({ seed: new Uint8Array(32).fill(1) });

// An agent whose keys and records are in a file of the directory; it is not initialised yet.
export function createAgent(directory, options) {
  const store = {
    id: "wallet",
    key: STORE_KEY,
    keyDerivationMethod: "raw",
    database: { type: "sqlite", config: { path: join(directory, "wallet.sqlite") } },
  };
  // CREDO_LOG=debug writes what it does to standard output, which is for people only.
  return new core.Agent({
    config: { logger: new core.ConsoleLogger(core.LogLevel[process.env.CREDO_LOG ?? "off"]) },
    dependencies: agentDependencies,
    modules: {
      askar: new AskarModule({ askar, store }),
      didcomm: new didcomm.DidCommModule({ proofs: false, credentials: false, ...options }),
    },
  });
}
