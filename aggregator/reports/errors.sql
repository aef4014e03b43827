-- Queries of a card that fail, by card and kind: since when, how long, the last words on it.
--
-- Kinds are the collector's queries: device, uuid, pci_bus_id, utilization, memory, temperature, power. Anything else that a
-- guest names is `other`. A card that is lost gives neither uuid nor address, so that its failures are nobody's and not
-- here: it is in the report `stale` as detached, and in the detail of its CVM's polls.
--
-- columns:
--   gpu        text  A card's uuid; VMM, CVM and PCI address of one without.
--   vm_id      text  Id of its CVM.
--   app_id     text  Id of the app; empty for CVMs of none.
--   kind       text  What cannot be read.
--   since      time  First failure of those that touch the range.
--   until      time  Last one; may lag by a minute.
--   failing_h  h     Hours of the range in which it failed.
--   detail     text  The guest's last words on what fails.
{% import "_parts.sql" as part with context %}
{% set clipped = part.greatest(part.least("e.until_ms", end_ms) ~ " - " ~ part.greatest("e.since_ms", start_ms), 0) %}
WITH {{ part.stays() }},
kind (kind) AS ({{ part.values(kinds) }}),
failed AS (
  SELECT stay.gpu, stay.vm_id, stay.app_id, stay.cvm_id, kind.kind, e.since_ms, e.until_ms, e.detail, {{ clipped }} AS failing_ms,
    row_number() OVER (PARTITION BY stay.gpu, stay.cvm_id, kind.kind ORDER BY e.until_ms DESC, e.error_id DESC) AS nth
  FROM stay
  JOIN gpu_error AS e ON e.gpu_id = stay.gpu_id AND e.since_ms >= stay.first_ms AND e.since_ms <= stay.last_ms
  JOIN kind ON ',' || e.kinds || ',' LIKE '%,' || kind.kind || ',%'
  WHERE e.since_ms < {{ end_ms }} AND e.until_ms >= {{ start_ms }}
)
SELECT gpu, vm_id, app_id, kind,
  {{ part.timestamp("min(since_ms)") }} AS since,
  {{ part.timestamp("max(until_ms)") }} AS until,
  {{ part.hours(part.total("failing_ms")) }} AS failing_h,
  max(CASE WHEN nth = 1 THEN detail END) AS detail
FROM failed
GROUP BY gpu, vm_id, app_id, cvm_id, kind
ORDER BY max(until_ms) DESC, gpu, kind
