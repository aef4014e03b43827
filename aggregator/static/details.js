// A card, a slot of a host, a place in a CVM: history over a range, who was there, what failed. And a CVM.

import { api, query } from "./api.js";
import { Instant, strip, timeChart, width } from "./charts.js";
import { cc, celsius, dateTime, facts, gib, gibOf, h, isoTime, percent, span, state, table, text, watts } from "./dom.js";
import { isPast, stateIn } from "./fleet.js";
import { appLink, cardLink, cvmLink, slotLink, utilization } from "./overview.js";

const H = 3_600_000, D = 24 * H;
export const RANGES = { "1h": H, "6h": 6 * H, "24h": D, "7d": 7 * D, "30d": 30 * D, "90d": 90 * D, "1y": 365 * D };
const LEAST_MS = 60_000;

/** `of`: from the field to the unit; a figure has so many digits behind the point. */
function unit(name, of, digits) {
  const figure = (value) => of(value).toFixed(digits);
  return { name, of, band: (mean, least, greatest) => `average ${figure(mean)}, ${figure(least)} to ${figure(greatest)}${name}` };
}

const CHARTS = [
  ["utilization_gpu", "Utilization", unit(" %", (value) => value, 0), percent],
  ["memory_used_bytes", "Memory", unit(" GiB", (value) => value / 2 ** 30, 1), gib],
  ["temperature_c", "Temperature", unit(" °C", (value) => value, 0), celsius],
  ["power_usage_mw", "Power", unit(" W", (value) => value / 1000, 0), watts],
];

/** {startMs, endMs} of what the URL says. */
export function rangeOf(asked, nowMs = Date.now()) {
  const from = Date.parse(asked.from), to = Date.parse(asked.to);
  if (from < to) return { startMs: from, endMs: to, fixed: true };
  return { startMs: nowMs - (RANGES[asked.range] ?? D), endMs: nowMs, fixed: false };
}

const iso = (ms) => new Date(ms).toISOString().replace(/\.\d+Z$/, "Z");

/** Buttons of ranges; what a drag chose is undone by any of them. */
function ranges(asked, range) {
  const chosen = range.fixed ? null : RANGES[asked.range] ? asked.range : "24h";
  const links = Object.keys(RANGES).map((name) => h("a", { href: query({ ...asked, range: name, from: null, to: null }), "aria-current": chosen === name && "true" }, name));
  const half = (range.endMs - range.startMs) / 2;
  const out = h("a", { href: query({ ...asked, range: null, from: iso(range.startMs - half), to: iso(Math.min(Date.now(), range.endMs + half)) }) }, "zoom out");
  return h("nav", { class: "ranges", "aria-label": "Range" }, links, out, h("span", { class: "soft" }, `${dateTime(range.startMs)} to ${dateTime(range.endMs)}`));
}

function zooming(asked, go) {
  return (fromMs, toMs) => {
    const middle = (fromMs + toMs) / 2, half = Math.max(LEAST_MS / 2, (toMs - fromMs) / 2);
    go(query({ ...asked, range: null, from: iso(Math.max(0, middle - half)), to: iso(Math.min(Date.now() + LEAST_MS, middle + half)) }));
  };
}

const SOURCES = { raw: "samples", "5m": "buckets of 5 minutes", "1h": "buckets of an hour" };

/** `card`: the card whose history it is, where it is of one. */
function charts(history, zoom, card = null) {
  const range = { startMs: Date.parse(history.start), endMs: Date.parse(history.end), stepMs: history.step_s * 1000 };
  const instant = new Instant(range, history.points.map((point) => Date.parse(point.at)));
  const ceilings = { utilization_gpu: 100, memory_used_bytes: card?.memory_total_bytes ? card.memory_total_bytes / 2 ** 30 : null };
  const figures = CHARTS.map(([field, title, unit, show]) => timeChart({
    title, unit, range, show, ceiling: ceilings[field], zoom, instant,
    points: history.points.map((point) => ({ at: Date.parse(point.at), ...point[field] })),
  }));
  return { range, element: h("section", { "aria-labelledby": "history" }, h("h2", { id: "history" }, "History"),
    h("p", { class: "soft" }, `A point is ${width(history.step_s)}, from ${SOURCES[history.resolution]}: the average, in a band from least to greatest. Drag to zoom.`),
    h("div", { class: "charts" }, figures), instant.output, instant.help) };
}

