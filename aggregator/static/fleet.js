// What is known of the fleet: every card with its last day, kept up to date by the newest part of it.

import { api } from "./api.js";

// A card is busy above this utilization, in %, as in the reports.
export const BUSY_ABOVE = 5;
const WHOLE_AGAIN_MS = 10 * 60_000;
// As in settings.py.
const CARD_KEPT_S = 86_400;

export const keyOf = (card) => card.uuid ?? `${card.cvm.vmm}/${card.cvm.vm_id}/${card.bdf}`;

export class Fleet {
  constructor() {
    this.cards = [];
    this.cvms = [];
    this.wholeAt = 0;
  }

  /** Raises Problem. */
  async update() {
    if (!this.wholeAt || Date.now() - this.wholeAt > WHOLE_AGAIN_MS) {
      this.take(await api("heatmap"), []);
      this.wholeAt = Date.now();
      return;
    }
    const newest = await api("heatmap", { start: (this.endMs - this.stepMs) / 1000, step: this.stepMs / 1000 });
    // After a long sleep of this tab there would be a hole.
    if (newest.step_s * 1000 !== this.stepMs || Date.parse(newest.start) > this.endMs) {
      this.wholeAt = 0;
      return this.update();
    }
    this.take(newest, this.cards);
  }

  take(reply, before) {
    const lines = new Map(before.map((card) => [keyOf(card), card.line]));
    const startMs = Date.parse(reply.start), endMs = Date.parse(reply.end), stepMs = reply.step_s * 1000;
    const width = before.length ? (this.endMs - this.startMs) / stepMs : (endMs - startMs) / stepMs;
    const added = before.length ? Math.max(0, (endMs - this.endMs) / stepMs) : 0;
    const keep = before.length ? width - (endMs - startMs) / stepMs : 0;
    this.cvms = reply.cvms;
    this.cards = reply.cvms.flatMap((cvm) => cvm.cards.map(({ utilization_gpu_avg: newest, ...card }) => {
      card.cvm = cvm;
      card.state = stateIn(cvm, card.state);
      card.line = keep ? [...(lines.get(keyOf(card)) ?? Array(width).fill(null)).slice(added, added + keep), ...newest] : newest;
      return card;
    })).filter((card) => !isGone(card));
    this.stepMs = stepMs;
    this.endMs = endMs;
    this.startMs = endMs - width * stepMs;
    this.resolution = before.length ? this.resolution : reply.resolution;
  }
}

/** How a card is, in the page's words: silent in a CVM that its VMM runs no more is `stopped`, and nobody's trouble. As
 * `_with_stopped` in page.py. */
export const stateIn = (cvm, state) => (state === "silent" && cvm.outcome === "not_running" ? "stopped" : state);

/** Whether its CVM has answered without it for so long that it was taken away: as `_is_gone` in page.py. */
const isGone = (card) => card.state === "detached" && card.age_s > CARD_KEPT_S;

const PAST = new Set(["detached", "silent", "stale", "stopped"]);
/** Its latest values are not those of now. */
export const isPast = (card) => PAST.has(card.state);

/** By the word in the URL: what a figure counts and a filter shows. */
export const KINDS = {
  busy: ["busy", (card) => card.state === "ok" && card.utilization_gpu > BUSY_ABOVE],
  idle: ["idle", (card) => card.state === "ok" && card.utilization_gpu !== null && card.utilization_gpu <= BUSY_ABOVE],
  stale: ["stale", (card) => card.state === "stale"],
  silent: ["silent", (card) => card.state === "silent"],
  cc: ["CC not ready", (card) => card.cvm.cc_ready === false && card.state !== "detached"],
  contested: ["contested", (card) => card.state === "contested"],
  detached: ["detached", (card) => card.state === "detached"],
  stopped: ["stopped", (card) => card.state === "stopped"],
  ok: ["ok", (card) => card.state === "ok"],
};

const TROUBLE = ["contested", "detached", "silent", "stale"];

/** Those in trouble first, those that are stopped last, else as they come: as `_by_trouble` in page.py. */
export const byTrouble = (cards) => {
  const rank = ({ state }) => (TROUBLE.includes(state) ? TROUBLE.indexOf(state) : state === "stopped" ? TROUBLE.length + 1 : TROUBLE.length);
  return [...cards].sort((a, b) => rank(a) - rank(b));
};

/** CVMs in trouble first, those that do not run last, of both the newest first: as `_by_outcome` in page.py. */
export const byOutcome = (cvms) => {
  const rank = ({ outcome }) => (outcome === "ok" || outcome === "no_gpu" ? 1 : outcome === "not_running" ? 2 : 0);
  const since = (cvm) => Date.parse(cvm.since ?? 0);
  return [...cvms].sort((a, b) => rank(a) - rank(b) || (rank(a) === 1 ? 0 : since(b) - since(a)));
};

/** Cards that the filters of the URL leave. */
export function filtered(cards, asked) {
  const words = (asked.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const kind = KINDS[asked.state]?.[1] ?? (() => true);
  return cards.filter((card) => kind(card) && (!asked.host || card.cvm.vmm === asked.host) && words.every((word) => matches(card, word)));
}

const matches = (card, word) =>
  [card.uuid, card.bdf, card.host_bdf, card.model, card.cvm.vmm, card.cvm.vm_id, card.cvm.vm_name, card.cvm.app_id].some((value) => value?.toLowerCase().includes(word));
