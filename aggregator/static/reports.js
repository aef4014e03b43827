// Reports: what each can be asked, its table, its rows as CSV, the command that prints its SQL.

import { api, query } from "./api.js";
import { bars } from "./charts.js";
import { ABSENT, h, isoTime, scrolling, shortUuid } from "./dom.js";
import { sorted } from "./overview.js";

const FILTERS = ["until", "uuid", "bdf", "host_bdf", "vmm", "vm_id", "app_id", "time_zone"];
// These are said by flags of their own.
const FLAGS = { since: "--since", until: "--until", time_zone: "--time-zone" };
const BY = ["gpu", "cvm", "app", "vmm", "day"];
const DECIMALS = { "%": 1, h: 2, GiB: 1, kWh: 3, W: 1 };

const isNumber = (unit) => !["text", "bdf", "day", "time"].includes(unit);

function cell(value, unit) {
  if (value === null) return ABSENT;
  if (unit === "text" && /^(GPU|MIG)-/.test(value)) return h("a", { href: query({ view: "card", uuid: value }), title: value }, h("code", {}, shortUuid(value)));
  if (unit === "time") return isoTime(value);
  if (unit === "bdf") return h("code", {}, value);
  if (unit === "%") return [h("meter", { min: "0", max: "100", value: String(value), "aria-hidden": "true" }), h("span", { class: "percent" }, value.toFixed(DECIMALS["%"]))];
  return typeof value === "number" && unit in DECIMALS ? value.toFixed(DECIMALS[unit]) : String(value);
}

/** RFC 4180. A text that a spreadsheet would take for a formula is put into quotes with an apostrophe in front. */
export function csv(reply) {
  const field = (value) => {
    const given = value === null ? "" : typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\r\n]/.test(given) ? `"${given.replaceAll('"', '""')}"` : given;
  };
  const names = reply.columns.map((column) => column.name);
  return [names, ...reply.rows.map((row) => names.map((name) => row[name]))].map((line) => `${line.map(field).join(",")}\n`).join("");
}

const quoted = (word) => (/^[\w.:/=+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

function command(name, values) {
  const words = ["gpu-aggregator", "report", name];
  for (const [key, value] of Object.entries(values)) words.push(...(FLAGS[key] ? [FLAGS[key], value] : ["--where", `${key}=${value}`]));
  return [...words, "--sql"].map(quoted).join(" ");
}

export async function reportsView(asked, go) {
  const { reports } = await api("reports");
  const report = reports.find((one) => one.name === asked.report);
  const links = h("nav", { class: "ranges", "aria-label": "Reports" }, reports.map((one) => h("a", { href: query({ view: "reports", report: one.name, since: asked.since }), title: one.purpose, "aria-current": one === report && "page" }, one.name)));
  if (!report) {
    return h("div", {}, h("h2", {}, "Reports"), links, h("section", {}, h("dl", {}, reports.flatMap((one) => [h("dt", {}, h("a", { href: query({ view: "reports", report: one.name }) }, one.name)), h("dd", {}, one.purpose)]))));
  }
  const known = report.parameters.map((parameter) => parameter.name);
  const values = Object.fromEntries(Object.entries(asked).filter(([name, value]) => known.includes(name) && value));
  const head = [h("h2", {}, `Report: ${report.name}`), links];
  const form = filters(report, values, go);
  let reply;
  try {
    reply = await api(`reports/${encodeURIComponent(report.name)}`, values);
  } catch (problem) {
    if (problem.status !== 400 && problem.code !== "too_slow") throw problem;
    return h("div", {}, head, h("section", {}, h("p", {}, report.purpose), form, h("p", { class: "error", role: "alert" }, problem.message)));
  }
  return h("div", {}, head, h("section", { "aria-label": report.name }, h("p", {}, report.purpose), h("p", { class: "soft" }, worded(report.remarks)), form, h("p", { class: "soft" }, about(reply)), chart(reply), rowsOf(reply), downloads(report, reply, values)));
}

/** Words between backticks are names. */
const worded = (remarks) => remarks.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));

