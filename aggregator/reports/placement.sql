-- Who had this card, or this slot, and when.
--
-- Every stay of a card in a place that touches the range.
--
-- columns:
--   gpu         text  A card's uuid; VMM, CVM and PCI address of one without.
--   vmm         text  Name of the VMM.
--   host_bdf    bdf   PCI address on the host, where it is known.
--   vm_id       text  Id of the CVM.
--   vm_name     text  Its name.
--   app_id      text  Id of the app; empty for CVMs of none.
--   first_seen  time  First sample there.
--   last_seen   time  Last poll that found it there; may lag by a minute.
{% import "_parts.sql" as part with context %}
WITH {{ part.stays() }}
SELECT gpu, vmm, host_bdf, vm_id, vm_name, app_id,
  {{ part.timestamp("first_ms") }} AS first_seen,
  {{ part.timestamp("last_ms") }} AS last_seen
FROM stay
WHERE own = 1 AND last_ms >= {{ start_ms }}
ORDER BY {{ "" if by_slot else "gpu, " }}first_ms, tenancy_id
