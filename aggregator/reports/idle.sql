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
-- Most are busy, which is told by their last buckets.
stay AS (
  SELECT a.* FROM attached AS a WHERE NOT EXISTS (
    SELECT 1 FROM gpu_5m AS s
    WHERE s.gpu_id = a.gpu_id AND s.bucket_ms >= {{ as_of_ms - for_ms }} AND s.bucket_ms < {{ as_of_ms }}
      AND s.tenancy_id = a.tenancy_id AND s.utilization_gpu_max >= {{ below }}
  )
),
{{ part.usage(["busy_ms", "idle_ms", "utilization_max", "memory_last", "last_ms"], 300000) }},
seen AS (
  SELECT u.*, stay.card_id, stay.cvm_id FROM usage AS u JOIN stay ON stay.tenancy_id = u.tenancy_id
),
-- The stay that a card is in: the newest one, with news.
here AS (
  SELECT s.* FROM stay AS s
  WHERE s.own = 1 AND NOT EXISTS (
    SELECT 1 FROM attached AS later WHERE later.card_id = s.card_id AND later.own = 1 AND later.first_ms > s.first_ms
  )
),
heard AS (
  SELECT here.tenancy_id, here.card_id, here.cvm_id, here.first_ms, max(seen.last_ms) AS newest_ms,
    max(seen.bucket_ms) AS newest_bucket_ms,
    max(CASE WHEN seen.utilization_max >= {{ below }} THEN seen.bucket_ms END) AS busy_bucket_ms,
    max(CASE WHEN seen.utilization_max >= {{ below }} THEN seen.last_ms END) AS busy_ms
  FROM here JOIN seen ON seen.card_id = here.card_id AND seen.cvm_id = here.cvm_id AND seen.last_ms >= here.first_ms
  GROUP BY here.tenancy_id, here.card_id, here.cvm_id, here.first_ms
  HAVING max(seen.last_ms) >= {{ as_of_ms - stale_ms }}
),
idle AS (
  SELECT heard.tenancy_id, max(coalesce(heard.busy_ms, {{ part.greatest("heard.first_ms", start_ms) }})) AS since_ms,
    {{ part.total("seen.busy_ms + seen.idle_ms") }} AS known_ms,
    max(CASE WHEN seen.bucket_ms = heard.newest_bucket_ms THEN seen.memory_last END) AS memory
  FROM heard JOIN seen ON seen.card_id = heard.card_id AND seen.cvm_id = heard.cvm_id AND seen.last_ms >= heard.first_ms
    AND seen.bucket_ms > coalesce(heard.busy_bucket_ms, 0)
  GROUP BY heard.tenancy_id
  HAVING {{ part.total("seen.busy_ms + seen.idle_ms") }} >= {{ for_ms }}
)
SELECT here.gpu, here.vmm, here.vm_id, here.vm_name, here.app_id,
  {{ part.timestamp("idle.since_ms") }} AS idle_since,
  {{ part.hours("idle.known_ms") }} AS idle_h,
  {{ part.gib("idle.memory") }} AS memory_gib
FROM idle JOIN here ON here.tenancy_id = idle.tenancy_id
ORDER BY idle.since_ms, here.gpu
