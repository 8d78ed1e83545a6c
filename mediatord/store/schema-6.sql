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