/** The stays of a history, as lanes. `by` names a lane, `name` a stay. */
function tenancy(title, stays, range, zoom, by, name, cells, heads) {
  const lanes = new Map();
  const names = [];
  for (const stay of [...stays].reverse()) {
    const lane = by(stay), label = name(stay);
    if (!names.includes(label)) names.push(label);
    if (!lanes.has(lane)) lanes.set(lane, []);
    lanes.get(lane).push({ fromMs: Date.parse(stay.first_seen), toMs: Date.parse(stay.last_seen), name: label, kind: names.indexOf(label) % 2 ? "other" : "",
      title: `${label}: ${isoTime(stay.first_seen)} to ${isoTime(stay.last_seen)}` });
  }
  const rows = stays.map((stay) => h("tr", {}, cells(stay).map((cell) => h("td", { class: "name" }, cell)), h("td", {}, isoTime(stay.first_seen)), h("td", {}, isoTime(stay.last_seen))));
  return h("section", { "aria-labelledby": "stays" }, h("h2", { id: "stays" }, title),
    stays.length ? [strip({ label: title, range, zoom, lanes: [...lanes].map(([lane, segments]) => ({ name: lanes.size > 1 ? lane : "", segments })) }),
      table(title, [...heads.map((head) => [head]), ["First seen"], ["Last seen"]], rows)] : h("p", {}, "Nobody in this range."));
}

const historyOf = (path, place, range) => api(path, { ...place, start: iso(range.startMs), end: iso(range.endMs), fields: CHARTS.map(([field]) => field).join(",") });

const inCvm = (stay) => stay.vm_name ?? stay.vm_id;

export async function cardView(asked, go) {
  const range = rangeOf(asked), zoom = zooming(asked, go);
  const path = `gpus/${encodeURIComponent(asked.uuid ?? "")}`;
  const [card, history, errors] = await Promise.all([
    api(path), historyOf(`${path}/history`, {}, range),
    api("reports/errors", { uuid: asked.uuid, since: iso(range.startMs), until: iso(range.endMs) }),
  ]);
  const now = card.latest;
  if (now?.state === "silent") now.state = stateIn(await api(`cvms/${encodeURIComponent(now.vm_id)}`, { vmm: now.vmm }), now.state);
  const drawn = charts(history, zoom, now);
  const failures = errors.rows.map((row) => h("tr", {}, h("td", {}, row.kind), h("td", {}, isoTime(row.since)), h("td", {}, isoTime(row.until)), h("td", { class: "wrap" }, text(row.detail))));
  return h("div", {}, h("h2", {}, "Card ", h("code", {}, card.uuid)),
    h("section", { "aria-label": "Now" }, now
      ? facts(isPast(now) ? "tiles past" : "tiles", [["State", [state(now.state), h("small", { class: "soft" }, ` ${span(now.age_s)} ago`)]], ["Utilization", utilization(now.utilization_gpu)], ["Memory", gibOf(now.memory_used_bytes, now.memory_total_bytes)],
        ["Temperature", celsius(now.temperature_c)], ["Power", watts(now.power_usage_mw)], ["CC", cc(now)], ["Errors", now.query_errors ? h("span", { class: "not-ok" }, String(now.query_errors)) : "0"]])
      : h("p", {}, "It is elsewhere now."),
      facts("facts", [
        ...(now ? [["CVM", cvmLink(now)], ["Host", now.vmm], ["Host address", [slotLink(now.vmm, now.host_bdf), now.host_bdf_source ? ` (${now.host_bdf_source})` : ""]], ["Guest address", text(now.bdf)], ["App", appLink(now.app_id)], ["Model", text(now.model)]] : []),
        ["First seen", isoTime(card.first_seen)], ["Last seen", isoTime(card.last_seen)]])),
    ranges(asked, range), drawn.element,
    tenancy("Tenancy", history.stays, drawn.range, zoom, () => "", inCvm, (stay) => [cvmLink(stay), stay.vmm, slotLink(stay.vmm, stay.host_bdf), text(stay.bdf), appLink(stay.app_id)], ["CVM", "Host", "Host address", "Guest address", "App"]),
    h("section", { "aria-labelledby": "errors" }, h("h2", { id: "errors" }, "Errors in this range"),
      failures.length ? table("Errors", [["What cannot be read"], ["Since"], ["Until"], ["The guest's last words"]], failures) : h("p", {}, "None.")));
}

