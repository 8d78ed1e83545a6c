-- mediatord's store, version 3: several processes on one file.

-- Processes, by numbers that stand for them elsewhere. One that never joined is here because it left something behind.
CREATE TABLE node (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given to another one again; see below for why from 2 on
    boot TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL DEFAULT '',
    address TEXT NOT NULL DEFAULT '',
    seal BLOB NOT NULL DEFAULT x'',
    until REAL NOT NULL DEFAULT 0  -- when its lease is over
) STRICT;

INSERT INTO sqlite_sequence (name, seq) VALUES ('node', 1);

-- From now on message.delivered is 0 while it is pending, the node by which it is delivered, or 1 if that is none.
DROP INDEX message_delivered;
CREATE INDEX message_delivered ON message (delivered) WHERE delivered > 0;

-- From now on message.due_at of a message that take_due has handed out is minus the time of that.

-- Which nodes hold sessions of a DID.
CREATE TABLE presence (
    did TEXT NOT NULL,
    node_id INTEGER NOT NULL,
    PRIMARY KEY (did, node_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE turn (
    name TEXT PRIMARY KEY,
    boot TEXT NOT NULL,
    until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE allowance (
    key BLOB PRIMARY KEY,
    until REAL NOT NULL,  -- when none of it counts any more
    lots TEXT NOT NULL  -- what was taken, as JSON: pairs of time and amount, oldest first
) STRICT, WITHOUT ROWID;
