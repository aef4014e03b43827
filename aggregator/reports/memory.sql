-- How much memory was needed at most: who could take a smaller card.
--
-- Peaks are those of 5 minutes; of hours where the range is longer than a day, or older than buckets of 5 minutes are kept. 95
-- of 100 of them are not above p95_gib.
--
-- resolution: peaks
-- columns:
--   app_id     text  Id of an app; empty for CVMs of none.
--   vm_id      text  Id of a CVM.
--   vm_name    text  Its name.
--   gpu        text  A card's uuid; VMM, CVM and PCI address of one without.
--   total_gib  GiB   Memory of the card.
--   peak_gib   GiB   Largest that was in use.
--   p95_gib    GiB   95th percentile of the peaks.
--   peak_pct   %     Largest part that was in use.
{% import "_parts.sql" as part with context %}
WITH {{ part.stays() }},
{{ part.usage(["memory_max", "memory_total_max"], peak_ms) }},
peak AS (
  SELECT stay.cvm_id, stay.card_id, f.bucket_ms, max(f.memory_max) AS used, max(f.memory_total_max) AS total
  FROM found AS f JOIN stay ON stay.tenancy_id = f.tenancy_id
  GROUP BY stay.cvm_id, stay.card_id, f.bucket_ms
),
ranked AS (
  SELECT cvm_id, card_id, used, total, cume_dist() OVER (PARTITION BY cvm_id, card_id ORDER BY used) AS not_above
  FROM peak WHERE used IS NOT NULL
),
reached AS (
  SELECT cvm_id, card_id, max(total) AS total, max(used) AS peak, min(CASE WHEN not_above >= 0.95 THEN used END) AS p95
  FROM ranked GROUP BY cvm_id, card_id
),
named AS (SELECT DISTINCT cvm_id, card_id, app_id, vm_id, vm_name, gpu FROM stay)
SELECT n.app_id, n.vm_id, n.vm_name, n.gpu,
  {{ part.gib("r.total") }} AS total_gib,
  {{ part.gib("r.peak") }} AS peak_gib,
  {{ part.gib("r.p95") }} AS p95_gib,
  {{ part.percent("r.peak", "r.total") }} AS peak_pct
FROM reached AS r JOIN named AS n ON n.cvm_id = r.cvm_id AND n.card_id = r.card_id
ORDER BY r.peak, n.gpu, n.vm_id