/** A slot of a host, or a place in a CVM: whichever cards sat there. */
export async function placeView(asked, go) {
  const range = rangeOf(asked), zoom = zooming(asked, go);
  const host = asked.view === "slot";
  const place = host ? { vmm: asked.vmm, host_bdf: asked.host_bdf } : { vmm: asked.vmm, vm_id: asked.vm_id, bdf: asked.bdf };
  const history = await historyOf("history", place, range);
  const drawn = charts(history, zoom);
  const title = host ? `Slot ${asked.host_bdf} of host ${asked.vmm}` : `Place ${asked.bdf} of CVM ${asked.vm_id}`;
  return h("div", {}, h("h2", {}, title), ranges(asked, range),
    tenancy("Cards that sat here", history.stays, drawn.range, zoom, (stay) => (stay.uuid ?? "unknown").slice(0, 8), (stay) => `${stay.uuid ?? "unknown card"} in ${inCvm(stay)}`,
      (stay) => [stay.uuid ? cardLink(stay, stay) : "unknown", cvmLink(stay), text(stay.host_bdf), text(stay.bdf)], ["Card", "CVM", "Host address", "Guest address"]),
    drawn.element);
}

const VERDICTS = {
  match: "speaks our schema", older: "speaks an older schema", newer: "speaks a newer schema", drift: "claims our version with another shape",
  unversioned: "names no schema", unchecked: "is not checked",
};

export async function cvmView(asked, go) {
  const range = rangeOf({ range: "7d", ...asked });
  const zoom = zooming(asked, go);
  const cvm = await api(`cvms/${encodeURIComponent(asked.vm_id ?? "")}`, { vmm: asked.vmm });
  const segments = cvm.stretches.map((stretch) => {
    const fine = (stretch.outcome === "ok" || stretch.outcome === "no_gpu") && stretch.cc_ready !== false;
    const name = stretch.cc_ready === false ? `${stretch.outcome}, CC not ready` : stretch.outcome;
    return { fromMs: Date.parse(stretch.since), toMs: Date.parse(stretch.until), name, kind: fine ? "" : stretch.outcome === "not_running" ? "other" : "trouble", title: `${name}: ${isoTime(stretch.since)} to ${isoTime(stretch.until)}` };
  }).filter((segment) => segment.toMs >= range.startMs && segment.fromMs < range.endMs);
  for (const card of cvm.cards) card.state = stateIn(cvm, card.state);
  const cards = cvm.cards.map((card) => h("tr", { class: isPast(card) && "past" }, h("td", {}, state(card.state)), h("td", {}, cardLink(card, cvm)), h("td", {}, text(card.bdf)), h("td", {}, slotLink(cvm.vmm, card.host_bdf)),
    h("td", { class: "n" }, percent(card.utilization_gpu)), h("td", { class: "n" }, gibOf(card.memory_used_bytes, card.memory_total_bytes)), h("td", { class: "n" }, celsius(card.temperature_c)), h("td", { class: "n" }, watts(card.power_usage_mw)), h("td", { class: "n" }, span(card.age_s))));
  const stretches = cvm.stretches.map((stretch) => h("tr", {}, h("td", {}, state(stretch.outcome)), h("td", {}, isoTime(stretch.since)), h("td", {}, isoTime(stretch.until)), h("td", {}, text(stretch.schema_status)),
    h("td", {}, cc(stretch)), h("td", { class: "wrap" }, stretch.detail ?? "")));
  return h("div", {}, h("h2", {}, "CVM ", cvm.vm_name ?? cvm.vm_id),
    h("section", { "aria-label": "Now" },
      facts("tiles", [["Outcome", state(cvm.outcome)], ["Since", isoTime(cvm.since)], ["Last poll like this", isoTime(cvm.until)], ["CC", cc(cvm)]]),
      cvm.detail ? h("p", { class: "said" }, cvm.detail) : null,
      facts("facts", [["Host", cvm.vmm], ["Schema", cvm.schema_status ? `${cvm.schema_status}: its agent ${VERDICTS[cvm.schema_status] ?? ""}` : text(null)],
        ["VM id", h("code", {}, cvm.vm_id)], ["App", appLink(cvm.app_id)], ["Instance", h("code", {}, text(cvm.instance_id))]])),
    h("section", { "aria-labelledby": "its-cards" }, h("h2", { id: "its-cards" }, "Cards"),
      cards.length ? table("Cards", [["State"], ["Card"], ["Guest address"], ["Host address"], ["Utilization", true], ["Memory", true], ["Temp.", true], ["Power", true], ["Age", true]], cards) : h("p", {}, "None.")),
    ranges(asked.range || asked.from ? asked : { ...asked, range: "7d" }, range),
    h("section", { "aria-labelledby": "stretches" }, h("h2", { id: "stretches" }, "Outcomes of its polls"),
      segments.length ? strip({ label: "Outcomes", range, zoom, lanes: [{ name: "", segments }] }) : h("p", {}, "None in this range."),
      stretches.length ? table("Stretches, newest first", [["Outcome"], ["Since"], ["Until"], ["Schema"], ["CC"], ["Detail"]], stretches) : null));
}
