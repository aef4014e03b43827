// The heat map: a row a card, by host and CVM, a column a part of the time. What is in view is drawn on a canvas of the view's
// size, so that thousands of rows cost no more than a screen.

import { clock, dayOfMonth, h, s, shortUuid } from "./dom.js";
import { ticks } from "./time_axis.js";

// Viridis: lightness grows all along, so that it is read alike whatever colours one tells apart.
const STOPS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [110, 206, 88], [181, 222, 43], [253, 231, 37]];
const AXIS = 22, HOST = 22, GAP = 3;
const HELP = "Arrow keys move over cards and times, Enter opens a card.";
const SOURCES = { raw: "samples", "5m": "buckets of 5 minutes", "1h": "buckets of an hour" };

export function colour(percent) {
  const at = (Math.min(100, Math.max(0, percent)) / 100) * (STOPS.length - 1);
  const low = Math.min(STOPS.length - 2, Math.floor(at));
  const mixed = STOPS[low].map((part, index) => Math.round(part + (STOPS[low + 1][index] - part) * (at - low)));
  return `rgb(${mixed.join(" ")})`;
}
const COLOURS = Array.from({ length: 101 }, (_, percent) => colour(percent));

export class HeatMap {
  /** `open` is called with the card that is chosen. */
  constructor(open) {
    this.open = open;
    this.rows = [];
    this.canvas = h("canvas", {
      tabindex: "0", role: "img", "aria-describedby": "heat-help",
      onpointermove: (event) => this.point(event), onpointerleave: () => this.select(null), onblur: () => this.select(null),
      onfocus: () => { if (this.canvas.matches(":focus-visible") && !this.selected) this.tell(HELP, 8, AXIS + 4); },
      onclick: (event) => { this.point(event); if (this.selected) this.open(this.selected.row.card); },
      onkeydown: (event) => this.key(event),
    });
    this.space = h("div", { class: "heat-space" }, this.canvas);
    this.box = h("div", { class: "heat-scroll", onscroll: () => this.later() }, this.space);
    this.output = h("output", { class: "tip", hidden: true });
    const steps = 20;
    this.legend = h("div", { class: "legend" }, h("span", {}, "0 %"),
      s("svg", { width: "120", height: "12", viewBox: "0 0 120 12", preserveAspectRatio: "none", "aria-hidden": "true" },
        Array.from({ length: steps }, (_, i) => s("rect", { x: String((i * 120) / steps), width: String(120 / steps + 0.5), height: "12", fill: colour((100 * i) / (steps - 1)) }))),
      h("span", {}, "100 %"), h("canvas", { width: "24", height: "12", "aria-hidden": "true" }), h("span", {}, "no data"));
    this.swatch = this.legend.querySelector("canvas");
    this.note = h("p", { class: "soft" });
    this.element = h("div", {}, h("div", { class: "heat-frame" }, this.box, this.output), this.note, h("p", { class: "unseen", id: "heat-help" }, `${HELP} The table below has the same cards.`));
    new ResizeObserver(() => this.layout()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** `fleet` as of fleet.js; `cards` are those to show. */
  show(fleet, cards) {
    this.fleet = fleet;
    this.cards = cards.filter((card) => card.state !== "detached" || card.line.some((value) => value !== null));
    const minutes = fleet.stepMs / 60_000;
    const width = minutes < 60 ? `${minutes} min` : `${minutes / 60} h`;
    this.note.textContent = `A row is a card, a cell its mean over ${width}, from ${SOURCES[fleet.resolution]}.`;
    this.canvas.setAttribute("aria-label", `Heat map of utilization: ${this.cards.length} cards over the last day`);
    this.layout();
  }

  layout() {
    if (!this.fleet || !this.box.clientWidth) return;
    const count = this.cards.length;
    this.height = count <= 30 ? 14 : count <= 100 ? 10 : count <= 400 ? 7 : 5;
    this.left = this.box.clientWidth < 600 ? 84 : 168;
    this.rows = [];
    this.heads = [];
    let y = 0, host = null, cvm = null;
    for (const card of this.cards) {
      if (card.cvm.vmm !== host) {
        host = card.cvm.vmm;
        this.heads.push({ y, host });
        y += HOST;
        cvm = null;
      }
      if (card.cvm !== cvm) {
        if (cvm) y += GAP;
        cvm = card.cvm;
      }
      this.rows.push({ y, card });
      y += this.height;
    }
    this.total = y + AXIS + 2;
    this.view = Math.min(this.total, Math.max(260, Math.round(innerHeight * 0.6)));
    this.box.style.height = `${this.view + 2}px`;
    this.space.style.height = `${this.total}px`;
    this.draw();
  }

  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    if (!this.fleet) return;
    const width = this.box.clientWidth, height = this.view, ratio = devicePixelRatio || 1;
    const { canvas, left } = this;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const style = getComputedStyle(document.documentElement);
    const [ink, soft, panel, line, accent, gap, hatching] = ["--ink", "--soft", "--panel", "--line", "--accent", "--gap", "--hatch"].map((name) => style.getPropertyValue(name).trim());
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = panel;
    pen.fillRect(0, 0, width, height);
    pen.textBaseline = "middle";
    const hatch = hatched(pen, gap, hatching);
    const top = this.box.scrollTop - AXIS;
    const columns = Math.round((this.fleet.endMs - this.fleet.startMs) / this.fleet.stepMs);
    const edge = (column) => Math.round(left + ((width - left) * column) / columns);
    let labelled = -Infinity, cvm = null;
    const first = this.firstBelow(top);
    for (let index = Math.max(0, first - 1); index < this.rows.length; index++) {
      const { y, card } = this.rows[index];
      const at = y - top;
      if (at > height) break;
      let column = 0;
      while (column < columns) {
        const value = card.line[column];
        let end = column + 1;
        while (end < columns && card.line[end] === value) end++;
        pen.fillStyle = value === null || value === undefined ? hatch : COLOURS[value];
        pen.fillRect(edge(column), at, edge(end) - edge(column), this.height >= 8 ? this.height - 1 : this.height);
        column = end;
      }
      if (card.cvm !== cvm) {
        cvm = card.cvm;
        if (at - labelled >= 12) {
          pen.font = "12px system-ui, sans-serif";
          pen.fillStyle = soft;
          pen.fillText(fitted(pen, cvm.vm_name ?? cvm.vm_id, left - 18), 10, at + Math.max(this.height / 2, 5));
          labelled = at;
        }
      }
    }
    pen.font = "600 13px system-ui, sans-serif";
    for (const { y, host } of this.heads) {
      const at = y - top;
      if (at < 0 || at > height) continue;
      pen.fillStyle = ink;
      pen.fillText(fitted(pen, host, width - 12), 0, at + HOST / 2 + 1);
    }
    if (this.selected) {
      const { row, column } = this.selected;
      pen.strokeStyle = panel;
      pen.lineWidth = 4;
      pen.strokeRect(edge(column), row.y - top - 1, edge(column + 1) - edge(column), this.height + 1);
      pen.strokeStyle = accent;
      pen.lineWidth = 2;
      pen.strokeRect(edge(column), row.y - top - 1, edge(column + 1) - edge(column), this.height + 1);
    }
    pen.fillStyle = panel;
    pen.fillRect(0, 0, width, AXIS);
    // Whose rows these are, once their head is out of view.
    const above = this.heads.filter((head) => head.y < top + AXIS - HOST / 2).at(-1);
    if (above) {
      pen.fillStyle = ink;
      pen.fillText(fitted(pen, above.host, left - 12), 0, AXIS / 2);
    }
    pen.font = "11px system-ui, sans-serif";
    for (const [ms, label] of ticks(this.fleet.startMs, this.fleet.endMs, Math.max(2, (width - left) / 70))) {
      const x = left + ((width - left) * (ms - this.fleet.startMs)) / (this.fleet.endMs - this.fleet.startMs);
      pen.fillStyle = line;
      pen.fillRect(Math.round(x), AXIS - 5, 1, 5);
      pen.fillStyle = soft;
      const wide = pen.measureText(label).width;
      pen.fillText(label, Math.min(Math.max(x - wide / 2, left), width - wide - 2), 8);
    }
    const swatch = this.swatch.getContext("2d");
    swatch.fillStyle = hatched(swatch, gap, hatching);
    swatch.fillRect(0, 0, 24, 12);
  }

  firstBelow(y) {
    let low = 0, high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rows[middle].y + this.height < y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  point(event) {
    if (!this.fleet) return;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const at = y + this.box.scrollTop - AXIS;
    const index = this.firstBelow(at);
    const row = this.rows[index];
    if (y < AXIS || x < this.left || !row || at < row.y || at > row.y + this.height) return void this.select(null);
    const columns = (this.fleet.endMs - this.fleet.startMs) / this.fleet.stepMs;
    this.select(index, Math.min(columns - 1, Math.floor(((x - this.left) / (box.width - this.left)) * columns)));
  }

  select(index, column = 0) {
    const row = index === null ? null : this.rows[index];
    this.selected = row ? { index, row, column } : null;
    this.canvas.style.cursor = row ? "pointer" : "";
    this.later();
    if (!row) return void (this.output.hidden = true);
    const width = this.box.clientWidth, columns = (this.fleet.endMs - this.fleet.startMs) / this.fleet.stepMs;
    this.tell(this.words(row.card, column), this.left + ((width - this.left) * (column + 1)) / columns, row.y - this.box.scrollTop + AXIS + this.height);
  }

  /** Beside a cell, over what is there: nothing on the page moves. */
  tell(words, x, y) {
    const { output, box } = this;
    output.hidden = false;
    output.textContent = words;
    output.style.left = `${Math.max(0, Math.min(x + 6, box.clientWidth - output.offsetWidth))}px`;
    output.style.top = `${y + output.offsetHeight + 10 > this.view ? Math.max(0, y - this.height - output.offsetHeight - 6) : y + 6}px`;
  }

  words(card, column) {
    const from = this.fleet.startMs + column * this.fleet.stepMs;
    const value = card.line[column];
    const where = [card.cvm.vmm, card.cvm.vm_name ?? card.cvm.vm_id, card.host_bdf ?? card.bdf, shortUuid(card.uuid)].filter(Boolean).join(" · ");
    return `${where} · ${dayOfMonth(from)} ${clock(from)}–${clock(from + this.fleet.stepMs)}: ${value === null || value === undefined ? "no data" : `${value} %`}`;
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-20, 0], PageDown: [20, 0] };
    if (event.key === "Enter" && this.selected) return void this.open(this.selected.row.card);
    if (event.key === "Escape") return void this.select(null);
    const move = moves[event.key];
    if (!move || !this.rows.length) return;
    event.preventDefault();
    const columns = (this.fleet.endMs - this.fleet.startMs) / this.fleet.stepMs;
    const now = this.selected ?? { index: this.firstBelow(this.box.scrollTop), column: columns };
    const index = Math.min(this.rows.length - 1, Math.max(0, now.index + (this.selected ? move[0] : 0)));
    this.select(index, Math.min(columns - 1, Math.max(0, now.column + move[1])));
    const y = this.rows[index].y;
    if (y < this.box.scrollTop) this.box.scrollTop = y - HOST;
    else if (y + this.height + AXIS > this.box.scrollTop + this.view) this.box.scrollTop = y + this.height + AXIS - this.view + 4;
  }
}

function fitted(pen, label, width) {
  if (pen.measureText(label).width <= width) return label;
  let end = label.length;
  while (end > 1 && pen.measureText(`${label.slice(0, end)}…`).width > width) end--;
  return `${label.slice(0, end)}…`;
}

function hatched(pen, ground, line) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const on = tile.getContext("2d");
  on.fillStyle = ground;
  on.fillRect(0, 0, 6, 6);
  on.strokeStyle = line;
  on.beginPath();
  on.moveTo(-1, 7);
  on.lineTo(7, -1);
  on.stroke();
  return pen.createPattern(tile, "repeat");
}
