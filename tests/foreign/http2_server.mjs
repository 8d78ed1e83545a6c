// HTTP/2 server of Node (nghttp2): writes its port, then each path it has processed; /last ends the session gracefully.
import { readFileSync } from "node:fs";
import { createSecureServer } from "node:http2";

const pem = readFileSync(process.argv[2]);
const server = createSecureServer({ key: pem, cert: pem, settings: { maxConcurrentStreams: 7, initialWindowSize: 1000 } });
server.on("stream", (stream, headers) => {
  const chunks = [];
  stream.on("error", () => {});
  stream.on("data", (chunk) => chunks.push(chunk));
  stream.on("end", () => {
    console.log(headers[":path"]);
    stream.respond({ ":status": 200, "x-connection": String(stream.session.socket.remotePort) });
    stream.end(String(Buffer.concat(chunks).length));
    if (headers[":path"].endsWith("/last")) stream.session.close();
  });
});
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
