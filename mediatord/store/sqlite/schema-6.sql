-- mediatord's store, version 6: DIDs are kept in their canonical form, and each once; a recipient DID has one owner,
-- whatever it is named by; what recipients have got by pickup, and whom they know.

DROP INDEX recipient_registered;
DROP INDEX recipient_left_over;

-- From now on recipient.did is in its canonical form. The digest is equal for all forms of a DID, see
-- mediatord.protocol.canonical_did; SQL knows both as functions.
ALTER TABLE recipient ADD COLUMN did_digest BLOB NOT NULL DEFAULT x'';
-- Spellings under which it was registered, as JSON: pairs of place and what follows the DID, or a spelling that does not
-- begin with the DID. NULL when the DID itself is the only one, or it is not registered.
ALTER TABLE recipient ADD COLUMN names TEXT;

UPDATE recipient SET names = json_array(json_array(registered, CASE
    WHEN substr(did, 1, length(canonical_did(did))) = canonical_did(did)
    THEN substr(did, length(canonical_did(did)) + 1) ELSE did END))
WHERE registered IS NOT NULL AND canonical_did(did) <> did;
UPDATE recipient SET did_digest = did_digest(did), did = canonical_did(did);

-- Of several that turn out to be one DID the first stays registered.
UPDATE recipient SET registered = NULL, names = NULL WHERE registered IS NOT NULL AND EXISTS (
    SELECT 1 FROM recipient r
    WHERE r.did_digest = recipient.did_digest AND r.registered IS NOT NULL AND r.id < recipient.id
);

CREATE UNIQUE INDEX recipient_registered ON recipient (did_digest) WHERE registered IS NOT NULL;
CREATE INDEX recipient_left_over ON recipient (did_digest, account_id) WHERE registered IS NULL;

-- Of accounts that turn out to be of one DID the first stays, with what all of them have.
CREATE TABLE same_account (id INTEGER PRIMARY KEY, first INTEGER NOT NULL) STRICT;
INSERT INTO same_account SELECT id, first FROM (
    SELECT id, min(id) OVER (PARTITION BY canonical_did(did)) AS first FROM account
) WHERE id <> first;
UPDATE recipient SET account_id = (SELECT first FROM same_account s WHERE s.id = recipient.account_id)
WHERE account_id IN (SELECT id FROM same_account);
UPDATE message SET account_id = (SELECT first FROM same_account s WHERE s.id = message.account_id)
WHERE account_id IN (SELECT id FROM same_account);
UPDATE queue SET account_id = (SELECT first FROM same_account s WHERE s.id = queue.account_id)
WHERE account_id IN (SELECT id FROM same_account);
DELETE FROM account WHERE id IN (SELECT id FROM same_account);
DROP TABLE same_account;

-- One that only went over to another form of its DID goes by it still.
INSERT OR IGNORE INTO retired SELECT canonical_did(did) FROM retired WHERE canonical_did(did) <> did;
DELETE FROM retired WHERE canonical_did(did) <> did;
DELETE FROM retired WHERE did IN (SELECT canonical_did(did) FROM account);
INSERT OR IGNORE INTO did_document
SELECT canonical_did(short), long FROM did_document WHERE canonical_did(short) <> short;
DELETE FROM did_document WHERE canonical_did(short) <> short;

-- Accounts made anew, so that the text of a long DID is stored once: they are found by its digest. `places` is the last
-- place that was given in the order of registration, `seen_at` the last authenticated contact, to a day, and `fresh` 1
-- until a message was accepted for it or contact seen after its first day.
DROP TRIGGER recipient_comes;
DROP TRIGGER recipient_returns;
DROP TRIGGER recipient_leaves;

CREATE TABLE new_account (
    id INTEGER PRIMARY KEY,
    did TEXT NOT NULL,
    did_key BLOB UNIQUE,
    created_at REAL NOT NULL,
    draft03 INTEGER NOT NULL DEFAULT 0,
    recipients INTEGER NOT NULL DEFAULT 0,  -- how many names are registered, kept by triggers while a DID has one
    places INTEGER NOT NULL DEFAULT 0,
    seen_at REAL NOT NULL DEFAULT 0,
    fresh INTEGER NOT NULL DEFAULT 0
) STRICT;

