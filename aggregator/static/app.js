// Which view the URL names, when it is brought up to date, and what is said when nobody answers.

import { ask, Problem, query, token } from "./api.js";
import { clock, h, zone } from "./dom.js";
import { cardView, cvmView, placeView } from "./details.js";
import { Fleet } from "./fleet.js";
import { Overview } from "./overview.js";
import { reportsView } from "./reports.js";

const REFRESH_MS = 15_000, RETRY_MS = 5_000, RETRY_SLOW_MS = 60_000;
// Of the time that an answer takes, so many times lie between two, up to a limit.
const EASE = 20, EASE_AT_MOST_MS = 60_000;
// When "as of" is said to be old.
const OLD_MS = 2 * REFRESH_MS;
const VIEWS = { card: cardView, slot: placeView, place: placeView, cvm: cvmView, reports: reportsView };

const view = document.querySelector("#view"), fresh = document.querySelector("#fresh"), notices = document.querySelector("#notices");
const signOut = document.querySelector("#sign-out");
const fleet = new Fleet();
let overview = null, timer = 0, turn = 0, noticesTimer = 0, noticesTurn = 0;
// When what is shown was answered, where it is renewed.
let asOfMs = 0;
// What the URL asked for when a view was put there last.
let placed = null;

const asked = () => Object.fromEntries(new URLSearchParams(location.search));

/** Another view. */
function go(target) {
  history.pushState(null, "", target || location.pathname);
  show({ moved: true });
}

/** The same view with other filters: the URL follows, no step back is made of each letter. */
function change(values) {
  const next = Object.fromEntries(Object.entries({ ...asked(), ...values }).filter(([, value]) => value));
  history.replaceState(null, "", query(next) || location.pathname);
  if (fleet.wholeAt) overview.show(fleet, asked());
}

async function show({ moved = false } = {}) {
  const mine = ++turn;
  moved ||= placed !== null && placed !== location.search && VIEWS[asked().view] !== undefined;
  clearTimeout(timer);
  const values = asked();
  const began = performance.now();
  mark(values);
  let again = REFRESH_MS;
  try {
    if (VIEWS[values.view]) {
      if (moved) tellFresh("Loading…");
      const element = await VIEWS[values.view](values, go);
      if (mine !== turn) return;
      // Reports are long and read slowly: they stay as they were asked for.
      if (moved || values.view !== "reports") place(element, moved);
      placed = location.search;
      if (values.view === "reports") again = 0;
    } else {
      if (moved && fleet.wholeAt) drawOverview();
      await fleet.update();
      if (mine !== turn) return;
      drawOverview();
    }
    say(null);
    const nowMs = Date.now();
    tellFresh(`as of ${clock(nowMs, true)} ${zone}`, again ? nowMs : 0);
    if (again) again = Math.max(again, Math.min(EASE_AT_MOST_MS, EASE * (performance.now() - began)));
    if (moved) view.focus({ preventScroll: true });
  } catch (problem) {
    if (mine !== turn) return;
    if (!(problem instanceof Problem)) throw problem;
    again = failed(problem, moved);
  }
  if (again) timer = setTimeout(() => show(), again);
}

/** `atMs`: when it was answered; 0 for what does not grow old. */
function tellFresh(words, atMs = 0) {
  asOfMs = atMs;
  fresh.classList.remove("old");
  fresh.textContent = words;
}

/** It grows old whatever else is waited for. */
function tellAge() {
  if (!asOfMs || Date.now() - asOfMs <= OLD_MS || fresh.classList.contains("old")) return;
  fresh.classList.add("old");
  fresh.append(", old");
}

function drawOverview() {
  overview ??= new Overview(change, go);
  if (overview.element.parentElement !== view) view.replaceChildren(overview.element);
  placed = location.search;
  overview.show(fleet, asked());
}

/** A view anew, with open parts, focus and place on the page as they were. */
function place(element, moved) {
  if (moved) {
    view.replaceChildren(element);
    scrollTo(0, 0);
    return;
  }
  // Somebody reads a chart's values, or is choosing a part of it.
  if (view.querySelector(".cross, .drag")) return;
  const old = view.querySelectorAll("a, button, svg, summary, .scroll"), index = [...old].indexOf(document.activeElement);
  const height = view.offsetHeight;
  view.style.minHeight = `${height}px`;
  view.replaceChildren(element);
  if (index >= 0) view.querySelectorAll("a, button, svg, summary, .scroll")[index]?.focus({ preventScroll: true });
  requestAnimationFrame(() => { view.style.minHeight = ""; });
}

