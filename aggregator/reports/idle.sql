-- Cards that are attached and answer, but do nothing: since when, what memory they hold, whose they are.
--
-- As of the end of the range: a card is listed that was at no time since `idle_since` at `below` % or more, and for at least the
-- time `for` is known to have been below. In `idle_since` a bucket of 5 minutes (of an hour, further back than a day) with any
-- sample above counts up to its last sample; no earlier than the range begins.
--
-- resolution: recent
-- parameters: below, for
-- columns:
--   gpu         text  A card's uuid; VMM, CVM and PCI address of one without.
--   vmm         text  Name of its VMM.
--   vm_id       text  Id of its CVM.
--   vm_name     text  Its name.
--   app_id      text  Id of the app; empty for CVMs of none.
--   idle_since  time  Last time that it was not idle, or when it came.
--   idle_h      h     Hours in which it is known to have been idle since.
--   memory_gib  GiB   Memory in use.
{% import "_parts.sql" as part with context %}
WITH {{ part.stays("attached") }},
-- The stay that a card is in: the newest one. Most are busy, which is told by their last buckets.
newest AS (SELECT card_id, max(first_ms) AS first_ms FROM attached WHERE own = 1 GROUP BY card_id),
here AS (
  SELECT a.* FROM newest JOIN attached AS a ON a.card_id = newest.card_id AND a.first_ms = newest.first_ms
  WHERE a.own = 1 AND NOT EXISTS (
    SELECT 1 FROM gpu_5m AS s
    WHERE s.gpu_id = a.gpu_id AND s.bucket_ms >= {{ as_of_ms - for_ms }} AND s.bucket_ms < {{ as_of_ms }}
      AND s.tenancy_id = a.tenancy_id AND s.utilization_gpu_max >= {{ below }}
  )
),
-- With what it was kept under before it was known by its uuid.
stay AS (
  SELECT a.*, here.tenancy_id AS here_id, here.first_ms AS here_first_ms
  FROM here JOIN attached AS a ON a.card_id = here.card_id AND a.cvm_id = here.cvm_id
),
{{ part.usage(["busy_ms", "idle_ms", "utilization_max", "memory_last", "last_ms"], 300000) }},
-- In one pass: joined with itself it would be read once for each card where a planner takes it for small.
seen AS (
  SELECT u.*, stay.here_id, stay.here_first_ms, max(u.last_ms) OVER of_card AS newest_ms,
    max(u.bucket_ms) OVER of_card AS newest_bucket_ms,
    max(CASE WHEN u.utilization_max >= {{ below }} THEN u.bucket_ms END) OVER of_card AS busy_bucket_ms,
    max(CASE WHEN u.utilization_max >= {{ below }} THEN u.last_ms END) OVER of_card AS busy_last_ms
  FROM usage AS u JOIN stay ON stay.tenancy_id = u.tenancy_id
  WHERE u.last_ms >= stay.here_first_ms
  WINDOW of_card AS (PARTITION BY stay.here_id)
),
idle AS (
  SELECT here_id, max(coalesce(busy_last_ms, {{ part.greatest("here_first_ms", start_ms) }})) AS since_ms,
    {{ part.total("busy_ms + idle_ms") }} AS known_ms,
    max(CASE WHEN bucket_ms = newest_bucket_ms THEN memory_last END) AS memory
  FROM seen
  WHERE newest_ms >= {{ as_of_ms - stale_ms }} AND bucket_ms > coalesce(busy_bucket_ms, 0)
  GROUP BY here_id
  HAVING {{ part.total("busy_ms + idle_ms") }} >= {{ for_ms }}
)
SELECT here.gpu, here.vmm, here.vm_id, here.vm_name, here.app_id,
  {{ part.timestamp("idle.since_ms") }} AS idle_since,
  {{ part.hours("idle.known_ms") }} AS idle_h,
  {{ part.gib("idle.memory") }} AS memory_gib
FROM idle JOIN here ON here.tenancy_id = idle.here_id
ORDER BY idle.since_ms, here.gpu
