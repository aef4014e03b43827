// Where ticks of a time axis stand and what they say, in the browser's time zone.

import { clock, dayOfMonth, month } from "./dom.js";

const M = 60_000, H = 60 * M, D = 24 * H;
const STEPS = [M, 2 * M, 5 * M, 10 * M, 15 * M, 30 * M, H, 2 * H, 3 * H, 6 * H, 12 * H, D, 2 * D, 7 * D, 14 * D, 30 * D, 91 * D];

/** [ms, text] of at most so many ticks. */
export function ticks(startMs, endMs, most) {
  const step = STEPS.find((one) => (endMs - startMs) / one <= most) ?? 182 * D;
  const found = [];
  const at = new Date(startMs);
  at.setHours(0, 0, 0, 0);
  if (step >= 30 * D) {
    const months = Math.round(step / (30 * D));
    at.setDate(1);
    while (at.getTime() < endMs) {
      if (at.getTime() >= startMs) found.push([at.getTime(), `${month(at)} ${at.getFullYear()}`]);
      at.setMonth(at.getMonth() + months);
    }
  } else if (step >= D) {
    while (at.getTime() < endMs) {
      if (at.getTime() >= startMs) found.push([at.getTime(), dayOfMonth(at.getTime())]);
      at.setDate(at.getDate() + step / D);
    }
  } else {
    // From each midnight on: days with a change of daylight saving have other lengths.
    while (at.getTime() < endMs) {
      const next = new Date(at);
      next.setDate(next.getDate() + 1);
      for (let ms = at.getTime(); ms < Math.min(next.getTime(), endMs); ms += step) {
        if (ms >= startMs) found.push([ms, ms === at.getTime() ? dayOfMonth(ms) : clock(ms)]);
      }
      at.setTime(next.getTime());
    }
  }
  return found;
}