function mark(values) {
  for (const link of document.querySelectorAll(".top nav a")) {
    if ((link.dataset.view ?? "") === (values.view === "reports" ? "reports" : values.view ? "-" : "")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const subject = { card: values.uuid, slot: values.host_bdf, place: values.bdf, cvm: values.vm_id, reports: values.report ?? "reports" }[values.view];
  document.title = subject ? `${subject} · GPU fleet` : "GPU fleet";
}

/** How long until the next try. */
function failed(problem, moved) {
  if (problem.code === "unauthorized") {
    signIn(token.get() ? "This token is not known." : "");
    token.drop();
    return 0;
  }
  if (problem.code === "away") say("The aggregator does not answer. What is shown is as it was.");
  else if (problem.code === "database") say(`The database is away; polling goes on, and what is polled waits to be written. What is shown is as it was. ${problem.message}`);
  else if (moved || problem.status < 500) {
    view.replaceChildren(h("section", {}, h("h2", {}, "Nothing to show"), h("p", { class: "error", role: "alert" }, problem.message), h("p", {}, h("a", { href: "?" }, "Back to all cards"))));
    placed = "";
    tellFresh("");
    return problem.status < 500 ? 0 : RETRY_SLOW_MS;
  } else say(problem.message);
  if (fresh.textContent === "Loading…") tellFresh("");
  return problem.code === "too_slow" ? RETRY_SLOW_MS : RETRY_MS;
}

/** What went wrong, above all else; `null`: nothing. */
function say(words) {
  let box = document.querySelector("#alarm");
  if (!words) return void box?.remove();
  if (!box) {
    box = h("p", { class: "note alarm", role: "alert", id: "alarm" });
    notices.before(box);
  }
  if (box.textContent !== words) box.textContent = words;
}

/** The operator's line, VMMs that are away, a database that takes nothing: of the whole fleet, not for each token. */
async function tellNotices() {
  let found;
  try {
    found = await ask("notices");
  } catch {
    return;
  }
  if (signingIn()) return;
  const lines = [
    ...(found.notice ? [h("p", { class: "note" }, found.notice)] : []),
    ...(found.database ? [h("p", { class: "note alarm" }, `The database is away; polling goes on and what is polled waits to be written. ${found.database}`)] : []),
    ...Object.entries(found.vmms_away).sort().map(([vmm, why]) => h("p", { class: "note alarm" }, `VMM ${vmm} cannot be reached. ${why}`)),
  ];
  const said = lines.map((line) => line.textContent).join("\n");
  if (notices.dataset.said !== said) {
    notices.dataset.said = said;
    notices.replaceChildren(...lines);
  }
}

/** Notices are renewed whatever else takes long. */
async function renewNotices() {
  const mine = ++noticesTurn;
  clearTimeout(noticesTimer);
  await tellNotices();
  if (mine === noticesTurn && !document.hidden && !signingIn()) noticesTimer = setTimeout(renewNotices, REFRESH_MS);
}

const signingIn = () => view.querySelector(".sign-in") !== null;

function signIn(problem) {
  clearTimeout(noticesTimer);
  signOut.hidden = true;
  tellFresh("");
  overview = null;
  fleet.wholeAt = 0;
  notices.replaceChildren();
  delete notices.dataset.said;
  say(null);
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, spellcheck: "false", "aria-describedby": "token-help" });
  const submit = (event) => {
    event.preventDefault();
    token.set(field.value.trim());
    signOut.hidden = false;
    view.replaceChildren(h("p", {}, "Loading…"));
    show({ moved: true });
    renewNotices();
  };
  view.replaceChildren(h("form", { class: "panel sign-in", onsubmit: submit }, h("h2", {}, "Sign in"), problem ? h("p", { class: "error", role: "alert" }, problem) : null,
    h("label", { for: "token" }, "Token"), field, h("button", { type: "submit" }, "Sign in"),
    h("p", { class: "soft", id: "token-help" }, "A line of the aggregator's token file. This tab keeps it until it is closed.")));
  field.focus();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  if (!link || link.origin !== location.origin || link.pathname !== location.pathname || link.download || link.hash || event.defaultPrevented) return;
  if (event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  go(link.search);
});
signOut.addEventListener("click", () => { token.drop(); signIn(""); });
addEventListener("popstate", () => show({ moved: true }));
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  clearTimeout(noticesTimer);
  if (document.hidden || signingIn()) return;
  show();
  renewNotices();
});
signOut.hidden = !token.get();
show({ moved: Boolean(asked().view) });
renewNotices();
setInterval(tellAge, 1_000);
