// Elements and texts. Nothing becomes markup: a text is a text node, whatever a guest calls itself.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** What is shown of a value that is not there. */
export const ABSENT = "–";

const or = (format) => (value) => (value === null || value === undefined ? ABSENT : format(value));
export const percent = or((value) => `${Math.round(value)} %`);
export const gib = or((value) => `${(value / 2 ** 30).toFixed(1)} GiB`);
/** `126.4 / 140.4 GiB`. */
export const gibOf = (used, total) => (used === null || total === null ? `${gib(used)} / ${gib(total)}` : `${(used / 2 ** 30).toFixed(1)} / ${gib(total)}`);
export const celsius = or((value) => `${Math.round(value)} °C`);
export const watts = or((value) => `${(value / 1000).toFixed(1)} W`);
export const text = or(String);
export const shortUuid = or((uuid) => (uuid.length > 14 ? `${uuid.slice(0, 13)}…` : uuid));

/** `4 s`, `12 min`, `3 h`, `2 d`. */
export const span = or((seconds) => {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return `${Math.max(0, Math.floor(seconds))} s`;
});

export const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
const two = (number) => String(number).padStart(2, "0");
export function clock(ms, seconds = false) {
  const at = new Date(ms);
  return `${two(at.getHours())}:${two(at.getMinutes())}${seconds ? `:${two(at.getSeconds())}` : ""}`;
}
export function day(ms) {
  const at = new Date(ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}
export const dateTime = or((ms) => `${day(ms)} ${clock(ms)}`);
export const isoTime = or((at) => dateTime(Date.parse(at)));
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
export const month = (at) => MONTHS[at.getMonth()];
/** `30 Nov`, for axes. */
export function dayOfMonth(ms) {
  const at = new Date(ms);
  return `${at.getDate()} ${month(at)}`;
}

const SHAPES = { ok: "●", stale: "◐", silent: "○", contested: "▲", detached: "◇", no_gpu: "●", stopped: "□", not_running: "□" };
const FINE = new Set(["ok", "no_gpu"]), NEUTRAL = new Set(["stopped", "not_running"]);
/** A state or an outcome: by word and shape, and by colour beside. */
export function state(word) {
  return h("span", { class: FINE.has(word) ? "ok" : NEUTRAL.has(word) ? "neutral" : "not-ok" }, h("span", { "aria-hidden": "true" }, `${SHAPES[word] ?? "▲"} `), word ?? ABSENT);
}

/** Confidential computing in a word; `false` is trouble, `null` unknown. As `_cc` in page.py. */
export function ccWord({ cc_enabled: on, cc_ready: ready }) {
  if (on === false) return "off";
  if (ready === false) return "not ready";
  return ready ? "ready" : on ? "on" : ABSENT;
}
export const cc = (cvm) => h("span", { class: cvm.cc_ready === false && "not-ok" }, ccWord(cvm));

/** A region that scrolls sideways, reachable by keyboard. */
export const scrolling = (label, ...children) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);

export function table(label, heads, rows) {
  return scrolling(
    label,
    h("table", {}, h("thead", {}, h("tr", {}, heads.map(([name, numeric]) => h("th", { scope: "col", class: numeric && "n" }, name)))),
      h("tbody", {}, rows)),
  );
}

/** Facts side by side, each under its name. */
export const facts = (kind, pairs) => h("dl", { class: kind }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
