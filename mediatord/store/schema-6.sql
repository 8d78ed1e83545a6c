-- mediatord's store, version 6: what its recipients have got by pickup.

-- Messages and pending events that were handed out by pickup, by id, and until when that counts: another process leaves
-- them out when it looks for what nobody has pushed.
CREATE TABLE pickup (
    id TEXT PRIMARY KEY,
    until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX pickup_until ON pickup (until);
