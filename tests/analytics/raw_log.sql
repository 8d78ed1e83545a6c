-- Tables of log files, for the queries of raw_log_totals.py. Parameters: $files; $fields, the types of fields, as JSON;
-- $envelope, the names of the fields of every line; $utf8, a pattern.

-- Read as Latin-1, in which every byte is a character, so that no line is lost to the reader.
CREATE TABLE file_line AS
SELECT filename AS file, rtrim(text, E' \t\r') AS text
FROM read_csv($files, columns = {'text': 'VARCHAR'}, auto_detect = false, header = false, delim = '\x01', quote = '',
    escape = '', strict_mode = false, new_line = '\n', encoding = 'latin-1', max_line_size = 8388608, filename = true)
WHERE rtrim(text, E' \t\r') <> '';

-- Of several files of a segment any complete one has the same lines. The active one is named in its first line.
CREATE TABLE segment AS
WITH named AS (
    SELECT file, count(*) AS lines,
        coalesce(
            nullif(regexp_extract(file, '(events-[^/]*)[.]jsonl', 1), ''),
            max(regexp_extract(text, '"segment":"([^"]*)"', 1))) AS stem
    FROM file_line GROUP BY file)
SELECT file, stem, strptime(stem[8:15], '%Y%m%d')::DATE AS segment_day,
    regexp_extract(stem, 'Z-(.*)-[0-9a-f]+-[0-9]+$', 1) AS segment_node,
    regexp_extract(stem, '-([0-9a-f]+)-[0-9]+$', 1) AS segment_boot
FROM named QUALIFY row_number() OVER (PARTITION BY stem ORDER BY lines DESC, file) = 1;

-- Record separators are ignored.
CREATE TABLE framed AS
SELECT stem, segment_day, segment_node, segment_boot, ltrim(text, chr(30) || ' ') AS line, CASE
    WHEN contains(line, chr(0)) THEN 'nul'
    WHEN NOT regexp_full_match(line, $utf8) THEN 'utf8'
    WHEN contains(line[2:], '{"v":') THEN 'glued'
    WHEN starts_with(line, '{') <> ends_with(line, '}') THEN 'torn'
    WHEN NOT coalesce(json_valid(line), false) OR NOT starts_with(line, '{') THEN 'not_json'
    END AS cause,
    if(cause IS NULL, line, '{}') AS object, json_structure(object)::VARCHAR AS structure
FROM file_line JOIN segment USING (file);
DROP TABLE file_line;

-- Few lines differ in structure, so the types of each structure are checked once.
CREATE TABLE mistyped AS
WITH keyed AS (
    SELECT structure, unnest(json_keys(structure)) AS key FROM (SELECT DISTINCT structure FROM framed)),
typed AS (
    SELECT structure, json_extract_string(structure, '$."' || key || '"') AS found,
        json_extract_string($fields, '$."' || key || '"') AS declared
    FROM keyed)
SELECT DISTINCT structure FROM typed
WHERE declared IS NOT NULL AND found NOT IN (declared, 'NULL')
    AND NOT (declared IN ('BIGINT', 'DOUBLE') AND found = 'UBIGINT' OR declared = 'DOUBLE' AND found = 'BIGINT');

CREATE TABLE parsed AS
SELECT stem, segment_day, segment_node, segment_boot, unnest(json_transform(object, $fields)), coalesce(cause, CASE
    WHEN structure IN (FROM mistyped) THEN 'type'
    WHEN NOT list_has_all(json_keys(structure), $envelope) THEN 'missing'
    WHEN try_strptime(json_extract_string(object, '$.ts'), '%Y-%m-%dT%H:%M:%S.%fZ') IS NULL THEN 'time'
    END) AS cause
FROM framed;
DROP TABLE framed;

CREATE TABLE damaged AS
SELECT segment_day AS day, segment_node AS node, cause FROM parsed WHERE cause IS NOT NULL;

