-- Confidential computing that is off, or on and not ready: which CVMs, for how long.
--
-- A CVM is listed that was not protected at any time of the range. `cc` is how it was at the end, `since` when that began.
--
-- columns:
--   vmm          text  Name of the VMM.
--   vm_id        text  Id of the CVM.
--   vm_name      text  Its name.
--   app_id       text  Id of the app; empty for CVMs of none.
--   cc           text  off, not ready or ready, as its last answer says.
--   since        time  Since when it has been so.
--   off_h        h     Hours of the range with CC off.
--   not_ready_h  h     Hours of the range with CC on and the cards not ready.
{% import "_parts.sql" as part with context %}
{% set clipped = "(" ~ part.least("until_ms", end_ms) ~ " - " ~ part.greatest("since_ms", start_ms) ~ ")" %}
{% macro cc(s) -%}
CASE WHEN NOT {{ s }}.cc_enabled THEN 'off' WHEN NOT {{ s }}.cc_ready THEN 'not ready' WHEN {{ s }}.cc_ready THEN 'ready' END
{%- endmacro %}
WITH said AS (
  SELECT s.cvm_id, s.since_ms, s.until_ms, {{ cc("s") }} AS cc,
    row_number() OVER (PARTITION BY s.cvm_id ORDER BY s.since_ms DESC, s.state_id DESC) AS nth
  FROM cvm_state AS s JOIN cvm ON cvm.cvm_id = s.cvm_id
  WHERE s.since_ms <= {{ as_of_ms }} AND s.until_ms >= {{ start_ms }} AND {{ cc("s") }} IS NOT NULL AND {{ cvm_where }}
),
summed AS (
  SELECT cvm_id, max(CASE WHEN nth = 1 THEN cc END) AS cc, max(CASE WHEN nth = 1 THEN since_ms END) AS newest_ms,
    {{ part.total("CASE cc WHEN 'off' THEN " ~ clipped ~ " ELSE 0 END") }} AS off_ms,
    {{ part.total("CASE cc WHEN 'not ready' THEN " ~ clipped ~ " ELSE 0 END") }} AS not_ready_ms
  FROM said
  GROUP BY cvm_id
  HAVING max(CASE cc WHEN 'ready' THEN 0 ELSE 1 END) = 1
),
begun AS (
  SELECT summed.*, (
    SELECT min(s.since_ms) FROM cvm_state AS s
    WHERE s.cvm_id = summed.cvm_id AND {{ cc("s") }} = summed.cc AND s.since_ms <= newest_ms AND s.since_ms > coalesce(
      (SELECT max(o.since_ms) FROM cvm_state AS o
       WHERE o.cvm_id = summed.cvm_id AND o.since_ms < newest_ms AND {{ cc("o") }} <> summed.cc), -1)
  ) AS since_ms
  FROM summed
)
SELECT cvm.vmm, cvm.vm_id, cvm.vm_name, cvm.app_id, begun.cc,
  {{ part.timestamp("begun.since_ms") }} AS since,
  {{ part.hours("off_ms") }} AS off_h,
  {{ part.hours("not_ready_ms") }} AS not_ready_h
FROM begun JOIN cvm ON cvm.cvm_id = begun.cvm_id
ORDER BY begun.cc, off_ms + not_ready_ms DESC, cvm.vmm, cvm.vm_id
