-- Schema of mediatord's SQLite store, version 1, which upgrade-*.sql extend. Times are seconds since the epoch.
--
-- The cost of a message is the number of distinct pages it touches: so indexes are few, counters have narrow tables of
-- their own, and ids begin with the time of day, which keeps their index append-only.

-- Accounts ----------------------------------------------------------------------------------------------------------

CREATE TABLE account (
    id INTEGER PRIMARY KEY,
    did TEXT NOT NULL,  -- in canonical form
    did_key BLOB UNIQUE,  -- hash of the DID, so that the text of a long DID is stored once
    created_at REAL NOT NULL,
    draft03 INTEGER NOT NULL DEFAULT 0,
    recipients INTEGER NOT NULL DEFAULT 0,  -- registered spellings; maintained by triggers while a DID has one
    places INTEGER NOT NULL DEFAULT 0,  -- last place given in the order of registration
    seen_at REAL NOT NULL DEFAULT 0,  -- last authenticated contact, to a day
    fresh INTEGER NOT NULL DEFAULT 0  -- 1 until a message was accepted for it or contact seen after its first day
) STRICT;

CREATE INDEX account_fresh ON account (created_at) WHERE fresh = 1;
CREATE INDEX account_seen ON account (seen_at);

-- DIDs that an account has rotated away from.
CREATE TABLE retired (
    did TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;

-- A DID that an account has registered, or had registered when a message arrived that is still queued.
CREATE TABLE recipient (
    id INTEGER PRIMARY KEY,
    account_id INTEGER NOT NULL REFERENCES account (id),
    did TEXT NOT NULL,  -- in canonical form
    registered INTEGER,  -- place in the account's order of registration; NULL when not registered
    did_digest BLOB NOT NULL DEFAULT x'',  -- equal for all forms of a DID, see mediatord.protocol canonical DIDs
    -- Registered spellings as JSON: pairs of place and what follows the DID, or a spelling that does not begin with the DID.
    -- NULL when the DID itself is the only one, or when it is not registered.
    names TEXT,
    senders TEXT  -- senders that the recipient has acknowledged, see KnownSenders; NULL for none
) STRICT;

CREATE UNIQUE INDEX recipient_registered ON recipient (did_digest) WHERE registered IS NOT NULL;
CREATE INDEX recipient_left_over ON recipient (did_digest, account_id) WHERE registered IS NULL;
CREATE INDEX recipient_order ON recipient (account_id, registered);

-- Long forms of did:peer:4.
CREATE TABLE did_document (
    short TEXT PRIMARY KEY,
    long TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Messages ----------------------------------------------------------------------------------------------------------

-- Counts of a queue; no row when it is empty. Written by the statements that insert and delete messages.
CREATE TABLE queue (
    account_id INTEGER NOT NULL,
    recipient_id INTEGER NOT NULL,
    messages INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (account_id, recipient_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE message (
    seq INTEGER PRIMARY KEY,  -- order of arrival
    id TEXT NOT NULL UNIQUE,
    recipient_id INTEGER NOT NULL REFERENCES recipient (id),
    account_id INTEGER NOT NULL REFERENCES account (id),
    form TEXT NOT NULL,
    size INTEGER NOT NULL,
    received_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    due_at REAL,  -- NULL when never delayed; negative, the time of it, once take_due has handed the message out
    delivered INTEGER NOT NULL DEFAULT 0,  -- 0 while pending, else the node that delivered it, or 1 for none
    pushes INTEGER NOT NULL DEFAULT 0,
    digest_head INTEGER NOT NULL,  -- first eight bytes of the digest
    digest BLOB NOT NULL,  -- SHA-256 of the payload
    payload BLOB NOT NULL,  -- behind most columns, so that reading those never touches its overflow pages
    origin INTEGER NOT NULL DEFAULT 0  -- network and sender, see QueueLimits; 0 for unknown; read from the index only
) STRICT;

-- Covers what eviction reads of a whole queue.
CREATE INDEX message_of_recipient ON message (recipient_id, seq, digest_head, origin, size);
-- Those of one second in order of arrival; covers counting the expired ones of an account.
CREATE INDEX message_expiry ON message (expires_at, seq, account_id, recipient_id, size);
CREATE INDEX message_due ON message (due_at) WHERE due_at < expires_at;
CREATE INDEX message_delayed ON message (account_id, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX message_delivered ON message (delivered) WHERE delivered > 0;

-- What became of all messages and pending events, see MessageLedger. Written once a transaction by the statements that
-- insert and delete them.
CREATE TABLE ledger (
    protocol TEXT PRIMARY KEY,
    accepted INTEGER NOT NULL DEFAULT 0,
    acknowledged INTEGER NOT NULL DEFAULT 0,
    expired INTEGER NOT NULL DEFAULT 0,
    evicted INTEGER NOT NULL DEFAULT 0,
    removed INTEGER NOT NULL DEFAULT 0,
    withdrawn INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

INSERT INTO ledger (protocol) VALUES ('didcomm'), ('decentrl');

-- Messages and pending events that were handed out by pickup, and until when that counts: other processes leave them
-- out when they look for messages that nobody has pushed.
CREATE TABLE pickup (
    id TEXT PRIMARY KEY,
    until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX pickup_until ON pickup (until);

-- Nonces ------------------------------------------------------------------------------------------------------------

-- In order of arrival; counted by the statements that claim and release them. There is no index by time: expired ones
-- are found by reading through the table, in slices.
CREATE TABLE nonce (
    place INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    until REAL NOT NULL
) STRICT;

-- Decentrl (DCTRL-0004) ---------------------------------------------------------------------------------------------

-- Registered DIDs, owners of anything below, and peers of contracts. DIDs are long: other tables refer to these numbers,
-- so that indexes are small. The sender of an event or request is not in here. A row is deleted when nothing is kept for
-- the DID and nobody has a contract with it.
CREATE TABLE party (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused, so that it may be cached
    did TEXT NOT NULL UNIQUE
) STRICT;

-- Usage of a party; no row when there never was any. Written by the statements that change what is counted.
CREATE TABLE party_usage (
    party_id INTEGER PRIMARY KEY,
    contracts INTEGER NOT NULL DEFAULT 0,
    requests INTEGER NOT NULL DEFAULT 0,
    pending INTEGER NOT NULL DEFAULT 0,
    pending_bytes INTEGER NOT NULL DEFAULT 0,
    stored INTEGER NOT NULL DEFAULT 0,  -- stored and public events, like the next
    stored_bytes INTEGER NOT NULL DEFAULT 0,
    edition INTEGER NOT NULL DEFAULT 0  -- incremented by each change of stored or public events
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
-- Begins with the peer, because all registrations have the same owner.
CREATE INDEX contract_of_pair ON contract (peer_id, owner_id, expires_at);
CREATE INDEX contract_of_owner ON contract (owner_id, seq, expires_at) WHERE owner_id > 0;
CREATE INDEX registration_expiry ON contract (expires_at) WHERE owner_id = 0;

CREATE TABLE contract_request (
    seq INTEGER PRIMARY KEY,  -- order of arrival
    id TEXT NOT NULL UNIQUE,
    recipient_id INTEGER NOT NULL,
    sender_key BLOB NOT NULL,  -- hash of the DID: any DID may send, so none gets a party row or room in an index
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

-- With the sender, so that those of one sender are found without reading the events.
CREATE INDEX pending_event_of_recipient ON pending_event (recipient_id, seq, sender_key);

-- Search keys of an owner's stored and public events: one row for each distinct text of a kind.
CREATE TABLE label (
    id INTEGER PRIMARY KEY,
    owner_id INTEGER NOT NULL,
    kind INTEGER NOT NULL,  -- see event_archive_queries.py
    text TEXT NOT NULL,
    items INTEGER NOT NULL,  -- events that have it; the row is deleted with the last of them
    UNIQUE (owner_id, kind, text)
) STRICT;

-- Inverted index: the events of each label in display order, so that a page is a range.
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

-- In a table of its own, so that new tags do not rewrite the payload.
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

-- Processes that share the file ---------------------------------------------------------------------------------------

-- Nodes, by the numbers that other tables refer to. One that never joined is here because it left something behind.
CREATE TABLE node (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused; from 2 on, as 1 in message.delivered stands for no node
    boot TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL DEFAULT '',
    address TEXT NOT NULL DEFAULT '',
    seal BLOB NOT NULL DEFAULT x'',
    until REAL NOT NULL DEFAULT 0  -- end of its lease
) STRICT;

INSERT INTO sqlite_sequence (name, seq) VALUES ('node', 1);

-- Nodes that hold live sessions of a DID.
CREATE TABLE presence (
    did TEXT NOT NULL,
    node_id INTEGER NOT NULL,
    PRIMARY KEY (did, node_id)
) STRICT, WITHOUT ROWID;

-- Leases for work that one node does at a time.
CREATE TABLE lease (
    name TEXT PRIMARY KEY,
    boot TEXT NOT NULL,
    until REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- Sliding-window quotas.
CREATE TABLE quota (
    key BLOB PRIMARY KEY,
    until REAL NOT NULL,  -- when none of it counts any more
    lots TEXT NOT NULL  -- uses as JSON: pairs of time and amount, oldest first
) STRICT, WITHOUT ROWID;

-- Counters that would otherwise be counted over whole tables ----------------------------------------------------------

CREATE TABLE counter (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO counter VALUES ('nonces', 0), ('pings', 0), ('accounts', 0), ('registration_bytes', 0);

CREATE TRIGGER recipient_inserted AFTER INSERT ON recipient WHEN NEW.registered IS NOT NULL BEGIN
    UPDATE account SET recipients = recipients + 1 WHERE id = NEW.account_id;
END;

CREATE TRIGGER recipient_registered_again AFTER UPDATE OF registered ON recipient
WHEN OLD.registered IS NULL AND NEW.registered IS NOT NULL BEGIN
    UPDATE account SET recipients = recipients + 1 WHERE id = NEW.account_id;
END;

CREATE TRIGGER recipient_unregistered AFTER UPDATE OF registered ON recipient
WHEN OLD.registered IS NOT NULL AND NEW.registered IS NULL BEGIN
    UPDATE account SET recipients = recipients - 1 WHERE id = NEW.account_id;
    DELETE FROM recipient
        WHERE id = NEW.id AND NOT EXISTS (
            SELECT 1 FROM queue WHERE account_id = NEW.account_id AND recipient_id = NEW.id
        );
END;

-- `registration_bytes`: DIDs, their names and long forms, and the text of Decentrl registrations.
CREATE TRIGGER account_inserted AFTER INSERT ON account BEGIN
    UPDATE counter SET value = value + 1 WHERE name = 'accounts';
    UPDATE counter SET value = value + length(NEW.did) WHERE name = 'registration_bytes';
END;

CREATE TRIGGER account_deleted AFTER DELETE ON account BEGIN
    UPDATE counter SET value = value - 1 WHERE name = 'accounts';
    UPDATE counter SET value = value - length(OLD.did) WHERE name = 'registration_bytes';
END;

-- The DID before stays, as retired.
CREATE TRIGGER account_renamed AFTER UPDATE OF did ON account BEGIN
    UPDATE counter SET value = value + length(NEW.did) WHERE name = 'registration_bytes';
END;

CREATE TRIGGER recipient_stored AFTER INSERT ON recipient BEGIN
    UPDATE counter SET value = value + length(NEW.did) + coalesce(length(NEW.names), 0)
        WHERE name = 'registration_bytes';
END;

CREATE TRIGGER recipient_renamed AFTER UPDATE OF names ON recipient WHEN NEW.names IS NOT OLD.names BEGIN
    UPDATE counter SET value = value + coalesce(length(NEW.names), 0) - coalesce(length(OLD.names), 0)
        WHERE name = 'registration_bytes';
END;

CREATE TRIGGER recipient_deleted AFTER DELETE ON recipient BEGIN
    UPDATE counter SET value = value - length(OLD.did) - coalesce(length(OLD.names), 0)
        WHERE name = 'registration_bytes';
END;

CREATE TRIGGER did_document_inserted AFTER INSERT ON did_document BEGIN
    UPDATE counter SET value = value + length(NEW.long) WHERE name = 'registration_bytes';
END;

CREATE TRIGGER did_document_deleted AFTER DELETE ON did_document BEGIN
    UPDATE counter SET value = value - length(OLD.long) WHERE name = 'registration_bytes';
END;

CREATE TRIGGER registration_inserted AFTER INSERT ON contract WHEN NEW.owner_id = 0 BEGIN
    UPDATE counter SET value = value + length(NEW.text) WHERE name = 'registration_bytes';
END;

CREATE TRIGGER registration_deleted AFTER DELETE ON contract WHEN OLD.owner_id = 0 BEGIN
    UPDATE counter SET value = value - length(OLD.text) WHERE name = 'registration_bytes';
END;
