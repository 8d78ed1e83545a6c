-- mediatord's store, version 5: what became of all messages, and who has how much of a queue.

-- Where it came from, see mediatord.interfaces.QueueLimits; 0 where that is not known.
ALTER TABLE message ADD COLUMN origin INTEGER NOT NULL DEFAULT 0;

-- The column is behind the payload, so it is read in the index only, and so is how much each has of a full queue.
DROP INDEX message_of_recipient;
CREATE INDEX message_of_recipient ON message (recipient_id, seq, digest_head, origin, size);

-- Messages and pending events since there is this table, by what became of them; see mediatord.interfaces.Ledger. Kept
-- by the statements that insert and delete them, once a transaction.
CREATE TABLE ledger (
    half TEXT PRIMARY KEY,
    accepted INTEGER NOT NULL DEFAULT 0,
    acknowledged INTEGER NOT NULL DEFAULT 0,
    expired INTEGER NOT NULL DEFAULT 0,
    evicted INTEGER NOT NULL DEFAULT 0,
    removed INTEGER NOT NULL DEFAULT 0,
    withdrawn INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

INSERT INTO ledger (half, accepted)
VALUES ('didcomm', (SELECT count(*) FROM message)), ('decentrl', (SELECT count(*) FROM pending_event));
