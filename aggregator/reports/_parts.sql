{# What the reports are put together from. `pieces` says which part of the time comes from which resolution, `spans` which times
   make a row each: the whole range, or its days. Figures are integers up to the last step, which is one division: so both
   databases agree on every digit, and rows add up to what their sum is asked for. Rounding is for who shows them. #}

{% set sample_columns = "s.gpu_id, s.tenancy_id, s.sampled_at_ms, s.utilization_gpu, s.power_usage_mw, s.memory_used_bytes,
          s.memory_total_bytes, 1 AS is_sample" %}
{% set of_buckets = {
  "busy_ms": busy_time,
  "idle_ms": idle_time,
  "utilization_sum": "s.utilization_gpu_sum",
  "utilization_count": "s.utilization_gpu_count",
  "utilization_max": "s.utilization_gpu_max",
  "energy_uj": "s.energy_uj",
  "powered_ms": "CASE WHEN s.energy_uj IS NOT NULL THEN s.covered_ms END",
  "memory_max": "s.memory_used_bytes_max",
  "memory_total_max": "s.memory_total_bytes_max",
  "memory_last": "s.memory_used_bytes_last",
  "last_ms": "s.last_ms",
} %}
{% set of_samples = {
  "busy_ms": "CASE WHEN s.utilization_gpu > " ~ busy_above ~ " THEN s.spoken_ms ELSE 0 END",
  "idle_ms": "CASE WHEN s.utilization_gpu <= " ~ busy_above ~ " THEN s.spoken_ms ELSE 0 END",
  "utilization_sum": "s.utilization_gpu",
  "utilization_count": "CASE WHEN s.utilization_gpu IS NOT NULL THEN 1 ELSE 0 END",
  "utilization_max": "s.utilization_gpu",
  "energy_uj": "s.power_usage_mw * s.spoken_ms",
  "powered_ms": "CASE WHEN s.power_usage_mw IS NOT NULL THEN s.spoken_ms END",
  "memory_max": "s.memory_used_bytes",
  "memory_total_max": "s.memory_total_bytes",
  "memory_last": "CASE WHEN s.nth_last = 1 THEN s.memory_used_bytes END",
  "last_ms": "s.sampled_at_ms",
} %}

{% macro least(one, other) %}{{ "min" if dialect == "sqlite" else "least" }}({{ one }}, {{ other }}){% endmacro %}

{% macro greatest(one, other) %}{{ "max" if dialect == "sqlite" else "greatest" }}({{ one }}, {{ other }}){% endmacro %}

{% macro total(value) %}CAST(sum({{ value }}) AS bigint){% endmacro %}

{% macro timestamp(ms) %}{{ timestamp_of.format(ms=ms) }}{% endmacro %}

{% macro ratio(above, below) %}CAST({{ above }} AS double precision) / nullif({{ below }}, 0){% endmacro %}

{% macro percent(part, whole) %}{{ ratio("100 * " ~ part, whole) }}{% endmacro %}

{% macro hours(ms) %}CAST({{ ms }} AS double precision) / 3600000{% endmacro %}

{% macro gib(bytes) %}CAST({{ bytes }} AS double precision) / 1073741824{% endmacro %}

{% macro values(rows) %}VALUES {% for row in rows %}({{ row | join(", ") }}){{ ", " if not loop.last }}{% endfor %}{% endmacro %}

{# Stays that touch the range. Of a card that was kept under its place until its uuid was known the stays of both are here; the
   card's `own` covers the other. #}
{% macro stays(name="stay") -%}
{{ name }} AS (
  SELECT t.tenancy_id, t.gpu_id, card.gpu_id AS card_id, card.uuid,
    coalesce(card.uuid, cvm.vmm || '/' || cvm.vm_id || '/' || t.bdf) AS gpu, card.model,
    cvm.cvm_id, cvm.vmm, cvm.vm_id, cvm.vm_name, cvm.app_id, t.bdf, t.host_bdf,
    CASE WHEN t.gpu_id = card.gpu_id THEN 1 ELSE 0 END AS own,
    t.first_seen_ms AS first_ms, {{ greatest("t.last_seen_ms", "coalesce(l.polled_at_ms, t.last_seen_ms)") }} AS last_ms,
    l.sampled_at_ms AS latest_ms
  FROM tenancy AS t
  JOIN cvm ON cvm.cvm_id = t.cvm_id
  JOIN gpu AS kept_under ON kept_under.gpu_id = t.gpu_id
  JOIN gpu AS card ON card.gpu_id = kept_under.card_id
  LEFT JOIN gpu_latest AS l ON l.gpu_id = t.gpu_id AND l.tenancy_id = t.tenancy_id
  WHERE t.first_seen_ms < {{ end_ms }} AND t.last_seen_ms >= {{ start_ms - stay_lag_ms }} AND {{ where }}
)
{%- endmacro %}

{% macro spanned() -%}
span (span, name, from_ms, to_ms) AS ({{ values(spans) }})
{%- endmacro %}

{# What `keys` are of, whatever they are: each stay in each span, with its usage where there is any. #}
{% macro usage_of_stays() -%}
stay
  JOIN span ON stay.first_ms < span.to_ms AND stay.last_ms >= span.from_ms - {{ stay_lag_ms }}
  LEFT JOIN usage AS u ON u.tenancy_id = stay.tenancy_id AND u.span = span.span
  WHERE u.tenancy_id IS NOT NULL OR stay.last_ms >= span.from_ms
{%- endmacro %}

{% macro each(figures, of) -%}
{% for name in figures %}, {{ of[name] }} AS {{ name }}{% endfor %}
{%- endmacro %}

{% macro summed(figures) -%}
{% for name in figures %}, {% if name.endswith("_max") or name in ("last_ms", "memory_last") -%}
max({{ name }}){% else %}{{ total(name) }}{% endif %} AS {{ name }}{% endfor %}
{%- endmacro %}

{% macro within_tail(time) %}{{ time }} >= {{ tail_ms - stale_ms }} AND {{ time }} < {{ end_ms }}{% endmacro %}

{# `usage`: figures by stay and span, or also by bucket of `bucket_ms`: from what is rolled up, and of what is not yet, from samples. A
   sample speaks for the time since the one before it in its stay, at most until a card without news is stale: as for a bucket.
   A card after the other: SQLite has no other way to a time. `found` has the same, not summed up. #}
{% macro usage(figures, bucket_ms=0) -%}
{% for level in pieces %}
piece_{{ level }} (span, from_ms, to_ms) AS ({{ values(pieces[level]) }}),
{% endfor %}
found AS (
{% for level in pieces if level != "raw" %}
  SELECT p.span, s.tenancy_id{% if bucket_ms %}, s.bucket_ms / {{ bucket_ms }} * {{ bucket_ms }} AS bucket_ms{% endif %}
    {{- each(figures, of_buckets) }}
  FROM (SELECT DISTINCT gpu_id FROM stay) AS card
  CROSS JOIN piece_{{ level }} AS p
  JOIN gpu_{{ level }} AS s ON s.gpu_id = card.gpu_id AND s.bucket_ms >= p.from_ms AND s.bucket_ms < p.to_ms
  {% if dialect != "sqlite" %}
    {# Which partitions are looked at; SQLite would look there, and leave out what is of other pieces. #}
    AND s.bucket_ms >= {{ pieces[level][0][1] }} AND s.bucket_ms < {{ pieces[level][-1][2] }}
  {% endif %}
  {% if not loop.last or "raw" in pieces %}
  UNION ALL
  {% endif %}
{% endfor %}
{% if "raw" in pieces %}
  SELECT p.span, s.tenancy_id{% if bucket_ms %}, s.sampled_at_ms / {{ bucket_ms }} * {{ bucket_ms }} AS bucket_ms{% endif %}
    {{- each(figures, of_samples) }}
  FROM (
    SELECT f.*, {{ least(greatest("f.sampled_at_ms - coalesce(f.before_ms, stay.first_ms)", 0), stale_ms) }} AS spoken_ms
      {%- if "memory_last" in figures %},
      row_number() OVER (PARTITION BY f.tenancy_id, f.sampled_at_ms / {{ bucket_ms }} ORDER BY f.sampled_at_ms DESC) AS nth_last
      {%- endif %}

    FROM (
      SELECT e.*, lag(e.sampled_at_ms) OVER (PARTITION BY e.gpu_id, e.tenancy_id ORDER BY e.sampled_at_ms)
        AS before_ms
      FROM (
        SELECT {{ sample_columns }}
        FROM (SELECT DISTINCT gpu_id FROM stay) AS card
        CROSS JOIN gpu_sample AS s
        WHERE s.gpu_id = card.gpu_id AND {{ within_tail("s.sampled_at_ms") }}
        {% if dialect == "sqlite" %}
        UNION ALL
        SELECT {{ sample_columns }}
        FROM {{ hot }} AS s
        WHERE s.gpu_id IN (SELECT gpu_id FROM stay) AND {{ within_tail("s.sampled_at_ms") }}
        {% endif %}
        UNION ALL
        SELECT s.gpu_id, s.tenancy_id, s.last_ms, NULL, NULL, NULL, NULL, NULL
        FROM (SELECT DISTINCT gpu_id FROM stay) AS card
        CROSS JOIN gpu_5m AS s
        WHERE s.gpu_id = card.gpu_id AND s.bucket_ms >= {{ tail_ms - stale_ms - 300000 }} AND s.bucket_ms < {{ tail_ms }}
          AND s.last_ms >= {{ tail_ms - stale_ms }}
      ) AS e
    ) AS f
    JOIN stay ON stay.tenancy_id = f.tenancy_id
    WHERE f.is_sample IS NOT NULL AND f.sampled_at_ms >= {{ tail_ms }}
  ) AS s
  JOIN piece_raw AS p ON s.sampled_at_ms >= p.from_ms AND s.sampled_at_ms < p.to_ms
{% endif %}
),
usage AS (
  SELECT span, tenancy_id{{ ", bucket_ms" if bucket_ms }}{{ summed(figures) }}
  FROM found
  GROUP BY span, tenancy_id{{ ", bucket_ms" if bucket_ms }}
)
{%- endmacro %}
