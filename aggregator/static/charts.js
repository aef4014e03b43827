// Charts of one time range: a band from least to greatest with the average in it, strips of stays and stretches. All of a page
// have one time axis: a pointer over one reads all of them, a drag chooses a part of it.

import { clock, dayOfMonth, h, s } from "./dom.js";
import { ticks } from "./time_axis.js";

const LEFT = 60, RIGHT = 10, HEIGHT = 170, TOP = 8, BOTTOM = 22, LANE = 26;
// A character at 11 px is taken for so wide.
const LETTER = 6.4;
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

/** The instant that is read from all charts of a page: by a pointer, or by keys, and then said aloud. */
export class Instant {
  /** `times`: beginnings of all points, in ms, ascending. */
  constructor(range, times) {
    this.range = range;
    this.times = times;
    this.charts = [];
    this.index = null;
    this.output = h("output", { class: "unseen" });
    this.help = h("p", { class: "unseen", id: "chart-help" }, "Arrow keys read values, + and - zoom, Escape ends.");
  }

  /** `null`: none any more. Where nothing is known the gap is shown. */
  point(ms) {
    if (ms === null || !this.times.length) return this.choose(null);
    const half = this.range.stepMs / 2;
    let best = 0;
    this.times.forEach((at, index) => { if (Math.abs(at + half - ms) < Math.abs(this.times[best] + half - ms)) best = index; });
    if (Math.abs(this.times[best] + half - ms) > Math.max(this.range.stepMs, SPOKEN_MS)) this.show(ms, null);
    else this.choose(best);
  }

  choose(index) {
    this.index = index === null ? null : Math.min(this.times.length - 1, Math.max(0, index));
    if (index === null) this.output.textContent = "";
    this.show(this.index === null ? null : this.times[this.index] + this.range.stepMs / 2, this.index);
  }

  show(ms, index) {
    this.index = index;
    for (const chart of this.charts) chart.mark(ms, index, ms === null ? "" : this.time(index === null ? ms : this.times[index], index !== null));
  }

  /** `first` is read first. */
  key(event, first) {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") return this.choose(null);
    if (!move || !this.times.length) return;
    event.preventDefault();
    this.choose(this.index === null ? this.times.length - 1 : this.index + move);
    const ordered = [first, ...this.charts.filter((chart) => chart !== first)];
    this.output.textContent = `${this.time(this.times[this.index], true)}: ${ordered.map((chart) => chart.words(this.index)).join("; ")}`;
  }

  time(ms, known) {
    const at = `${dayOfMonth(ms)} ${clock(ms, this.range.stepMs < 60_000)}`;
    return known ? `${at}, ${width(this.range.stepMs / 1000)}` : at;
  }
}

/** `range`: {startMs, endMs, stepMs}; `points`: [{at, avg, min, max}], without values where nothing is known, as many as
 *  `instant` has times; `ceiling`: the greatest value of the axis; `zoom(fromMs, toMs)`. */