-- A number that occurs again in the segments of a day is a repeated line.
CREATE TABLE numbered AS
SELECT * EXCLUDE (cause) REPLACE (strptime(ts, '%Y-%m-%dT%H:%M:%S.%fZ') AS ts),
    row_number() OVER (PARTITION BY segment_day, node, boot, seq ORDER BY stem) AS copy
FROM parsed WHERE cause IS NULL;
DROP TABLE parsed;

CREATE TABLE repeated AS
SELECT segment_day AS day, segment_node AS node, segment_boot AS boot FROM numbered WHERE copy > 1;

CREATE TABLE event AS
SELECT ts::DATE AS day, hour(ts)::INTEGER AS hour, * EXCLUDE (copy) FROM numbered WHERE copy = 1;
DROP TABLE numbered;

-- One row for each message with an acceptance or an ending.
CREATE TABLE message AS
WITH ending(event, state) AS (
    VALUES ('msg.ack', 'acked'), ('msg.expire', 'expired'), ('msg.evict', 'evicted'), ('msg.remove', 'removed')),
line AS (
    SELECT event.* EXCLUDE (size), event = 'msg.accept' AS accepts, if(accepts, size, NULL) AS size, state
    FROM event LEFT JOIN ending USING (event) WHERE msg IS NOT NULL AND (accepts OR state IS NOT NULL))
SELECT msg, any_value(proto) AS proto, coalesce(max(size), 0) AS size, max(ttl_s) AS ttl_s,
    min(ts) FILTER (accepts) AS accepted_at, arg_min(node, ts) FILTER (accepts) AS node,
    arg_min(rcpt, ts) FILTER (accepts) AS rcpt,
    -- An ending may be logged before the acceptance.
    if(count(state) > 0, greatest(min(ts) FILTER (state IS NOT NULL), accepted_at), NULL) AS ended_at,
    arg_min(state, ts) FILTER (state IS NOT NULL) AS state,
    coalesce(arg_min(reason, ts) FILTER (state <> 'acked'), '') AS reason,
    greatest(count(*) FILTER (accepts) - 1, 0) AS accepted_again, max(ts) FILTER (accepts) AS last_accepted_at,
    greatest(count(state) - 1, 0) AS ended_again, max(ts) FILTER (state IS NOT NULL) AS last_ended_at
FROM line GROUP BY msg;

-- Each message on each day at whose end it is open.
CREATE TABLE open_message AS
SELECT days.day, message.* FROM (SELECT DISTINCT day FROM event) days
JOIN message ON accepted_at < days.day + INTERVAL 1 DAY
    AND (ended_at IS NULL OR ended_at >= days.day + INTERVAL 1 DAY);

-- Sockets that a process left open: they are gone when it stops or the next one of the node begins.
CREATE TABLE unclosed AS
WITH process AS (
    SELECT node, boot, min(ts) AS began, max(ts) AS ended, bool_or(event = 'proc.stop') AS stopped,
        count(*) FILTER (event = 'conn.open') - count(*) FILTER (event = 'conn.close') AS sockets,
        lead(min(ts)) OVER (PARTITION BY node ORDER BY min(ts)) AS next_began
    FROM event GROUP BY node, boot)
SELECT node, if(stopped, ended, next_began) AS gone_at, sockets FROM process WHERE sockets > 0 AND gone_at IS NOT NULL;

-- Concurrent sockets of a node before and after each change.
CREATE TABLE socket_level AS
WITH change AS (
    SELECT node, ts, seq, if(event = 'conn.open', 1, -1) AS step FROM event
    WHERE event IN ('conn.open', 'conn.close')
    UNION ALL SELECT node, gone_at, NULL, -sockets FROM unclosed)
SELECT node, ts::DATE AS day, row_number() OVER change AS number, sum(step) OVER change AS level,
    level - step AS level_before
FROM change WINDOW change AS (PARTITION BY node ORDER BY ts, seq NULLS LAST ROWS UNBOUNDED PRECEDING);

-- Requests of one account within a second of each other are one wake-up, which the first contact within an hour ends.
CREATE TABLE wakeup AS
WITH request AS (
    SELECT did, service, ts AS logged, ts - to_microseconds(coalesce(round(dur_ms * 1000), 0)::BIGINT) AS begun
    FROM event WHERE event = 'push.wake' AND outcome = 'sent' AND did IS NOT NULL),
