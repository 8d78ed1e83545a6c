// Runs the push service of web-push-testing on loopback, at a free port that it prints, until standard input ends.
import { createRequire } from "node:module";
import { cwd } from "node:process";

const require = createRequire(`${cwd()}/`);
const Server = require("web-push-testing/src/server.js");
const { PushApiModel } = require("web-push-testing/src/PushApiModel.js");

const model = new PushApiModel();
const server = new Server(model, 0);
const listen = server._app.listen.bind(server._app);
server._app.listen = (port) => {
  // The package itself would listen on all interfaces.
  const listener = listen(port, "127.0.0.1", () => {
    model.notifyUrl = `http://127.0.0.1:${listener.address().port}/notify/`;
    process.stdout.write(`${listener.address().port}\n`);
  });
  return listener;
};
server.startServer();
process.stdin.resume();
process.stdin.on("end", () => process.exit(0));