export function timeChart({ title, unit, range, points, show, ceiling, zoom, instant }) {
  const isKnown = (point) => point.avg !== null && point.avg !== undefined;
  const known = points.filter(isKnown);
  const svg = s("svg", { height: String(HEIGHT), tabindex: "0", role: "img", "aria-describedby": "chart-help" });
  const least = Math.min(...known.map((point) => point.min)), greatest = Math.max(...known.map((point) => point.max));
  const mean = known.reduce((sum, point) => sum + point.avg, 0) / known.length;
  svg.setAttribute("aria-label", `${title}, ${known.length ? `average ${show(mean)}, least ${show(least)}, greatest ${show(greatest)}` : "no data in this range"}`);
  const figures = known.length ? unit.band(mean, least, greatest) : "";
  const said = h("span", { class: "soft" }, figures);
  const chart = h("figure", { class: "chart" }, h("h3", {}, title, said), svg);
  let scale = null;

  function draw() {
    const width = svg.clientWidth;
    if (!width) return;
    const inner = width - LEFT - RIGHT, bottom = HEIGHT - BOTTOM;
    // Without values the axis has no figures, but where they are known all the same.
    const marks = known.length || ceiling ? levels(ceiling ?? unit.of(Math.max(greatest, 1e-9))) : [];
    const top = ceiling ?? marks.at(-1);
    const x = (ms) => round(LEFT + (inner * (ms - range.startMs)) / (range.endMs - range.startMs));
    const y = (value) => round(bottom - ((bottom - TOP) * Math.min(unit.of(value), top)) / top);
    const parts = [];
    // What a card has is said even where it is no round number.
    const shown = ceiling ? [...marks.filter((one) => one < ceiling * 0.9), ceiling] : marks;
    for (const value of shown) {
      const at = round(bottom - ((bottom - TOP) * value) / top);
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
    if (!known.length) parts.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom }), s("text", { class: "tick", x: LEFT + inner / 2, y: HEIGHT / 2 - 6, "text-anchor": "middle" }, "no data in this range"));
    svg.replaceChildren(...parts);
    scale = { x, y, width, bottom };
  }

  const own = {
    mark(ms, index, time) {
      svg.querySelector(".instant")?.remove();
      const point = index === null ? null : points[index];
      said.className = ms === null ? "soft" : "read";
      said.textContent = ms === null ? figures : point && isKnown(point) ? unit.band(point.avg, point.min, point.max) : "no data";
      if (ms === null || !scale) return;
      const at = scale.x(ms), wide = time.length * LETTER + 12, left = Math.min(scale.width - RIGHT - wide, Math.max(LEFT, at - wide / 2));
      svg.append(s("g", { class: "instant" },
        s("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: scale.bottom }),
        point && isKnown(point) ? s("circle", { class: "read-point", cx: at, cy: scale.y(point.avg), r: 3.5 }) : null,
        s("rect", { class: "tag", x: left, y: scale.bottom + 2, width: wide, height: 18, rx: 3 }),
        s("text", { class: "tag-text", x: left + wide / 2, y: scale.bottom + 15, "text-anchor": "middle" }, time)));
    },
    words(index) {
      const point = points[index];
      return `${title} ${isKnown(point) ? `${show(point.avg)}, least ${show(point.min)}, greatest ${show(point.max)}` : "no data"}`;
    },
  };
  instant.charts.push(own);
  draggable(svg, range, zoom, (ms) => instant.point(ms));
  svg.addEventListener("blur", () => instant.choose(null));
  svg.addEventListener("keydown", (event) => {
    if (event.key !== "+" && event.key !== "-") return instant.key(event, own);
    const middle = instant.index === null ? (range.startMs + range.endMs) / 2 : instant.times[instant.index];
    const half = (range.endMs - range.startMs) * (event.key === "+" ? 0.25 : 1);
    event.preventDefault();
    zoom(middle - half, middle + half);
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

function axis(range, x, width, bottom, left = LEFT) {
  const parts = [];
  for (const [ms, label] of ticks(range.startMs, range.endMs, Math.max(2, (width - left - RIGHT) / 64))) {
    const at = x(ms);
    parts.push(s("line", { class: "grid", x1: at, x2: at, y1: TOP, y2: bottom }));
    const anchor = at > width - 30 ? "end" : at < left + 14 ? "start" : "middle";
    parts.push(s("text", { class: "tick", x: at, y: bottom + 14, "text-anchor": anchor }, label));
  }
  return parts;
}

/** A drag chooses a time; `hover` is told where the pointer is, `null` when it leaves. */
function draggable(svg, range, zoom, hover, left = LEFT) {
  let from = null, mark = null;
  const time = (event) => {
    const box = svg.getBoundingClientRect();
    const part = (event.clientX - box.left - left) / (box.width - left - RIGHT);
    return range.startMs + Math.min(1, Math.max(0, part)) * (range.endMs - range.startMs);
  };
  const place = (event) => Math.min(svg.clientWidth - RIGHT, Math.max(left, event.clientX - svg.getBoundingClientRect().left));
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
    if (began === null) return;
    if (Math.abs(place(event) - began.x) > 6) zoom(Math.min(began.ms, time(event)), Math.max(began.ms, time(event)));
    else hover(time(event));
  });
  svg.addEventListener("pointercancel", () => { from = null; mark?.remove(); });
  // A finger leaves at once: what it touched stays until something else is touched.
  svg.addEventListener("pointerleave", (event) => { if (from === null && event.pointerType !== "touch") hover(null); });
}

/** Lanes of segments: `lanes`: [{name, segments: [{fromMs, toMs, name, kind, href, title}]}]. */
export function strip({ label, range, lanes, zoom }) {
  const height = lanes.length * LANE + TOP + BOTTOM, left = lanes.some((lane) => lane.name) ? LEFT : 1;
  const svg = s("svg", { height: String(height), role: "img", "aria-label": `${label}; the table below says the same` });
  function draw() {
    const width = svg.clientWidth;
    if (!width) return;
    const inner = width - left - RIGHT;
    const x = (ms) => round(left + (inner * (Math.min(Math.max(ms, range.startMs), range.endMs) - range.startMs)) / (range.endMs - range.startMs));
    const parts = axis(range, x, width, height - BOTTOM, left);
    lanes.forEach((lane, index) => {
      const y = TOP + index * LANE;
      if (lane.name) parts.push(s("text", { class: "tick", x: LEFT - 4, y: y + 17, "text-anchor": "end" }, cut(lane.name, LEFT - 6)));
      for (const segment of lane.segments) {
        const from = x(segment.fromMs), wide = Math.max(2, x(segment.toMs) - from);
        const shape = s("rect", { class: `segment ${segment.kind ?? ""}`, x: from, y: y + 2, width: wide, height: LANE - 6, rx: 2 }, s("title", {}, segment.title));
        parts.push(shape);
        if (wide > 30) parts.push(s("text", { class: "segment-name", x: from + 5, y: y + 16 }, cut(segment.name, wide - 8)));
      }
    });
    svg.replaceChildren(...parts);
  }
  draggable(svg, range, zoom, () => {}, left);
  new ResizeObserver(draw).observe(svg);
  return h("div", { class: "strip" }, svg);
}

/** As much of a text as fits, at 11 px. */
function cut(label, width) {
  const most = Math.floor(width / LETTER);
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
