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
