// The overview: figures, the heat map, the table of cards, the CVMs. It is built once and brought up to date in place.

import { query } from "./api.js";
import { cc, ccWord, celsius, gibOf, h, isoTime, percent, s, scrolling, shortUuid, span, state, table, text, watts } from "./dom.js";
import { byOutcome, byTrouble, filtered, isPast, KINDS, keyOf } from "./fleet.js";
import { HeatMap } from "./heatmap.js";

const AT_ONCE = 100;
const FIGURES = ["busy", "idle", "stale", "silent", "detached", "cc", "contested"];
const TROUBLE = new Set(["stale", "silent", "detached", "cc", "contested"]);

export const cardLink = (card, cvm, label) =>
  h("a", { href: card.uuid ? query({ view: "card", uuid: card.uuid }) : query({ view: "place", vmm: cvm.vmm, vm_id: cvm.vm_id, bdf: card.bdf }), title: card.uuid ?? "known by its place only" }, label ?? h("code", {}, shortUuid(card.uuid ?? card.bdf)));
export const cvmLink = (cvm) => h("a", { href: query({ view: "cvm", vmm: cvm.vmm, vm_id: cvm.vm_id }) }, cvm.vm_name ?? cvm.vm_id);
export const slotLink = (vmm, host) => (host ? h("a", { href: query({ view: "slot", vmm, host_bdf: host }) }, h("code", {}, host.replace(/^0000:/, ""))) : text(null));
/** An app, as a way to all its cards. */
export const appLink = (id) => (id ? h("a", { href: query({ q: id }), title: id }, h("code", {}, shortUuid(id))) : text(null));
const short = (bdf) => (bdf ? h("code", {}, bdf.replace(/^0000:/, "")) : text(null));

/** Bars of a line; where nothing is known there is a ground. */
function sparkline(line) {
  const wide = 96 / line.length;
  const at = (index) => Math.round(index * wide * 10) / 10;
  let d = "";
  const gaps = [];
  line.forEach((value, index) => {
    if (value === null) {
      const last = gaps.at(-1);
      if (last && last[1] === index) last[1] = index + 1;
      else gaps.push([index, index + 1]);
    } else {
      d += `M${at(index)},20V${20 - Math.max(1, Math.round(value / 5))}H${at(index + 1)}V20Z`;
    }
  });
  const known = line.filter((value) => value !== null);
  const words = known.length ? `average ${percent(known.reduce((sum, value) => sum + value, 0) / known.length)}` : "no data";
  return s("svg", { class: "spark", viewBox: "0 0 96 20", preserveAspectRatio: "none", role: "img", "aria-label": `last day: ${words}` },
    gaps.map(([from, to]) => s("rect", { x: at(from), y: 17, width: at(to) - at(from), height: 3 })), s("path", { d }));
}

export const utilization = (value) => (value === null ? percent(value) : [h("meter", { min: "0", max: "100", value: String(value), "aria-hidden": "true" }), h("span", { class: "percent" }, percent(value))]);

/** Of a card whose values are past without a bar, and with their age. */
const utilizationOf = (card) => (isPast(card) && card.utilization_gpu !== null ? `${percent(card.utilization_gpu)}, ${span(card.age_s)} ago` : utilization(card.utilization_gpu));

// Key, head, whether it is a number, what it is sorted by, what is shown.
const COLUMNS = [
  ["state", "State", false, (card) => card.state, (card) => state(card.state)],
  ["card", "Card", false, (card) => card.uuid, (card) => cardLink(card, card.cvm)],
  ["utilization", "Utilization", true, (card) => card.utilization_gpu, utilizationOf],
  ["day", "Last day", false, (card) => mean(card.line), (card) => sparkline(card.line)],
  ["cvm", "CVM", false, (card) => card.cvm.vm_name ?? card.cvm.vm_id, (card) => cvmLink(card.cvm)],
  ["host", "Host", false, (card) => card.cvm.vmm, (card) => card.cvm.vmm],
  ["slot", "Host address", false, (card) => card.host_bdf, (card) => slotLink(card.cvm.vmm, card.host_bdf)],
  ["memory", "Memory", true, (card) => card.memory_used_bytes, (card) => gibOf(card.memory_used_bytes, card.memory_total_bytes)],
  ["temperature", "Temp.", true, (card) => card.temperature_c, (card) => celsius(card.temperature_c)],
  ["power", "Power", true, (card) => card.power_usage_mw, (card) => watts(card.power_usage_mw)],
  ["age", "Age", true, (card) => card.age_s, (card) => span(card.age_s)],
  ["cc", "CC", false, (card) => ccWord(card.cvm), (card) => cc(card.cvm)],
  ["errors", "Errors", true, (card) => card.query_errors, (card) => (card.query_errors ? h("span", { class: "not-ok" }, String(card.query_errors)) : "0")],
  ["app", "App", false, (card) => card.cvm.app_id, (card) => appLink(card.cvm.app_id)],
  ["guest", "Guest address", false, (card) => card.bdf, (card) => short(card.bdf)],
];
const NAMES = new Set(["host", "cvm"]);

