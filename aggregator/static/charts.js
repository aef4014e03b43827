// Charts of one time range: a band from least to greatest with the average in it, strips of stays and stretches. All of a page
// have one time axis; a drag over any of them chooses a part of it.

import { clock, dateTime, h, s } from "./dom.js";
import { ticks } from "./time_axis.js";

const LEFT = 56, RIGHT = 10, HEIGHT = 150, TOP = 8, BOTTOM = 20, LANE = 24;
// Samples of a card come this often at least, or something is amiss: less is no gap.
const SPOKEN_MS = 120_000;

/** Round values from 0 on that reach `greatest`. */
function levels(greatest) {
  const rough = Math.max(greatest, 1e-9) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let value = 0; value < greatest + step; value += step) found.push(value);
  return found;
}

const round = (number) => Math.round(number * 10) / 10;

/** `range`: {startMs, endMs, stepMs}; `points`: [{at, avg, min, max}], `null` where nothing is known; `zoom(fromMs, toMs)`. */
export function timeChart({ title, unit, range, points, show, ceiling, zoom, output }) {
  const known = points.filter((point) => point.avg !== null && point.avg !== undefined);
  const svg = s("svg", { height: String(HEIGHT), tabindex: "0", role: "img" });
  const figures = known.length
    ? `average ${show(known.reduce((sum, point) => sum + point.avg, 0) / known.length)}, least ${show(Math.min(...known.map((p) => p.min)))}, greatest ${show(Math.max(...known.map((p) => p.max)))}`
    : "no data in this range";
  svg.setAttribute("aria-label", `${title}, ${figures}`);
  const chart = h("figure", { class: "chart" }, h("h3", {}, title, " ", h("small", { class: "soft" }, figures)), svg);
  let selected = null;

  function draw() {
    const width = svg.clientWidth || svg.parentElement?.clientWidth;
    if (!width) return;
    const inner = width - LEFT - RIGHT, bottom = HEIGHT - BOTTOM;
    const values = levels(ceiling ?? Math.max(1, ...known.map((point) => unit.of(point.max))));
    const greatest = ceiling ?? values.at(-1);
    const x = (ms) => round(LEFT + (inner * (ms - range.startMs)) / (range.endMs - range.startMs));
    const y = (value) => round(bottom - ((bottom - TOP) * Math.min(unit.of(value), greatest)) / greatest);
    const parts = [];
    for (const value of values.filter((one) => one <= greatest)) {
      const at = round(bottom - ((bottom - TOP) * value) / greatest);
      parts.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
        s("text", { class: "tick", x: LEFT - 6, y: at + 4, "text-anchor": "end" }, `${round(value)}${unit.name}`));
    }
    parts.push(...axis(range, x, width, bottom));
    for (const run of runs(known, range.stepMs)) {
      const at = run.map((point) => x(point.at + range.stepMs / 2));
      const upper = run.map((point, index) => `${at[index]},${y(point.max)}`);
      const lower = run.map((point, index) => `${at[index]},${y(point.min)}`).reverse();
      if (run.length > 1) parts.push(s("path", { class: "band", d: `M${[...upper, ...lower].join("L")}Z` }));
      else parts.push(s("path", { class: "average", d: `M${at[0]},${y(run[0].min)}V${y(run[0].max)}`, opacity: "0.4" }));
      parts.push(s("path", { class: "average", d: `M${run.map((point, index) => `${at[index]},${y(point.avg)}`).join("L")}${run.length === 1 ? "h0" : ""}` }));
    }
    if (!known.length) parts.push(s("text", { class: "tick", x: LEFT + inner / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no data in this range"));
    svg.replaceChildren(...parts);
    if (selected !== null) cross(x);
  }

  function cross(x) {
    svg.querySelector(".cross")?.remove();
    if (selected === null) return;
    const point = known[selected];
    const at = x(point.at + range.stepMs / 2);
    svg.append(s("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
  }

  function choose(index) {
    selected = index === null || !known.length ? null : Math.min(known.length - 1, Math.max(0, index));
    const point = selected === null ? null : known[selected];
    output.textContent = point ? `${title}, ${dateTime(point.at)}${range.stepMs < 60_000 ? `:${clock(point.at, true).slice(6)}` : ""}: average ${show(point.avg)}, least ${show(point.min)}, greatest ${show(point.max)}` : "";
    const inner = svg.clientWidth - LEFT - RIGHT;
    cross((ms) => LEFT + (inner * (ms - range.startMs)) / (range.endMs - range.startMs));
  }

  draggable(svg, range, zoom, (ms) => {
    if (ms === null || !known.length) return choose(null);
    let best = 0;
    known.forEach((point, index) => { if (Math.abs(point.at + range.stepMs / 2 - ms) < Math.abs(known[best].at + range.stepMs / 2 - ms)) best = index; });
    choose(best);
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (move) choose(selected === null ? known.length - 1 : selected + move);
    else if (event.key === "+" || event.key === "-") {
      const middle = selected === null ? (range.startMs + range.endMs) / 2 : known[selected].at;
      const half = ((range.endMs - range.startMs) * (event.key === "+" ? 0.25 : 1));
      zoom(middle - half, middle + half);
    } else return;
    event.preventDefault();
  });
  new ResizeObserver(draw).observe(svg);
  return chart;
}

/** Points without a gap between them. */
function runs(points, stepMs) {
  const found = [];
  let before = null;
  for (const point of points) {
    if (before === null || point.at - before > stepMs + SPOKEN_MS) found.push([]);
    found.at(-1).push(point);
    before = point.at;
  }
  return found;
}

function axis(range, x, width, bottom) {
  const parts = [];
  for (const [ms, label] of ticks(range.startMs, range.endMs, Math.max(2, (width - LEFT - RIGHT) / 75))) {
    const at = x(ms);
    parts.push(s("line", { class: "grid", x1: at, x2: at, y1: TOP, y2: bottom }));
    const anchor = at > width - 30 ? "end" : at < LEFT + 14 ? "start" : "middle";
    parts.push(s("text", { class: "tick", x: at, y: bottom + 14, "text-anchor": anchor }, label));
  }
  return parts;
}

/** A drag chooses a time; `hover` is told where the pointer is, `null` when it leaves. */
function draggable(svg, range, zoom, hover) {
  let from = null, mark = null;
  const time = (event) => {
    const box = svg.getBoundingClientRect();
    const part = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return range.startMs + Math.min(1, Math.max(0, part)) * (range.endMs - range.startMs);
  };
  const place = (event) => Math.min(svg.clientWidth - RIGHT, Math.max(LEFT, event.clientX - svg.getBoundingClientRect().left));
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    from = { ms: time(event), x: place(event) };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (from === null) return hover(time(event));
    const x = place(event);
    mark?.remove();
    mark = s("rect", { class: "drag", x: Math.min(x, from.x), width: Math.abs(x - from.x), y: TOP, height: Number(svg.getAttribute("height")) - BOTTOM - TOP });
    svg.append(mark);
  });
  svg.addEventListener("pointerup", (event) => {
    const began = from;
    from = null;
    mark?.remove();
    if (began !== null && Math.abs(place(event) - began.x) > 6) zoom(Math.min(began.ms, time(event)), Math.max(began.ms, time(event)));
  });
  svg.addEventListener("pointercancel", () => { from = null; mark?.remove(); });
  svg.addEventListener("pointerleave", () => { if (from === null) hover(null); });
}

/** Lanes of segments: `lanes`: [{name, segments: [{fromMs, toMs, name, kind, href, title}]}]. */
export function strip({ label, range, lanes, zoom }) {
  const height = lanes.length * LANE + TOP + BOTTOM;
  const svg = s("svg", { height: String(height), role: "img", "aria-label": `${label}; the table below says the same` });
  function draw() {
    const width = svg.clientWidth;
    if (!width) return;
    const inner = width - LEFT - RIGHT;
    const x = (ms) => round(LEFT + (inner * (Math.min(Math.max(ms, range.startMs), range.endMs) - range.startMs)) / (range.endMs - range.startMs));
    const parts = axis(range, x, width, height - BOTTOM);
    lanes.forEach((lane, index) => {
      const y = TOP + index * LANE;
      if (lane.name) parts.push(s("text", { class: "tick", x: LEFT - 4, y: y + 14, "text-anchor": "end" }, cut(lane.name, LEFT - 6)));
      for (const segment of lane.segments) {
        const from = x(segment.fromMs), wide = Math.max(2, x(segment.toMs) - from);
        const shape = s("rect", { class: `segment ${segment.kind ?? ""}`, x: from, y: y + 2, width: wide, height: LANE - 6, rx: 2 }, s("title", {}, segment.title));
        parts.push(shape);
        if (wide > 30) parts.push(s("text", { class: "segment-name", x: from + 5, y: y + 15 }, cut(segment.name, wide - 8)));
      }
    });
    svg.replaceChildren(...parts);
  }
  draggable(svg, range, zoom, () => {});
  new ResizeObserver(draw).observe(svg);
  return h("div", { class: "strip" }, svg);
}

/** As much of a text as fits, at 11 px; a character is taken for 6.4 wide. */
function cut(label, width) {
  const most = Math.floor(width / 6.4);
  return label.length <= most ? label : most > 1 ? `${label.slice(0, most - 1)}…` : "";
}

/** A bar a day. */
export function bars({ label, values, show }) {
  const marks = levels(Math.max(1e-9, ...values.map(([, value]) => value ?? 0)));
  const greatest = marks.at(-1);
  const svg = s("svg", { height: String(HEIGHT), role: "img", "aria-label": `${label}; the table below says the same` });
  function draw() {
    const width = svg.clientWidth, bottom = HEIGHT - BOTTOM;
    if (!width) return;
    const each = (width - LEFT - RIGHT) / Math.max(1, values.length), wide = Math.min(60, each * 0.8);
    const often = Math.max(1, Math.ceil(46 / each));
    const parts = [];
    for (const value of marks) {
      const y = round(bottom - ((bottom - TOP) * value) / greatest);
      parts.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), s("text", { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" }, show(round(value))));
    }
    values.forEach(([name, value], index) => {
      const x = LEFT + index * each, high = ((bottom - TOP) * (value ?? 0)) / greatest;
      if (value !== null) parts.push(s("rect", { class: "bar", x: x + (each - wide) / 2, width: wide, y: bottom - high, height: high }, s("title", {}, `${name}: ${show(value)}`)));
      if (index % often === 0) parts.push(s("text", { class: "tick", x: x + each / 2, y: bottom + 14, "text-anchor": "middle" }, name));
    });
    svg.replaceChildren(...parts);
  }
  new ResizeObserver(draw).observe(svg);
  return h("div", { class: "chart" }, h("h3", {}, label), svg);
}

/** `5 min`, `1 h`, `7 d`. */
export function width(seconds) {
  return seconds % 86400 === 0 ? `${seconds / 86400} d` : seconds % 3600 === 0 ? `${seconds / 3600} h` : seconds % 60 === 0 ? `${seconds / 60} min` : `${seconds} s`;
}
