-- How much memory was needed at most: who could take a smaller card.
--
-- Peaks are those of 5 minutes; of hours where the range is longer than a week, or older than buckets of 5 minutes are kept. 95
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
  SELECT stay.cvm_id, stay.card_id, u.bucket_ms, max(u.memory_max) AS used, max(u.memory_total_max) AS total
  FROM usage AS u JOIN stay ON stay.tenancy_id = u.tenancy_id
  GROUP BY stay.cvm_id, stay.card_id, u.bucket_ms
),
ranked AS (
  SELECT cvm_id, card_id, used, total, row_number() OVER (PARTITION BY cvm_id, card_id ORDER BY used) AS nth,
    count(*) OVER (PARTITION BY cvm_id, card_id) AS peaks
  FROM peak WHERE used IS NOT NULL
),
found AS (
  SELECT cvm_id, card_id, max(total) AS total, max(used) AS peak, min(CASE WHEN 100 * nth >= 95 * peaks THEN used END) AS p95
  FROM ranked GROUP BY cvm_id, card_id
),
named AS (SELECT DISTINCT cvm_id, card_id, app_id, vm_id, vm_name, gpu FROM stay)
SELECT n.app_id, n.vm_id, n.vm_name, n.gpu,
  {{ part.gib("total") }} AS total_gib,
  {{ part.gib("peak") }} AS peak_gib,
  {{ part.gib("p95") }} AS p95_gib,
  {{ part.percent("peak", "total") }} AS peak_pct
FROM named AS n JOIN found AS f ON f.cvm_id = n.cvm_id AND f.card_id = n.card_id
ORDER BY peak, n.gpu, n.vm_id
