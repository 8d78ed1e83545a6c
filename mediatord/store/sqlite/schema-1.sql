-- mediatord's store, version 1. Times are seconds since the epoch.
--
-- What a message costs is the number of different pages it touches, so the indexes are few, counters live in a
-- narrow table of their own, and ids that begin with the time of day keep their index append-only.

CREATE TABLE account (
    id INTEGER PRIMARY KEY,
    did TEXT NOT NULL UNIQUE,
    created_at REAL NOT NULL,
    draft03 INTEGER NOT NULL DEFAULT 0,
    recipients INTEGER NOT NULL DEFAULT 0  -- how many DIDs are registered, kept by triggers
) STRICT;

-- DIDs that an account has rotated away from.
CREATE TABLE retired (
    did TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;

-- A DID that an account has registered, or had registered when something came that still waits.
CREATE TABLE recipient (
    id INTEGER PRIMARY KEY,
    account_id INTEGER NOT NULL REFERENCES account (id),
    did TEXT NOT NULL,
    registered INTEGER  -- its place in the account's order of registration; NULL when it is not registered
) STRICT;

CREATE UNIQUE INDEX recipient_registered ON recipient (did) WHERE registered IS NOT NULL;
CREATE UNIQUE INDEX recipient_left_over ON recipient (did, account_id) WHERE registered IS NULL;
CREATE INDEX recipient_order ON recipient (account_id, registered);

-- What waits for a recipient; no row when nothing does. Written by triggers only.
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
    due_at REAL,  -- NULL when it was never delayed, or was handed out by take_due
    delivered INTEGER NOT NULL DEFAULT 0,
    pushes INTEGER NOT NULL DEFAULT 0,
    digest_head INTEGER NOT NULL,  -- first eight bytes of the digest
    digest BLOB NOT NULL,  -- SHA-256 of the payload
    payload BLOB NOT NULL  -- last, so that reading the other columns never touches its overflow pages
) STRICT;

CREATE INDEX message_of_recipient ON message (recipient_id, seq);
CREATE INDEX message_of_account ON message (account_id, seq);
CREATE INDEX message_digest ON message (account_id, digest_head);
-- Those of one second by arrival; with what it takes to count the expired ones of an account.
CREATE INDEX message_expiry ON message (expires_at, seq, account_id, recipient_id, size);
CREATE INDEX message_due ON message (due_at) WHERE due_at < expires_at;
CREATE INDEX message_delayed ON message (account_id, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX message_delivered ON message (delivered) WHERE delivered = 1;

CREATE TRIGGER message_comes AFTER INSERT ON message BEGIN
    INSERT INTO queue VALUES (NEW.account_id, NEW.recipient_id, 1, NEW.size)
        ON CONFLICT DO UPDATE SET messages = messages + 1, bytes = bytes + NEW.size;
END;

CREATE TRIGGER message_goes AFTER DELETE ON message BEGIN
    UPDATE queue SET messages = messages - 1, bytes = bytes - OLD.size
        WHERE account_id = OLD.account_id AND recipient_id = OLD.recipient_id;
    DELETE FROM queue
        WHERE account_id = OLD.account_id AND recipient_id = OLD.recipient_id AND messages = 0;
    DELETE FROM recipient
        WHERE id = OLD.recipient_id AND registered IS NULL AND NOT EXISTS (
            SELECT 1 FROM queue WHERE account_id = OLD.account_id AND recipient_id = OLD.recipient_id
        );
END;

CREATE TRIGGER recipient_comes AFTER INSERT ON recipient WHEN NEW.registered IS NOT NULL BEGIN
    UPDATE account SET recipients = recipients + 1 WHERE id = NEW.account_id;
END;

CREATE TRIGGER recipient_returns AFTER UPDATE OF registered ON recipient
WHEN OLD.registered IS NULL AND NEW.registered IS NOT NULL BEGIN
    UPDATE account SET recipients = recipients + 1 WHERE id = NEW.account_id;
END;

CREATE TRIGGER recipient_leaves AFTER UPDATE OF registered ON recipient
WHEN OLD.registered IS NOT NULL AND NEW.registered IS NULL BEGIN
    UPDATE account SET recipients = recipients - 1 WHERE id = NEW.account_id;
    DELETE FROM recipient
        WHERE id = NEW.id AND NOT EXISTS (
            SELECT 1 FROM queue WHERE account_id = NEW.account_id AND recipient_id = NEW.id
        );
END;

-- Long forms of did:peer:4.
CREATE TABLE did_document (
    short TEXT PRIMARY KEY,
    long TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- What was received before, in order of arrival.
CREATE TABLE nonce (
    place INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    until REAL NOT NULL
) STRICT;

CREATE INDEX nonce_until ON nonce (until);

CREATE TABLE tally (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO tally VALUES ('nonces', 0), ('pings', 0);

CREATE TRIGGER nonce_comes AFTER INSERT ON nonce BEGIN
    UPDATE tally SET value = value + 1 WHERE name = 'nonces';
END;

CREATE TRIGGER nonce_goes AFTER DELETE ON nonce BEGIN
    UPDATE tally SET value = value - 1 WHERE name = 'nonces';
END;
