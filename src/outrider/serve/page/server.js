/** Talks to the server: what it offers, an answer as it streams, its errors as they are worded. */

const KEY = "outrider-key";

/** What the server refused, in its own words. */
export class Refusal extends Error {
  constructor(status, error, retryAfter = null) {
    super(error.message);
    Object.assign(this, { status, code: error.code, retryAfter });
  }
}

/** Keep a key for this tab; whether there is one. */
export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => sessionStorage.getItem(KEY) !== null;

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  if (!key) return more;
  // A header holds bytes; the server reads them as UTF-8.
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  return { ...more, Authorization: `Bearer ${bytes}` };
}

async function ask(path, request) {
  let response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, { message: "The server cannot be reached. Is it still running?" });
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const error = told?.error ?? { message: `The server answered with status ${response.status}.` };
  throw new Refusal(response.status, error, response.headers.get("Retry-After"));
}

/** The server's index: its model, drafters, rules and limits. */
export async function offers() {
  return (await ask("/", { headers: headers({ Accept: "application/json" }) })).json();
}

/**
 * Chunks of a chat completion, as they come; ends when the server says so, or raises.
 * Aborting the signal closes the connection, at which the server frees the place.
 */
export async function* chat(body, signal) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(response.status, chunk.error);
    yield chunk;
  }
  throw new Refusal(0, { message: "The connection broke before the answer was done." });
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield part.replace(/^data: /, "");
  }
}
