-- What the cards drew, estimated: energy, hours with a power reading, average power.
--
-- Each power reading counts for the time that its sample speaks for: since the one before, at most until a card without news is
-- stale. It is the card's own reading, not the server's meter.
--
-- resolution: hours
-- parameters: by
-- columns:
--   day            day    A day of the time zone.  [by day]
--   gpu            text   A card's uuid; VMM, CVM and PCI address of one without.  [by gpu]
--   model          text   The host's word for it.  [by gpu]
--   vmm            text   Name of a VMM.  [by cvm, vmm]
--   vm_id          text   Id of a CVM.  [by cvm]
--   vm_name        text   Its name.  [by cvm]
--   app_id         text   Id of an app; empty for cards in CVMs of none.  [by cvm, app]
--   cards          count  Cards that were attached.  [by cvm, app, vmm, day]
--   estimated_kwh  kWh    Energy; empty where no power was read.
--   covered_h      h      Hours with a power reading, of all cards together.
--   avg_w          W      Average power of a card in these hours.
{% import "_parts.sql" as part with context %}
{# In two parts: 64 bits do not hold the microjoules that a thousand cards draw in a year. #}
{% set energy_mj = "(CAST(energy_mj AS double precision) + CAST(rest_uj AS double precision) / 1000)" %}
WITH {{ part.stays() }},
{{ part.spanned() }},
{{ part.usage(["energy_uj", "powered_ms"]) }},
used AS (
  SELECT {{ keys }}, count(DISTINCT stay.card_id) AS cards, {{ part.total("u.energy_uj / 1000") }} AS energy_mj,
    {{ part.total("u.energy_uj % 1000") }} AS rest_uj, {{ part.total("u.powered_ms") }} AS powered_ms
  FROM {{ part.usage_of_stays() }}
  GROUP BY {{ key_names }}
)
SELECT {{ key_names }}, {{ "cards, " if by != "gpu" -}}
  {{ energy_mj }} / 3600000000 AS estimated_kwh,
  {{ part.hours("powered_ms") }} AS covered_h,
  {{ energy_mj }} / nullif(powered_ms, 0) AS avg_w
FROM used
ORDER BY {{ "" if by == "day" else "coalesce(energy_mj, -1) DESC, " }}{{ key_names }}
