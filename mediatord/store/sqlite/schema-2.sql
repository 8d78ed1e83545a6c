-- mediatord's store, version 2: the Decentrl half (DCTRL-0004), and nonces that cost less.

-- Every command claims a nonce, so they are counted by the statements that claim and release them, not by triggers,
-- and have one index less: finding those that are over reads through all of them, every few minutes and in slices.
DROP TRIGGER nonce_comes;
DROP TRIGGER nonce_goes;
DROP INDEX nonce_until;

-- Who is registered, whoever owns something here, and the peers of contracts. DIDs are long; all else refers to these
-- numbers, so that indexes are small. A DID that merely wrote to somebody is not in here, and one leaves when nothing is
-- kept for it and nobody has a contract with it.
CREATE TABLE party (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given to another DID again, so that it may be remembered
    did TEXT NOT NULL UNIQUE
) STRICT;

-- How much is kept for a party; no row when nothing ever was. Kept by the statements that change what is counted.
CREATE TABLE holding (
    party_id INTEGER PRIMARY KEY,
    contracts INTEGER NOT NULL DEFAULT 0,
    requests INTEGER NOT NULL DEFAULT 0,
    pending INTEGER NOT NULL DEFAULT 0,
    pending_bytes INTEGER NOT NULL DEFAULT 0,
    stored INTEGER NOT NULL DEFAULT 0,  -- stored and public events, like the next
    stored_bytes INTEGER NOT NULL DEFAULT 0,
    edition INTEGER NOT NULL DEFAULT 0  -- another one after each change of stored or public events
) STRICT;

-- Contracts of parties, and registrations, which are contracts of the mediator.
CREATE TABLE contract (
    seq INTEGER PRIMARY KEY,  -- order of arrival
    id TEXT NOT NULL UNIQUE,
    owner_id INTEGER NOT NULL,  -- 0 is the mediator
    peer_id INTEGER NOT NULL,
    expires_at REAL NOT NULL,
    digest BLOB NOT NULL,
    text BLOB NOT NULL
) STRICT;

CREATE UNIQUE INDEX contract_once ON contract (owner_id, digest, peer_id);
-- Begins with the peer, because registrations all have the same owner.
CREATE INDEX contract_of_pair ON contract (peer_id, owner_id, expires_at);
CREATE INDEX contract_of_owner ON contract (owner_id, seq, expires_at) WHERE owner_id > 0;
CREATE INDEX registration_expiry ON contract (expires_at) WHERE owner_id = 0;

CREATE TABLE contract_request (
    seq INTEGER PRIMARY KEY,  -- order of arrival
    id TEXT NOT NULL UNIQUE,
    recipient_id INTEGER NOT NULL,
    sender_key BLOB NOT NULL,  -- hash of the DID, which is anybody's: no number is spent on it, nor room in an index
    sender_did TEXT NOT NULL,
    public_key TEXT NOT NULL,
    request TEXT NOT NULL
) STRICT;

CREATE INDEX contract_request_of_recipient ON contract_request (recipient_id, seq, sender_key);

-- Here and below, times that nothing is looked up by are texts as Python writes them: they are read as parts of a JSON
-- document, in which SQLite would round numbers.
CREATE TABLE pending_event (
    seq INTEGER PRIMARY KEY,  -- order of arrival
    id TEXT NOT NULL UNIQUE,
    recipient_id INTEGER NOT NULL,
    sender_key BLOB NOT NULL,  -- as above: an event may wait for longer than there is a contract with its sender
    sender_did TEXT NOT NULL,
    received_at TEXT NOT NULL,
    size INTEGER NOT NULL,
    payload TEXT NOT NULL  -- last, so that reading the other columns never touches its overflow pages
) STRICT;

-- With the sender, so that those of one are found without looking at the events; there are as many as the cap allows.
CREATE INDEX pending_event_of_recipient ON pending_event (recipient_id, seq, sender_key);

-- What an owner's stored and public events can be asked for by, one row for each different text of a kind.
CREATE TABLE label (
    id INTEGER PRIMARY KEY,
    owner_id INTEGER NOT NULL,
    kind INTEGER NOT NULL,  -- see sql_labels.py
    text TEXT NOT NULL,
    items INTEGER NOT NULL,  -- how many events have it; there is no row when none has
    UNIQUE (owner_id, kind, text)
) STRICT;

-- Under each label its events in the order in which they are shown: a page is a range of this.
CREATE TABLE labelled (
    label_id INTEGER NOT NULL,
    timestamp REAL NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (label_id, timestamp, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE stored_event (
    seq INTEGER PRIMARY KEY,  -- order of arrival
    id TEXT NOT NULL UNIQUE,
    owner_id INTEGER NOT NULL,
    timestamp TEXT NOT NULL,
    sender INTEGER NOT NULL,  -- a label, like recipient and tags
    recipient INTEGER NOT NULL,
    contract_id TEXT,
    size INTEGER NOT NULL,  -- bytes of the payload
    processed INTEGER NOT NULL,
    tags_size INTEGER NOT NULL,
    tags TEXT NOT NULL  -- in their order, separated by spaces
) STRICT;

-- Apart from what changes: new tags do not write the payload again.
CREATE TABLE stored_payload (
    seq INTEGER PRIMARY KEY,
    payload TEXT NOT NULL
) STRICT;

CREATE TABLE public_event (
    seq INTEGER PRIMARY KEY,  -- order of arrival
    id TEXT NOT NULL UNIQUE,
    owner_id INTEGER NOT NULL,
    timestamp TEXT NOT NULL,
    channel INTEGER,  -- a label, like tags
    tags_size INTEGER NOT NULL,
    tags TEXT NOT NULL,
    signature TEXT NOT NULL,
    size INTEGER NOT NULL,
    event TEXT NOT NULL
) STRICT;
