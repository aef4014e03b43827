-- What is silent: CVMs that do not answer, cards that their CVM no longer shows, since when and why.
--
-- As of the end of the range, of what was still asked within it. `silent`: polls of the CVM fail; `gone`: its VMM does not run it
-- any more; `not polled`: nobody asks; `detached`: the CVM answers without this card; `stale`: it answers with an old measurement
-- of it.
--
-- columns:
--   state         text   silent, gone, not polled, detached or stale.
--   vmm           text   Name of the VMM.
--   vm_id         text   Id of the CVM.
--   vm_name       text   Its name.
--   app_id        text   Id of the app; empty for CVMs of none.
--   gpu           text   The card, where the CVM itself answers.
--   cards         count  Cards that are concerned.
--   silent_since  time   Last sign of life.
--   outcome       text   Outcome of the CVM's last poll.
--   detail        text   The reason that was given.
{% import "_parts.sql" as part with context %}
WITH {{ part.stays() }},
newest AS (
  SELECT cvm.cvm_id, cvm.vmm, cvm.vm_id, cvm.vm_name, cvm.app_id, s.outcome, s.detail, s.since_ms,
    {{ part.least("s.until_ms", as_of_ms) }} AS until_ms
  FROM cvm JOIN cvm_state AS s ON s.state_id = (
    SELECT x.state_id FROM cvm_state AS x WHERE x.cvm_id = cvm.cvm_id AND x.since_ms <= {{ as_of_ms }}
    ORDER BY x.since_ms DESC, x.state_id DESC LIMIT 1
  )
  WHERE s.until_ms >= {{ start_ms }} AND {{ cvm_where }}
),
judged AS (
  SELECT n.*,
    CASE
      WHEN n.outcome = 'not_running' THEN 'gone'
      WHEN n.outcome NOT IN ('ok', 'no_gpu', 'contested') AND n.until_ms >= {{ as_of_ms - failing_ms }} THEN 'silent'
      WHEN n.until_ms < {{ as_of_ms }} - CASE n.outcome WHEN 'no_gpu' THEN {{ hourly_ms }} WHEN 'ok' THEN {{ stale_ms }}
        WHEN 'contested' THEN {{ stale_ms }} ELSE {{ failing_ms }} END THEN 'not polled'
    END AS state,
    coalesce(
      (SELECT max({{ part.least("x.until_ms", as_of_ms) }}) FROM cvm_state AS x
       WHERE x.cvm_id = n.cvm_id AND x.since_ms <= n.since_ms AND x.outcome IN ('ok', 'no_gpu', 'contested')),
      (SELECT min(x.since_ms) FROM cvm_state AS x WHERE x.cvm_id = n.cvm_id)
    ) AS heard_ms
  FROM newest AS n
),
found AS (
  SELECT j.state, j.cvm_id, CAST(NULL AS text) AS gpu,
    (SELECT count(DISTINCT g.card_id) FROM tenancy AS t JOIN gpu AS g ON g.gpu_id = t.gpu_id
     WHERE t.cvm_id = j.cvm_id AND t.last_seen_ms >= j.heard_ms - {{ stale_ms }} AND t.first_seen_ms <= j.heard_ms) AS cards,
    j.heard_ms AS since_ms
  FROM judged AS j
  WHERE j.state IS NOT NULL AND j.outcome <> 'no_gpu'
  UNION ALL
  SELECT CASE WHEN stay.last_ms < j.until_ms - {{ stale_ms }} THEN 'detached' ELSE 'stale' END, j.cvm_id, stay.gpu, 1,
    CASE WHEN stay.last_ms < j.until_ms - {{ stale_ms }} THEN stay.last_ms ELSE stay.latest_ms END
  FROM judged AS j JOIN stay ON stay.cvm_id = j.cvm_id AND stay.own = 1
  WHERE j.state IS NULL
    AND (stay.last_ms < j.until_ms - {{ stale_ms }} OR stay.latest_ms < {{ as_of_ms - stale_ms }})
    -- It was seen nowhere since, and at a place without uuid nothing else was.
    AND NOT EXISTS (
      SELECT 1 FROM tenancy AS later JOIN gpu AS other ON other.gpu_id = later.gpu_id
      WHERE later.first_seen_ms > stay.first_ms AND later.first_seen_ms <= {{ as_of_ms }}
        AND ((stay.uuid IS NOT NULL AND other.card_id = stay.card_id AND later.gpu_id = stay.card_id)
          OR (stay.uuid IS NULL AND later.cvm_id = stay.cvm_id AND later.bdf = stay.bdf))
    )
)
SELECT f.state, j.vmm, j.vm_id, j.vm_name, j.app_id, f.gpu, f.cards,
  {{ part.timestamp("f.since_ms") }} AS silent_since,
  j.outcome, {{ "NULL" if scoped else "j.detail" }} AS detail
FROM found AS f JOIN judged AS j ON j.cvm_id = f.cvm_id
ORDER BY f.since_ms, j.vmm, j.vm_id, coalesce(j.app_id, ''), coalesce(f.gpu, '')