function mean(line) {
  const known = line.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** Absent last, whichever way. */
export function sorted(rows, value, down) {
  const valued = rows.map((row) => [value(row), row]);
  valued.sort(([a], [b]) => {
    if (a === null || a === undefined || b === null || b === undefined) return (a === null || a === undefined) - (b === null || b === undefined);
    const order = typeof a === "number" ? a - b : a < b ? -1 : a > b ? 1 : 0;
    return down ? -order : order;
  });
  return valued.map(([, row]) => row);
}

export class Overview {
  /** `change(values)` puts filters into the URL; `go(query)` opens another view. */
  constructor(change, go) {
    this.change = change;
    this.shown = AT_ONCE;
    this.cvmsShown = AT_ONCE;
    this.rows = new Map();
    this.heat = new HeatMap((card) => go(cardLink(card, card.cvm, "").getAttribute("href")));
    this.figures = h("ul", { class: "figures", "aria-label": "Figures; each shows its cards only" });
    const typed = (name) => (event) => { this.shown = AT_ONCE; change({ [name]: event.target.value }); };
    this.q = h("input", { type: "search", oninput: typed("q"), autocomplete: "off", placeholder: "uuid, name, address, app" });
    this.state = h("select", { onchange: typed("state") }, h("option", { value: "" }, "all"), Object.entries(KINDS).map(([key, [name]]) => h("option", { value: key }, name)));
    this.host = h("select", { onchange: typed("host") });
    this.count = h("p", { class: "soft", role: "status" });
    this.heads = h("tr", {}, COLUMNS.map(([key, name, numeric]) => h("th", { scope: "col", class: numeric && "n" }, h("button", { type: "button", onclick: () => this.sort(key) }, name))));
    this.body = h("tbody");
    this.table = scrolling("Cards", h("table", { class: "cards" }, h("thead", {}, this.heads), this.body));
    this.more = h("button", { type: "button", onclick: () => { this.shown += 4 * AT_ONCE; this.show(this.fleet, this.asked); } });
    this.cvms = h("div");
    this.cvmCount = h("p", { class: "soft" });
    this.empty = h("p", {});
    this.filters = h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
      h("label", { class: "wide" }, "Find", this.q), h("label", {}, "State", this.state), h("label", {}, "Host", this.host));
    this.element = h("div", {}, this.figures,
      h("section", { class: "heat", "aria-labelledby": "heat" }, h("div", { class: "head" }, h("h2", { id: "heat" }, "Utilization, last 24 hours"), this.heat.legend), this.heat.element),
      h("div", { class: "tables" },
        h("section", { "aria-labelledby": "cards" }, h("div", { class: "head" }, h("h2", { id: "cards" }, "Cards"), this.count), this.filters, this.empty, this.table, this.more),
        h("section", { "aria-labelledby": "cvms" }, h("div", { class: "head" }, h("h2", { id: "cvms" }, "CVMs"), this.cvmCount), this.cvms)));
  }

  sort(key) {
    const [before, down] = [this.asked.sort?.replace(/^-/, ""), this.asked.sort?.startsWith("-")];
    this.change({ sort: before !== key ? key : down ? "" : `-${key}` });
  }

  show(fleet, asked) {
    this.fleet = fleet;
    this.asked = asked;
    const cards = filtered(fleet.cards, asked);
    this.showFigures(fleet.cards, asked);
    if (document.activeElement !== this.q) this.q.value = asked.q ?? "";
    this.state.value = KINDS[asked.state] ? asked.state : "";
    const hosts = [...new Set(fleet.cvms.map((cvm) => cvm.vmm))].sort();
    if (this.hosts !== hosts.join("\n")) {
      this.hosts = hosts.join("\n");
      this.host.replaceChildren(h("option", { value: "" }, "all"), ...hosts.map((host) => h("option", { value: host }, host)));
    }
    this.host.value = asked.host ?? "";
    this.heat.show(fleet, cards);
    this.heat.element.parentElement.hidden = cards.length === 0;
    this.filters.hidden = fleet.cards.length === 0;
    this.figures.hidden = fleet.cvms.length === 0;
    this.showTable(cards, asked);
    this.showCvms(fleet.cvms, asked);
  }

  showFigures(cards, asked) {
    const figures = [["", "cards", cards.filter((card) => card.state !== "detached").length], ...FIGURES.map((key) => [key, KINDS[key][0], cards.filter(KINDS[key][1]).length])];
    if (!this.figures.childElementCount) {
      this.figures.append(...figures.map(([key]) => h("li", {}, h("button", { type: "button", onclick: () => { this.shown = AT_ONCE; this.change({ state: key }); } }, h("b", {}), h("span", {})))));
    }
    figures.forEach(([key, name, count], index) => {
      const button = this.figures.children[index].firstChild;
      button.firstChild.textContent = count;
      button.lastChild.textContent = name;
      button.setAttribute("aria-pressed", String((asked.state ?? "") === key));
      button.classList.toggle("trouble", TROUBLE.has(key) && count > 0);
      button.classList.toggle("none", count === 0);
    });
  }

  showTable(cards, asked) {
    const key = (asked.sort ?? "").replace(/^-/, ""), down = (asked.sort ?? "").startsWith("-");
    const column = COLUMNS.find(([name]) => name === key);
    COLUMNS.forEach(([name], index) => {
      if (name === key) this.heads.children[index].setAttribute("aria-sort", down ? "descending" : "ascending");
      else this.heads.children[index].removeAttribute("aria-sort");
    });
    const all = column ? sorted(cards, column[3], down) : byTrouble(cards);
    const shown = all.slice(0, this.shown);
    this.empty.textContent = this.fleet.cards.length ? "No card is like that: change the filters." : "No card has been seen yet.";
    this.empty.hidden = cards.length > 0;
    this.table.hidden = cards.length === 0;
    this.count.hidden = cards.length === 0;
    this.count.textContent = cards.length === shown.length ? `${cards.length} cards` : `${shown.length} of ${cards.length} cards`;
    this.more.hidden = shown.length === all.length;
    this.more.textContent = `Show ${Math.min(4 * AT_ONCE, all.length - shown.length)} more`;
    const rows = shown.map((card) => this.row(card));
    const known = new Set(shown.map(keyOf));
    for (const old of this.rows.keys()) if (!known.has(old)) this.rows.delete(old);
    if (rows.length !== this.body.children.length || rows.some((row, index) => this.body.children[index] !== row)) {
      const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
      this.body.replaceChildren(...rows);
      focused?.focus({ preventScroll: true });
    }
  }

  row(card) {
    const key = keyOf(card);
    const { cvm, age_s: age, ...own } = card;
    const said = JSON.stringify([own, isPast(card) && span(age), cvm.vm_name, cvm.vmm, cvm.vm_id, cvm.app_id, cvm.cc_enabled, cvm.cc_ready]);
    let known = this.rows.get(key);
    if (!known) {
      known = { row: h("tr", {}, COLUMNS.map(([name, , numeric]) => h("td", { class: numeric ? "n" : NAMES.has(name) ? "name" : null }))), said: "" };
      this.rows.set(key, known);
    }
    if (known.said !== said) {
      known.said = said;
      known.row.classList.toggle("past", isPast(card));
      COLUMNS.forEach(([, , , , cell], index) => {
        const place = known.row.children[index], focused = place.contains(document.activeElement);
        place.replaceChildren(...[cell(card)].flat());
        if (focused) place.firstElementChild?.focus({ preventScroll: true });
      });
    } else {
      known.row.children[COLUMNS.findIndex(([name]) => name === "age")].textContent = span(card.age_s);
    }
    return known.row;
  }

  showCvms(cvms, asked) {
    const found = cvms.filter((cvm) => (!asked.host || cvm.vmm === asked.host));
    const ordered = byOutcome(found).slice(0, this.cvmsShown);
    const said = JSON.stringify([ordered.map(({ cards: _, until: __, ...cvm }) => cvm), found.length]);
    if (said === this.cvmsSaid) return;
    this.cvmsSaid = said;
    this.cvmCount.hidden = !found.length;
    if (!found.length) return void this.cvms.replaceChildren(h("p", {}, "No CVM has been polled yet."), h("p", { class: "soft" }, "Those of each ", h("code", {}, "--vmm"), " are asked within an interval of the aggregator's start; ", h("code", {}, "gpu-aggregator poll"), " asks at once and says what comes back."));
    this.cvmCount.textContent = `${ordered.length} of ${found.length} CVMs, those in trouble first, those that do not run last`;
    const rows = ordered.map((cvm) => h("tr", {}, h("td", {}, state(cvm.outcome)), h("td", { class: "name" }, cvmLink(cvm)), h("td", { class: "name" }, cvm.vmm),
      h("td", { class: "n" }, String(cvm.gpus)), h("td", {}, isoTime(cvm.since)), h("td", {}, cc(cvm)), h("td", {}, text(cvm.schema_status)),
      h("td", {}, appLink(cvm.app_id)), h("td", { class: "wrap" }, cvm.detail ?? "")));
    const more = h("button", { type: "button", onclick: () => { this.cvmsShown += 4 * AT_ONCE; this.showCvms(this.fleet.cvms, this.asked); } }, "Show more");
    more.hidden = ordered.length === found.length;
    this.cvms.replaceChildren(table("CVMs", [["Outcome"], ["CVM"], ["Host"], ["Cards", true], ["Since"], ["CC"], ["Schema"], ["App"], ["Detail"]], rows), more);
  }
}