function about(reply) {
  const made = { raw: "samples", "5m": "buckets of 5 minutes", "1h": "buckets of an hour" };
  return [`${isoTime(reply.start)} to ${isoTime(reply.end)}`, reply.resolutions.length ? `from ${reply.resolutions.map((one) => made[one]).join(" and ")}` : null,
    reply.newest ? `data up to ${isoTime(reply.newest)}` : "no data", reply.more ? `the first ${reply.rows.length} rows` : reply.rows.length === 1 ? "1 row" : `${reply.rows.length} rows`].filter(Boolean).join("; ");
}

function filters(report, values, go) {
  const input = (parameter) => {
    const { name, meaning } = parameter;
    const options = name === "by" ? BY : name === "since" ? ["24h", "7d", "30d", "90d", "365d"] : null;
    const given = values[name] ?? "";
    const choice = options
      ? h("select", { name, title: meaning }, [...new Set([...options, ...(given ? [given] : [])])].map((option) => h("option", { value: option, selected: option === (given || String(parameter.default ?? options[0])) }, option)))
      : h("input", { name, title: meaning, value: given, placeholder: parameter.default === null ? "" : String(parameter.default), autocomplete: "off" });
    return h("label", {}, name, choice);
  };
  const submit = (event) => {
    event.preventDefault();
    go(query({ view: "reports", report: report.name, ...Object.fromEntries(new FormData(event.target)) }));
  };
  const [rare, first] = [report.parameters.filter((one) => FILTERS.includes(one.name)), report.parameters.filter((one) => !FILTERS.includes(one.name))];
  const used = rare.some((one) => values[one.name]);
  return h("form", { onsubmit: submit }, h("div", { class: "filters" }, first.map(input), h("button", { type: "submit" }, "Show")),
    h("details", { open: used }, h("summary", {}, "Only some cards; another end or time zone"), h("div", { class: "filters" }, rare.map(input))));
}

/** A bar a day, where a row is a day: else a table says it better. */
function chart(reply) {
  const day = reply.columns.find((column) => column.unit === "day");
  const figure = reply.columns.find((column) => column.unit === "%") ?? reply.columns.find((column) => ["kWh", "h"].includes(column.unit));
  if (!day || !figure || reply.rows.length < 2) return null;
  return bars({ label: `${figure.name}, ${figure.unit}, by day`, values: reply.rows.map((row) => [String(row[day.name]).slice(5), row[figure.name]]), show: (value) => `${value} ${figure.unit}` });
}

function rowsOf(reply) {
  if (!reply.rows.length) return h("p", {}, "Nothing to show.");
  const body = h("tbody");
  let order = null, down = false;
  const draw = () => body.replaceChildren(...(order ? sorted(reply.rows, (row) => row[order], down) : reply.rows).map((row) => h("tr", {}, reply.columns.map(({ name, unit }) => h("td", { class: isNumber(unit) ? "n" : name === "detail" ? "wrap" : "name", title: unit === "text" && row[name] }, cell(row[name], unit))))));
  const heads = reply.columns.map(({ name, unit, meaning }) => h("th", { scope: "col", class: isNumber(unit) && "n", title: meaning }, h("button", { type: "button", onclick: (event) => {
    [order, down] = order === name ? [name, !down] : [name, isNumber(unit)];
    for (const head of heads) head.removeAttribute("aria-sort");
    event.currentTarget.parentElement.setAttribute("aria-sort", down ? "descending" : "ascending");
    draw();
  } }, isNumber(unit) && unit !== "count" ? `${name.replace(/_[^_]*$/, "").replaceAll("_", " ")} ${unit}` : name.replaceAll("_", " "))));
  draw();
  return scrolling(reply.report, h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
}

function downloads(report, reply, values) {
  const save = (event) => {
    const link = event.currentTarget;
    if (link.href.startsWith("blob:")) URL.revokeObjectURL(link.href);
    link.href = URL.createObjectURL(new Blob([csv(reply)], { type: "text/csv" }));
  };
  return h("div", {}, h("p", {}, h("a", { href: "#", download: `${report.name}.csv`, onclick: save }, "Download as CSV")),
    h("details", {}, h("summary", {}, "SQL"), h("p", {}, "This prints the statement, with all its values, for psql or sqlite3:"), h("pre", { tabindex: "0" }, h("code", {}, command(report.name, values)))));
}
