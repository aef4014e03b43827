-- How busy the cards were: average and peak, busy and idle hours.
--
-- Busy is time at a utilization above `busy_above`, idle is the rest of the time in which it is known. A card that was attached
-- without any data has no figures.
--
-- resolution: hours
-- parameters: by, busy_above
-- columns:
--   day         day    A day of the time zone.  [by day]
--   gpu         text   A card's uuid; VMM, CVM and PCI address of one without.  [by gpu]
--   model       text   The host's word for it.  [by gpu]
--   vmm         text   Name of a VMM.  [by cvm, vmm]
--   vm_id       text   Id of a CVM.  [by cvm]
--   vm_name     text   Its name.  [by cvm]
--   app_id      text   Id of an app; empty for cards in CVMs of none.  [by cvm, app]
--   cards       count  Cards that were attached.  [by cvm, app, vmm, day]
--   avg_pct     %      Mean of the samples' utilization.
--   peak_pct    %      Their largest.
--   busy_pct    %      Busy part of the busy and idle time.
--   busy_h      h      Busy hours, of all cards together.
--   idle_h      h      Idle hours.
{% import "_parts.sql" as part with context %}
WITH {{ part.stays() }},
{{ part.spanned() }},
{{ part.usage(["busy_ms", "idle_ms", "utilization_sum", "utilization_count", "utilization_max"]) }},
used AS (
  SELECT {{ keys }}, count(DISTINCT stay.card_id) AS cards, {{ part.total("u.utilization_sum") }} AS utilization_sum,
    {{ part.total("u.utilization_count") }} AS utilization_count, max(u.utilization_max) AS utilization_max,
    {{ part.total("u.busy_ms") }} AS busy_ms, {{ part.total("u.idle_ms") }} AS idle_ms
  FROM {{ part.usage_of_stays() }}
  GROUP BY {{ key_names }}
)
SELECT {{ key_names }}, {{ "cards, " if by != "gpu" -}}
  {{ part.ratio("utilization_sum", "utilization_count") }} AS avg_pct,
  utilization_max AS peak_pct,
  {{ part.percent("busy_ms", "(busy_ms + idle_ms)") }} AS busy_pct,
  CASE WHEN busy_ms + idle_ms > 0 THEN {{ part.hours("busy_ms") }} END AS busy_h,
  CASE WHEN busy_ms + idle_ms > 0 THEN {{ part.hours("idle_ms") }} END AS idle_h
FROM used
ORDER BY {{ "" if by == "day" else "coalesce(busy_ms, -1) DESC, " }}{{ key_names }}