marked AS (
    SELECT *, coalesce(begun - lag(begun) OVER (PARTITION BY did ORDER BY begun) > INTERVAL 1 SECOND, true) AS first
    FROM request),
numbered AS (
    SELECT *, count(*) FILTER (first) OVER (PARTITION BY did ORDER BY begun ROWS UNBOUNDED PRECEDING) AS number
    FROM marked),
whole AS (
    SELECT did, min(begun) AS begun, min(logged) AS logged, list_distinct(list(service)) AS services
    FROM numbered GROUP BY did, number),
contact AS (
    SELECT if(event = 'conn.auth', did, sender) AS did, ts FROM event
    WHERE code IS NULL AND (event = 'conn.auth'
        OR event = 'req.done' AND (starts_with(mtype, 'messagepickup/') OR starts_with(mtype, 'QUERY_'))))
SELECT whole.did, services, begun, min(contact.ts) AS picked_up_at,
    greatest(coalesce(picked_up_at, begun + INTERVAL 1 HOUR), any_value(logged))::DATE AS day
FROM whole LEFT JOIN contact
    ON contact.did = whole.did AND contact.ts BETWEEN begun AND begun + INTERVAL 1 HOUR
GROUP BY whole.did, services, begun;

CREATE TABLE duration AS
SELECT day, node, coalesce(if(event = 'req.done', proto, path), '') AS path,
    CASE event WHEN 'msg.push' THEN 'push' WHEN 'msg.ack' THEN 'ack' ELSE 'request' END AS metric,
    greatest(if(event = 'req.done', dur_ms, latency_ms), 0.001) AS ms
FROM event
WHERE (event = 'req.done' AND dur_ms IS NOT NULL)
    OR (event = 'msg.ack' OR event = 'msg.push' AND coalesce(ok, true)) AND latency_ms IS NOT NULL;

-- Growth of each counter of a process from the last report of a day to that of the next, and of the lines it counts.
CREATE TABLE counter_report AS
WITH report AS (
    SELECT node, boot, day, seq AS upto, forwarded, stored, delivered, expired, evicted, requests_accepted,
        requests_rejected, requests_failed, connections
    FROM event WHERE event = 'counters' QUALIFY row_number() OVER (PARTITION BY node, boot, day ORDER BY seq DESC) = 1),
line AS (
    SELECT node, boot, report.day,
        count(*) FILTER (event = 'msg.accept') AS forwarded,
        count(*) FILTER (event = 'msg.accept' AND method = 'queue' OR event = 'msg.push' AND NOT ok) AS stored,
        count(*) FILTER (event = 'msg.ack') AS delivered,
        count(*) FILTER (event = 'msg.expire') AS expired,
        count(*) FILTER (event = 'msg.evict') AS evicted,
        count(*) FILTER (event = 'req.done' AND status < 500 AND code IS NULL) AS requests_accepted,
        count(*) FILTER (event = 'req.done' AND status < 500 AND code IS NOT NULL) AS requests_rejected,
        count(*) FILTER (event = 'req.done' AND status >= 500) AS requests_failed,
        count(*) FILTER (event = 'conn.open') - count(*) FILTER (event = 'conn.close') AS connections
    FROM report JOIN event USING (node, boot) WHERE seq < upto GROUP BY ALL),
said AS (
    UNPIVOT (SELECT * EXCLUDE (upto) FROM report) ON COLUMNS(* EXCLUDE (node, boot, day))
    INTO NAME counter VALUE said),
logged AS (UNPIVOT line ON COLUMNS(* EXCLUDE (node, boot, day)) INTO NAME counter VALUE logged)
SELECT day, node, counter, said - coalesce(lag(said) OVER process, 0) AS counted,
    logged - coalesce(lag(logged) OVER process, 0) AS logged
FROM said JOIN logged USING (node, boot, day, counter)
WINDOW process AS (PARTITION BY node, boot, counter ORDER BY day);
