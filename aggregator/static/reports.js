// Reports: what each can be asked, its table, its rows as CSV, its SQL.

import { api, apiText, Problem, query, token } from "./api.js";
import { bars } from "./charts.js";
import { ABSENT, h, isoTime, scrolling, shortUuid } from "./dom.js";
import { appLink, cvmLink, slotLink, sorted } from "./overview.js";

const FILTERS = ["until", "uuid", "bdf", "host_bdf", "vmm", "vm_id", "app_id", "time_zone"];
const BY = ["gpu", "cvm", "app", "vmm", "day"];
const DECIMALS = { "%": 1, h: 2, GiB: 1, kWh: 3, W: 1 };

const isNumber = (unit) => !["text", "bdf", "day", "time"].includes(unit);

const spaced = (name) => name.replaceAll("_", " ");

function cell(row, name, unit) {
  const value = row[name];
  if (value === null) return ABSENT;
  if ((name === "vm_id" || name === "vm_name") && row.vm_id && row.vmm) return cvmLink({ vmm: row.vmm, vm_id: row.vm_id, vm_name: name === "vm_id" ? shortUuid(value) : value });
  if (name === "app_id") return appLink(value);
  if (name === "host_bdf" && row.vmm) return slotLink(row.vmm, value);
  if (unit === "text" && /^(GPU|MIG)-/.test(value)) return h("a", { href: query({ view: "card", uuid: value }), title: value }, h("code", {}, shortUuid(value)));
  if (unit === "time") return isoTime(value);
  if (unit === "bdf") return h("code", {}, value);
  if (unit === "%") return [h("meter", { min: "0", max: "100", value: String(value), "aria-hidden": "true" }), h("span", { class: "percent" }, value.toFixed(DECIMALS["%"]))];
  return typeof value === "number" && unit in DECIMALS ? value.toFixed(DECIMALS[unit]) : String(value);
}

export async function reportsView(asked, go) {
  const { reports } = await api("reports");
  const report = reports.find((one) => one.name === asked.report);
  const links = h("nav", { class: "ranges", "aria-label": "Reports" }, reports.map((one) => h("a", { href: query({ view: "reports", report: one.name, since: asked.since }), title: one.purpose, "aria-current": one === report && "page" }, one.name)));
  if (!report) {
    return h("div", {}, h("h2", {}, "Reports"), h("section", {}, h("dl", { class: "index" }, reports.map((one) => h("div", {}, h("dt", {}, h("a", { href: query({ view: "reports", report: one.name }) }, one.name)), h("dd", {}, one.purpose))))));
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
  return h("div", {}, head, h("section", { "aria-label": report.name }, h("p", {}, report.purpose), h("p", { class: "soft" }, worded(report.remarks)), form, h("p", { class: "soft" }, about(reply)), chart(reply), rowsOf(reply), downloads(report, values)));
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
    return h("label", {}, spaced(name), choice);
  };
  const submit = (event) => {
    event.preventDefault();
    go(query({ view: "reports", report: report.name, ...Object.fromEntries(new FormData(event.target)) }));
  };
  const [rare, first] = [report.parameters.filter((one) => FILTERS.includes(one.name)), report.parameters.filter((one) => !FILTERS.includes(one.name))];
  const used = rare.some((one) => values[one.name]);
  return h("form", { onsubmit: submit }, h("div", { class: "filters" }, first.map(input), h("button", { type: "submit" }, "Show")),
    h("details", { open: used }, h("summary", {}, "More filters"), h("div", { class: "filters" }, rare.map(input))));
}

/** A bar a day, where a row is a day: else a table says it better. */
function chart(reply) {
  const day = reply.columns.find((column) => column.unit === "day");
  const figure = reply.columns.find((column) => column.unit === "%") ?? reply.columns.find((column) => ["kWh", "h"].includes(column.unit));
  if (!day || !figure || reply.rows.length < 2) return null;
  return bars({ label: `${headOf(figure)} by day`, values: reply.rows.map((row) => [String(row[day.name]).slice(5), row[figure.name]]), show: (value) => `${Math.round(value * 1000) / 1000} ${figure.unit}` });
}

/** A unit that ends a name is said as one. */
const headOf = ({ name, unit }) => (isNumber(unit) && unit !== "count" ? `${spaced(name.replace(/_[^_]*$/, ""))} ${unit}` : spaced(name));

function rowsOf(reply) {
  if (!reply.rows.length) return h("p", {}, "Nothing to show.");
  const body = h("tbody");
  let order = null, down = false;
  const draw = () => body.replaceChildren(...(order ? sorted(reply.rows, (row) => row[order], down) : reply.rows).map((row) => h("tr", {}, reply.columns.map(({ name, unit }) => h("td", { class: isNumber(unit) ? "n" : name === "detail" ? "wrap" : "name", title: unit === "text" && row[name] }, cell(row, name, unit))))));
  const head = (column) => {
    const { name, unit, meaning } = column;
    const turn = (event) => {
      [order, down] = order === name ? [name, !down] : [name, isNumber(unit)];
      for (const one of heads) one.removeAttribute("aria-sort");
      event.currentTarget.parentElement.setAttribute("aria-sort", down ? "descending" : "ascending");
      draw();
    };
    return h("th", { scope: "col", class: isNumber(unit) && "n", title: meaning }, h("button", { type: "button", onclick: turn }, headOf(column)));
  };
  const heads = reply.columns.map(head);
  draw();
  return scrolling(reply.report, h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
}

/** The API gives the CSV, by a plain link where no token is needed; it gives the SQL, once it is looked at. */
function downloads(report, values) {
  const path = `reports/${encodeURIComponent(report.name)}`, file = `${report.name}.csv`;
  const problem = h("p", { class: "error", role: "alert" });
  const told = async (work) => {
    problem.textContent = "";
    try {
      await work();
    } catch (reason) {
      if (!(reason instanceof Problem)) throw reason;
      problem.textContent = reason.message;
    }
  };
  const save = (event) => {
    if (!token.get()) return;
    event.preventDefault();
    told(async () => {
      const link = h("a", { href: URL.createObjectURL(new Blob([await apiText(path, { ...values, format: "csv" })], { type: "text/csv" })), download: file });
      link.click();
      // Not at once: some browsers read it only then.
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    });
  };
  const statement = h("code", {}, "Loading…"), said = h("span", { class: "soft", role: "status" });
  const copy = h("button", { type: "button", hidden: true, onclick: () => {
    // navigator.clipboard is there only over TLS.
    getSelection().selectAllChildren(statement);
    said.textContent = document.execCommand("copy") ? "Copied." : "It is marked: copy it.";
  } }, "Copy");
  const shown = h("details", { ontoggle: () => {
    if (!shown.open || !copy.hidden) return;
    told(async () => {
      statement.textContent = await apiText(path, { ...values, format: "sql" });
      copy.hidden = false;
    }).then(() => { if (copy.hidden) shown.open = false; });
  } }, h("summary", {}, "SQL"), h("p", { class: "soft" }, "With all its values, for psql or sqlite3. ", said), h("div", { class: "sql" }, h("pre", { tabindex: "0", role: "region", "aria-label": "SQL" }, statement), copy));
  return h("div", { class: "downloads" }, h("a", { href: `api/v1/${path}${query({ ...values, format: "csv" })}`, download: file, onclick: save }, "Download as CSV"), shown, problem);
}
