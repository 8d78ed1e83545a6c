-- Upgrade to version 2: devices that push services can wake.
--
-- Owners are numbers: that of an account, or that of a party with a minus. Nothing of this is read or written on the path
-- of a message.

CREATE TABLE device (
    seq INTEGER PRIMARY KEY,  -- order of registration
    id BLOB NOT NULL UNIQUE,
    owner INTEGER NOT NULL,
    service TEXT NOT NULL,
    sealed BLOB NOT NULL,
    expires_at REAL  -- NULL for never
) STRICT;

-- Covers finding the owners that have a device, and counting devices by service.
CREATE INDEX device_of_owner ON device (owner, service, expires_at);
CREATE INDEX device_expiry ON device (expires_at) WHERE expires_at IS NOT NULL;

-- Wake-ups and polls of owners; no row for one that never had a device or was woken.
CREATE TABLE wakeup (
    owner INTEGER PRIMARY KEY,
    polled_at REAL,  -- last contact about messages
    woken_at REAL,  -- time of the claim of the last wake-up that was sent
    claimed_at REAL,  -- like the next, NULL when no wake-up is claimed
    claimed_until REAL
) STRICT;

CREATE TRIGGER account_with_devices_deleted AFTER DELETE ON account BEGIN
    DELETE FROM device WHERE owner = OLD.id;
    DELETE FROM wakeup WHERE owner = OLD.id;
END;

CREATE TRIGGER party_with_devices_deleted AFTER DELETE ON party BEGIN
    DELETE FROM device WHERE owner = -OLD.id;
    DELETE FROM wakeup WHERE owner = -OLD.id;
END;

-- With the last registration, so that a new one is inserted before former ones are deleted.
CREATE TRIGGER registration_with_devices_deleted AFTER DELETE ON contract
WHEN OLD.owner_id = 0 AND NOT EXISTS (SELECT 1 FROM contract WHERE peer_id = OLD.peer_id AND owner_id = 0) BEGIN
    DELETE FROM device WHERE owner = -OLD.peer_id;
    DELETE FROM wakeup WHERE owner = -OLD.peer_id;
END;
