/** One answer as it comes: its steps, and the figures that follow from them. Knows nothing of the page. */

/**
 * What one engine step gave.
 * @typedef {{number: number, tokens: {text: string, is_draft: boolean}[], drafts: number, ms: number, first: boolean}} Step
 * `ms` is the time since the step before it; of the first step, since the request was sent.
 */

export class Run {
  /** @param {number} start when the request was sent, in ms */
  constructor(start) {
    this.start = start;
    /** @type {Step[]} */
    this.steps = [];
    this.text = "";
    this.numTokens = 0;
    this.numDrafts = 0;
    this.finishReason = null;
    /** The server's own figures; they come with the last chunk. */
    this.stats = null;
    this.last = start;
  }

  /**
   * @param {object} chunk of the stream
   * @param {number} at when it was read, in ms
   * @returns {Step | null} the step that it brought, if it brought one
   */
  add(chunk, at) {
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content ?? "";
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
    if (chunk.pilotfish?.stats) this.stats = chunk.pilotfish.stats;
    const tokens = chunk.pilotfish?.tokens ?? (text ? [{ text, is_draft: false }] : []);
    this.text += text;
    if (tokens.length === 0) return null;
    const drafts = tokens.filter((token) => token.is_draft).length;
    const step = { number: this.steps.length + 1, tokens, drafts, ms: at - this.last, first: this.steps.length === 0 };
    this.last = at;
    this.steps.push(step);
    this.numTokens += tokens.length;
    this.numDrafts += drafts;
    return step;
  }

  /** Milliseconds to the first token. */
  get ttft() {
    return this.stats?.ttft_ms ?? this.steps[0]?.ms ?? null;
  }

  /** Decoding speed in tokens a second, without the wait for the first token. */
  get tokensPerSecond() {
    if (this.stats?.tokens_per_second) return this.stats.tokens_per_second;
    if (this.steps.length < 2) return null;
    const elapsed = this.last - this.start - this.steps[0].ms;
    return elapsed > 0 ? ((this.numTokens - this.steps[0].tokens.length) / elapsed) * 1000 : null;
  }

  /** Tokens a step: so far over all steps, in the end over those that verified a draft. */
  get meanLength() {
    if (this.stats) return this.stats.mean_accepted_length;
    return this.steps.length ? this.numTokens / this.steps.length : null;
  }

  /** Share of the proposed drafts that were accepted; only the server knows how many were proposed. */
  get acceptance() {
    return this.stats?.num_drafted ? this.stats.num_accepted / this.stats.num_drafted : null;
  }

  /**
   * Milliseconds a token after each step but the first, by the number of tokens so far: the wait for the step, shared
   * by its tokens.
   */
  get latencies() {
    let token = this.steps[0]?.tokens.length ?? 0;
    return this.steps.slice(1).map((step) => {
      token += step.tokens.length;
      return { token, ms: step.ms / step.tokens.length };
    });
  }

  /**
   * How often the draft at each position was accepted.
   * @returns {{values: number[], final: boolean}} until the server says: of all steps, so at most the true share
   */
  get acceptanceByPosition() {
    if (this.stats) return { values: this.stats.acceptance_by_position, final: true };
    const counts = [];
    for (const { drafts } of this.steps) {
      for (let position = 0; position < drafts; position += 1) counts[position] = (counts[position] ?? 0) + 1;
    }
    return { values: counts.map((count) => count / this.steps.length), final: false };
  }
}

/**
 * The median inter-token latency in ms, or null below two steps. The server's own is the time between tokens, which is
 * none at all between those of one step.
 * @param {Run} run
 */
export function medianLatency(run) {
  return median(run.steps.slice(1).flatMap((step) => step.tokens.map(() => step.ms / step.tokens.length)));
}

/**
 * The middle of some numbers, or null of none.
 * @param {number[]} values
 */
function median(values) {
  if (values.length === 0) return null;
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}

/**
 * What a step was, in words: "step 12: 3 drafts accepted, 4 tokens, 8 ms".
 * @param {Step} step
 */
export function describeStep(step) {
  const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  const wait = step.first ? ` to the first token` : "";
  return `step ${step.number}: ${count(step.drafts, "draft")} accepted, ${count(step.tokens.length, "token")}, `
    + `${formatMs(step.ms)}${wait}`;
}

/** @param {number} ms */
export const formatMs = (ms) => `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
