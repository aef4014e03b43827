-- Guests by the version of the guest API that they speak: who is to be upgraded.
--
-- Of CVMs that were polled within the range, as of its end; those that do not match this aggregator first.
--
-- columns:
--   schema_status  text  match, older, newer, drift, unversioned or unchecked; empty where it was not judged.
--   guest_schema   text  Version and fingerprint that the guest named last.
--   vmm            text  Name of the VMM.
--   vm_id          text  Id of the CVM.
--   vm_name        text  Its name.
--   app_id         text  Id of the app; empty for CVMs of none.
--   outcome        text  What its last poll came to.
--   last_polled    time  When that was; may lag by a minute.
{% import "_parts.sql" as part with context %}
SELECT s.schema_status, cvm.guest_schema, cvm.vmm, cvm.vm_id, cvm.vm_name, cvm.app_id, s.outcome,
  {{ part.timestamp(part.least("s.until_ms", as_of_ms)) }} AS last_polled
FROM cvm JOIN cvm_state AS s ON s.state_id = (
  SELECT x.state_id FROM cvm_state AS x
  WHERE x.cvm_id = cvm.cvm_id AND x.since_ms <= {{ as_of_ms }} AND x.schema_status IS NOT NULL
  ORDER BY x.since_ms DESC, x.state_id DESC LIMIT 1
)
WHERE s.until_ms >= {{ start_ms }} AND {{ cvm_where }}
ORDER BY CASE s.schema_status WHEN 'match' THEN 1 ELSE 0 END, s.schema_status, coalesce(cvm.guest_schema, ''), cvm.vmm, cvm.vm_id
