/** Three small charts as SVG. Each draws all of its data anew; the caller sees to it that this is not too often. */

/** In pixels: a chart is as wide as its place, so that its text is as large as the page's. */
const HEIGHT = 130;
const LEFT = 42;
const BOTTOM = 20;
const TOP = 14;
const PLOT_HEIGHT = HEIGHT - TOP - BOTTOM;
const MOST_STEPS = 80;

/**
 * Bars of the latest steps: accepted drafts below, the target's own tokens on top of them.
 * @param {SVGElement} svg
 * @param {import("./run.js").Step[]} steps
 */
export function drawSteps(svg, steps) {
  const shown = steps.slice(-MOST_STEPS);
  const top = Math.max(2, ...shown.map((step) => step.tokens.length));
  const width = plotWidth(svg) / Math.max(shown.length, 20);
  const parts = frame(svg, `${top}`, "0", shown.length ? `step ${shown[0].number}` : "", shown.at(-1)?.number ?? "");
  const height = (count) => (count / top) * PLOT_HEIGHT;
  shown.forEach((step, i) => {
    const box = { x: LEFT + i * width + 0.5, width: Math.max(width - 1, 1) };
    const drafts = height(step.drafts);
    const own = height(step.tokens.length - step.drafts);
    if (drafts) parts.push(element("rect", { ...box, y: base() - drafts, height: drafts, class: "bar-draft" }));
    if (own) parts.push(element("rect", { ...box, y: base() - drafts - own, height: own, class: "bar-target" }));
  });
  const tokens = steps.reduce((sum, step) => sum + step.tokens.length, 0);
  show(svg, parts, steps.length
    ? `Tokens a step: ${tokens} tokens in ${steps.length} steps, at most ${Math.max(...steps.map((s) => s.tokens.length))}`
    : "Tokens a step: no data yet");
}

/**
 * One bar for each position of a draft in its proposal, from 0 as in the metrics.
 * @param {SVGElement} svg
 * @param {number[]} values shares from 0 to 1
 */
export function drawAcceptance(svg, values) {
  const parts = frame(svg, "100%", "0%", "", "");
  const width = plotWidth(svg) / Math.max(values.length, 4);
  values.forEach((value, i) => {
    const height = value * PLOT_HEIGHT;
    const x = LEFT + i * width;
    parts.push(element("rect", { x: x + width * 0.15, width: width * 0.7, y: base() - height, height, class: "bar-draft" }));
    if (width >= 24) parts.push(label(x + width / 2, base() - height - 3, percent(value), "middle"));
    parts.push(label(x + width / 2, base() + 14, `${i}`, "middle"));
  });
  const words = values.map((value, i) => `position ${i}: ${percent(value)}`);
  show(svg, parts, `Acceptance by position: ${words.join(", ") || "no data yet"}`);
}

/**
 * Milliseconds a token, one line a run.
 * @param {SVGElement} svg
 * @param {{name: string, points: {token: number, ms: number}[], plain: boolean}[]} series
 */
export function drawLatency(svg, series) {
  const all = series.flatMap((one) => one.points.map((point) => point.ms));
  // One pause of the machine must not press all else flat: what is far above the rest is cut off at the top.
  const top = niceCeiling(Math.max((quantile(all, 0.98) ?? 0) * 1.15, 1));
  const longest = Math.max(2, ...series.map((one) => one.points.at(-1)?.token ?? 0));
  const parts = frame(svg, `${top} ms`, "0", all.length ? "token 1" : "", all.length ? longest : "");
  for (const { points, plain } of series) {
    const places = points.map(({ token, ms }) => {
      const y = base() - Math.min(ms / top, 1.05) * PLOT_HEIGHT;
      return `${(LEFT + ((token - 1) / (longest - 1)) * plotWidth(svg)).toFixed(1)},${y.toFixed(1)}`;
    });
    if (places.length > 0) parts.push(element("polyline", { points: places.join(" "), class: plain ? "line plain" : "line" }));
  }
  const words = series.filter((one) => one.points.length > 0).map(({ name, points }) => (
    `${name}: median ${quantile(points.map((point) => point.ms), 0.5).toFixed(1)} ms a token`
  ));
  show(svg, parts, `Inter-token latency: ${words.join(", ") || "no data yet"}`);
}

function quantile(values, share) {
  const ordered = [...values].sort((a, b) => a - b);
  return ordered[Math.floor((ordered.length - 1) * share)];
}

const base = () => HEIGHT - BOTTOM;
const fullWidth = (svg) => Math.max(svg.clientWidth, LEFT + 80);
const plotWidth = (svg) => fullWidth(svg) - LEFT;
const percent = (share) => `${Math.round(share * 100)}%`;

function frame(svg, high, low, first, last) {
  const right = fullWidth(svg);
  return [
    element("line", { x1: LEFT, x2: right, y1: base(), y2: base(), class: "axis" }),
    element("line", { x1: LEFT, x2: right, y1: TOP, y2: TOP, class: "axis" }),
    label(LEFT - 6, TOP + 4, high, "end"),
    label(LEFT - 6, base() + 4, low, "end"),
    label(LEFT, HEIGHT - 4, first, "start"),
    label(right, HEIGHT - 4, `${last}`, "end"),
  ];
}

function label(x, y, text, anchor) {
  const node = element("text", { x, y, "text-anchor": anchor });
  node.textContent = text;
  return node;
}

function element(name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function show(svg, parts, description) {
  svg.setAttribute("viewBox", `0 0 ${fullWidth(svg)} ${HEIGHT}`);
  svg.replaceChildren(...parts);
  svg.setAttribute("aria-label", description);
}

/** The next round number. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((candidate) => candidate >= value);
}
