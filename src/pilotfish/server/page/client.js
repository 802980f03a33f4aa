/** The HTTP side: requests, server-sent events, errors. Knows nothing of the page. */

/** An answer that is not what was asked for. `status` is 0 where the server was not reached or broke off. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, param?: string | null, code?: string | null, retryAfter?: string | null}} facts
   */
  constructor(message, { status = 0, param = null, code = null, retryAfter = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.param = param;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** Relative to the page, so that a proxy may put the server under a path. */
const url = (path) => new URL(path, document.baseURI);

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/**
 * The models that the server offers.
 * @param {string} key API key, or ""
 * @returns {Promise<string[]>} their names
 */
export async function listModels(key) {
  const response = await send("v1/models", { headers: headers(key) });
  const body = await response.json();
  return body.data.map((model) => model.id);
}

/**
 * One streamed chat completion.
 * @param {object} body the request
 * @param {string} key API key, or ""
 * @param {AbortSignal} signal
 * @yields {{chunk: object, at: number}} chunks as they come, with the time in ms at which each was read
 */
export async function* streamChat(body, key, signal) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  let ended = false;
  // To the last byte: leaving before it would look to the server as if nobody had wanted the answer.
  for await (const { data, at } of serverEvents(response, signal)) {
    if (ended || data === "[DONE]") {
      ended = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, { status: response.status, ...facts(chunk.error) });
    yield { chunk, at };
  }
  if (!ended) throw new ApiError("The stream ended before the answer did.");
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(url(path), { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  let problem = null;
  try {
    problem = (await response.json()).error;
  } catch {
    // Not an error object: a proxy's page, or an answer that broke off.
  }
  throw new ApiError(problem?.message ?? (response.statusText || "The server gave no reason."), {
    status: response.status,
    retryAfter: response.headers.get("Retry-After"),
    ...facts(problem),
  });
}

const facts = (problem) => ({ param: problem?.param ?? null, code: problem?.code ?? null });

/**
 * The events of a text/event-stream body: only their data, which is all that the API uses.
 * @yields {{data: string, at: number}}
 */
async function* serverEvents(response, signal) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  let lines = [];
  try {
    for (;;) {
      const { done, value } = await read(reader, signal);
      if (done) return;
      const at = performance.now();
      pending += decoder.decode(value, { stream: true });
      const parts = pending.split("\n");
      pending = parts.pop();
      for (const part of parts) {
        const line = part.endsWith("\r") ? part.slice(0, -1) : part;
        if (line.startsWith("data:")) {
          lines.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "" && lines.length > 0) {
          yield { data: lines.join("\n"), at };
          lines = [];
        }
      }
    }
  } finally {
    // Whoever stops listening, by an error or by leaving the loop, must not leave the server generating.
    reader.cancel().catch(() => {});
  }
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal.aborted) throw error;
    throw new ApiError("The connection broke off before the answer ended.");
  }
}
