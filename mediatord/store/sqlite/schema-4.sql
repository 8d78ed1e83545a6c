-- mediatord's store, version 4: a message costs fewer pages, and its queue is counted once a batch.

-- From now on the statements that insert and delete messages count them in `queue`, see sql_queue_counts.py.
DROP TRIGGER message_comes;
DROP TRIGGER message_goes;

-- Those of an account are those of its queues, which are few: one index finds them all, and by digest too.
DROP INDEX message_of_account;
DROP INDEX message_digest;
DROP INDEX message_of_recipient;
CREATE INDEX message_of_recipient ON message (recipient_id, seq, digest_head);
