-- Upgrade to version 3: connections with wallets that speak DIDComm v1.
--
-- Nothing of this is read or written on the path of a message of v2. A pending connection has no account; one with an
-- account is removed with it.

CREATE TABLE v1_connection (
    id INTEGER PRIMARY KEY,
    account TEXT NOT NULL UNIQUE,  -- key of the wallet, which is the DID of its account
    own_key TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL,
    endpoint TEXT,
    routing_keys TEXT NOT NULL,  -- as JSON
    has_base58_keys INTEGER NOT NULL,
    implicit_pickup TEXT NOT NULL,
    created_at REAL NOT NULL,
    has_account INTEGER NOT NULL,  -- maintained by triggers
    size INTEGER NOT NULL GENERATED ALWAYS AS (
        length(account) + length(own_key) + length(request_id) + coalesce(length(endpoint), 0) + length(routing_keys)
    ) VIRTUAL
) STRICT;

CREATE INDEX v1_connection_pending ON v1_connection (created_at) WHERE has_account = 0;

-- Counted by triggers: a new connection is checked against the number of pending ones.
INSERT INTO counter VALUES ('v1_connections', 0), ('pending_v1_connections', 0);

CREATE TRIGGER v1_connection_inserted AFTER INSERT ON v1_connection BEGIN
    UPDATE counter SET value = value + 1 WHERE name = 'v1_connections';
    UPDATE counter SET value = value + 1 - NEW.has_account WHERE name = 'pending_v1_connections';
    UPDATE counter SET value = value + NEW.size WHERE name = 'registration_bytes';
END;

CREATE TRIGGER v1_connection_changed AFTER UPDATE ON v1_connection
WHEN NEW.has_account <> OLD.has_account OR NEW.size <> OLD.size BEGIN
    UPDATE counter SET value = value + OLD.has_account - NEW.has_account WHERE name = 'pending_v1_connections';
    UPDATE counter SET value = value + NEW.size - OLD.size WHERE name = 'registration_bytes';
END;

CREATE TRIGGER v1_connection_deleted AFTER DELETE ON v1_connection BEGIN
    UPDATE counter SET value = value - 1 WHERE name = 'v1_connections';
    UPDATE counter SET value = value - 1 + OLD.has_account WHERE name = 'pending_v1_connections';
    UPDATE counter SET value = value - OLD.size WHERE name = 'registration_bytes';
END;

CREATE TRIGGER account_with_v1_connection_inserted AFTER INSERT ON account BEGIN
    UPDATE v1_connection SET has_account = 1 WHERE account = NEW.did;
END;

CREATE TRIGGER account_with_v1_connection_deleted AFTER DELETE ON account BEGIN
    DELETE FROM v1_connection WHERE account = OLD.did;
END;

-- A connection has one key, so it does not follow the account to another DID.
CREATE TRIGGER account_with_v1_connection_renamed AFTER UPDATE OF did ON account BEGIN
    DELETE FROM v1_connection WHERE account = OLD.did;
    UPDATE v1_connection SET has_account = 1 WHERE account = NEW.did;
END;