INSERT INTO new_account (id, did, did_key, created_at, draft03, recipients, places, seen_at)
SELECT id, canonical_did(did), account_key(canonical_did(did)), created_at, draft03,
    (SELECT count(*) FROM recipient WHERE account_id = account.id AND registered IS NOT NULL),
    coalesce((SELECT max(registered) FROM recipient WHERE account_id = account.id), 0),
    CAST(strftime('%s', 'now') AS REAL)
FROM account;

DROP TABLE account;
ALTER TABLE new_account RENAME TO account;

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

CREATE INDEX account_fresh ON account (created_at) WHERE fresh = 1;
CREATE INDEX account_seen ON account (seen_at);

-- How many accounts there are, and the bytes of DIDs and registrations.
INSERT INTO tally VALUES ('accounts', (SELECT count(*) FROM account)), ('registration_bytes',
    (SELECT coalesce(sum(length(did)), 0) FROM account) + (SELECT coalesce(sum(length(did)), 0) FROM retired)
    + (SELECT coalesce(sum(length(did) + coalesce(length(names), 0)), 0) FROM recipient)
    + (SELECT coalesce(sum(length(long)), 0) FROM did_document)
    + (SELECT coalesce(sum(length(text)), 0) FROM contract WHERE owner_id = 0));

CREATE TRIGGER account_comes AFTER INSERT ON account BEGIN
    UPDATE tally SET value = value + 1 WHERE name = 'accounts';
    UPDATE tally SET value = value + length(NEW.did) WHERE name = 'registration_bytes';
END;

CREATE TRIGGER account_goes AFTER DELETE ON account BEGIN
    UPDATE tally SET value = value - 1 WHERE name = 'accounts';
    UPDATE tally SET value = value - length(OLD.did) WHERE name = 'registration_bytes';
END;

-- The DID before stays, as retired.
CREATE TRIGGER account_moves AFTER UPDATE OF did ON account BEGIN
    UPDATE tally SET value = value + length(NEW.did) WHERE name = 'registration_bytes';
END;

CREATE TRIGGER recipient_stored AFTER INSERT ON recipient BEGIN
    UPDATE tally SET value = value + length(NEW.did) + coalesce(length(NEW.names), 0)
        WHERE name = 'registration_bytes';
END;

CREATE TRIGGER recipient_renamed AFTER UPDATE OF names ON recipient WHEN NEW.names IS NOT OLD.names BEGIN
    UPDATE tally SET value = value + coalesce(length(NEW.names), 0) - coalesce(length(OLD.names), 0)
        WHERE name = 'registration_bytes';
END;

CREATE TRIGGER recipient_dropped AFTER DELETE ON recipient BEGIN
    UPDATE tally SET value = value - length(OLD.did) - coalesce(length(OLD.names), 0)
        WHERE name = 'registration_bytes';
END;

CREATE TRIGGER did_document_comes AFTER INSERT ON did_document BEGIN
    UPDATE tally SET value = value + length(NEW.long) WHERE name = 'registration_bytes';
END;

CREATE TRIGGER did_document_goes AFTER DELETE ON did_document BEGIN
    UPDATE tally SET value = value - length(OLD.long) WHERE name = 'registration_bytes';
END;

CREATE TRIGGER registration_comes AFTER INSERT ON contract WHEN NEW.owner_id = 0 BEGIN
    UPDATE tally SET value = value + length(NEW.text) WHERE name = 'registration_bytes';
END;

CREATE TRIGGER registration_goes AFTER DELETE ON contract WHEN OLD.owner_id = 0 BEGIN
    UPDATE tally SET value = value - length(OLD.text) WHERE name = 'registration_bytes';
END;
-- Messages and pending events that were handed out by pickup, by id, and until when that counts: another process leaves
-- them out when it looks for what nobody has pushed.
CREATE TABLE pickup (
    id TEXT PRIMARY KEY,
    until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX pickup_until ON pickup (until);

-- Whom a recipient has acknowledged, as mediatord.store.known_senders writes it; NULL for nobody.
ALTER TABLE recipient ADD COLUMN senders TEXT;
