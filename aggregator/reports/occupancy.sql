-- What became of each app's card hours: busy, idle, or unknown.
--
-- Attached is the time of the stays; idle and unknown are never put together. busy_h + idle_h + unknown_h is attached_h: as
-- shown in the table, and in this order exactly in CSV and JSON. Busy is time at a utilization above `busy_above`; unknown is
-- time without data.
--
-- resolution: hours
-- parameters: busy_above
-- sum: attached_h = busy_h + idle_h + unknown_h
-- columns:
--   app_id      text   Id of an app; empty for CVMs of none.
--   gpu         text   A card's uuid; VMM, CVM and PCI address of one without.
--   attached_h  h      Hours in which it was in a CVM of the app.
--   busy_h      h      Of these: busy.
--   idle_h      h      Of these: idle.
--   unknown_h   h      Of these: nothing is known.
--   busy_pct    %      Busy part of the busy and idle time; empty where nothing is known.
{% import "_parts.sql" as part with context %}
{% set busy_h = part.hours("busy_ms") %}
{% set idle_h = part.hours("(known_ms - busy_ms)") %}
{% set unknown_h = part.hours("(attached_ms - known_ms)") %}
WITH {{ part.stays() }},
{{ part.usage(["busy_ms", "idle_ms"]) }},
attached AS (
  SELECT cvm_id, card_id,
    {{ part.total(part.greatest(part.least("last_ms", end_ms) ~ " - " ~ part.greatest("first_ms", start_ms), 0) ~ " * own") }} AS stay_ms
  FROM stay GROUP BY cvm_id, card_id
),
used AS (
  SELECT stay.cvm_id, stay.card_id, {{ part.total("u.busy_ms + u.idle_ms") }} AS known_ms, {{ part.total("u.busy_ms") }} AS busy_ms
  FROM usage AS u JOIN stay ON stay.tenancy_id = u.tenancy_id
  GROUP BY stay.cvm_id, stay.card_id
),
named AS (SELECT DISTINCT cvm_id, app_id, card_id, gpu FROM stay),
-- The first sample of the range speaks for a time before it too.
summed AS (
  SELECT n.app_id, n.gpu, {{ part.total(part.greatest("a.stay_ms", "coalesce(u.known_ms, 0)")) }} AS attached_ms,
    {{ part.total("coalesce(u.known_ms, 0)") }} AS known_ms, {{ part.total("coalesce(u.busy_ms, 0)") }} AS busy_ms
  FROM named AS n
  JOIN attached AS a ON a.cvm_id = n.cvm_id AND a.card_id = n.card_id
  LEFT JOIN used AS u ON u.cvm_id = n.cvm_id AND u.card_id = n.card_id
  GROUP BY n.app_id, n.gpu
)
SELECT app_id, gpu,
  -- Not one division: then it could differ from the sum of the three in its last digit.
  {{ busy_h }} + {{ idle_h }} + {{ unknown_h }} AS attached_h,
  {{ busy_h }} AS busy_h,
  {{ idle_h }} AS idle_h,
  {{ unknown_h }} AS unknown_h,
  {{ part.percent("busy_ms", "known_ms") }} AS busy_pct
FROM summed
WHERE attached_ms > 0
ORDER BY coalesce(app_id, ''), attached_ms DESC, gpu
