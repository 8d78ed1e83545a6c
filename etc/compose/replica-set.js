// Initiates the replica set and creates the users, unless that was done before.
const fs = require("fs");

const password = (name) => fs.readFileSync(`${process.env.SECRETS || "/secrets"}/${name}-password`, "utf8");
const members = (process.env.MEMBERS || "mongo1:27017,mongo2:27017,mongo3:27017").split(",");
const admin = db.getSiblingDB("admin");

if (!db.hello().setName) {
  // The first user is created here, so this member should be the primary.
  const list = members.map((host, _id) => ({ _id, host, priority: _id === 0 ? 2 : 1 }));
  rs.initiate({ _id: "rs0", members: list });
}
while (!db.hello().isWritablePrimary && !db.hello().primary) sleep(500);

try {
  admin.createUser({ user: "root", pwd: password("root"), roles: ["root"] });
} catch (error) {
  // The user exists: clients without credentials cannot create another one.
  if (!["Unauthorized", "NotWritablePrimary"].includes(error.codeName)) throw error;
}

// Connects to the current primary.
const hosts = members.join(",");
const all = connect(`mongodb://root:${password("root")}@${hosts}/mediatord?replicaSet=rs0&authSource=admin`);
if (!all.getUser("mediatord")) {
  all.createUser({
    user: "mediatord",
    pwd: password("mediatord"),
    roles: [{ role: "readWrite", db: "mediatord" }],
    mechanisms: ["SCRAM-SHA-1"],
  });
}
print("the replica set is ready");
