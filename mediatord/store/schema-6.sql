-- mediatord's store, version 6: a recipient DID has one owner, whatever it is named by, and its text is stored once.

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

-- The last place that was given in the order of registration.
ALTER TABLE account ADD COLUMN places INTEGER NOT NULL DEFAULT 0;
UPDATE account SET places = coalesce((SELECT max(registered) FROM recipient WHERE account_id = account.id), 0);

CREATE UNIQUE INDEX recipient_registered ON recipient (did_digest) WHERE registered IS NOT NULL;
CREATE INDEX recipient_left_over ON recipient (did_digest, account_id) WHERE registered IS NULL;

-- Last authenticated contact, to a day, and whether a message was never accepted for it nor contact seen after its
-- first day.
ALTER TABLE account ADD COLUMN seen_at REAL NOT NULL DEFAULT 0;
ALTER TABLE account ADD COLUMN fresh INTEGER NOT NULL DEFAULT 0;
UPDATE account SET seen_at = CAST(strftime('%s', 'now') AS REAL);
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
-- mediatord's store, version 6: what recipients have got by pickup, and whom they know.

-- Messages and pending events that were handed out by pickup, by id, and until when that counts: another process leaves
-- them out when it looks for what nobody has pushed.
CREATE TABLE pickup (
    id TEXT PRIMARY KEY,
    until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX pickup_until ON pickup (until);

-- Whom a recipient has acknowledged, as mediatord.store.known_senders writes it; NULL for nobody.
ALTER TABLE recipient ADD COLUMN senders TEXT;
