// Asks the API. The token, where one is needed, is kept by this tab alone and travels in a header, never in a URL.

const TOKEN = "gpu-telemetry-token";
const LIMIT_MS = 20_000;

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  drop: () => sessionStorage.removeItem(TOKEN),
};

/** Why there is no answer: `code` is the API's word, or `away` where nobody answers. */
export class Problem extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

export function query(values) {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

/** What a path beside this page answers, as text. Raises Problem. */
async function receive(path, values) {
  const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  let reply, body;
  try {
    reply = await fetch(path + query(values), { headers, signal: AbortSignal.timeout(LIMIT_MS), cache: "no-cache" });
    body = await reply.text();
  } catch {
    throw new Problem(0, "away", "The aggregator does not answer.");
  }
  if (reply.ok) return body;
  const found = parsed(body, reply.status);
  throw new Problem(reply.status, found.code ?? `http_${reply.status}`, found.detail ?? `HTTP ${reply.status}`);
}

function parsed(body, status) {
  try {
    return JSON.parse(body);
  } catch {
    // Not ours: a proxy in between says that we are away.
    throw new Problem(status, "away", `HTTP ${status}`);
  }
}

/** JSON of a path beside this page. Raises Problem. */
export const ask = async (path, values = {}) => parsed(await receive(path, values), 200);
export const api = (path, values) => ask(`api/v1/${path}`, values);
/** What the API has in another form. Raises Problem. */
export const apiText = (path, values) => receive(`api/v1/${path}`, values);
