/** The playground: the form, one or two runs of its prompt, and what came of them. */

import { drawAcceptance, drawLatency, drawSteps } from "./charts.js";
import { ApiError, listModels, streamChat } from "./client.js";
import { Panel } from "./panel.js";
import { Run } from "./run.js";

const byId = (id) => document.getElementById(id);
const form = byId("form");
const prompt = byId("prompt");

/** Null while nothing runs. */
let controller = null;

/** What the charts show: the run, and the one without speculation. */
let drawn = [new Run(0), null];

// ---- the request ----

/** A field's number, or null where it is empty. */
function numberOf(id) {
  const { value } = byId(id);
  return value === "" ? null : Number(value);
}

function requestBody() {
  const system = byId("system").value.trim();
  const body = {
    model: byId("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: prompt.value }],
    stream: true,
    stream_options: { include_usage: true },
    include_speculation_stats: true,
  };
  const fields = { temperature: "temperature", top_p: "top-p", max_tokens: "max-tokens", seed: "seed" };
  for (const [name, id] of Object.entries(fields)) {
    const value = numberOf(id);
    if (value !== null) body[name] = value;
  }
  return body;
}

/** What the request says of speculation; null leaves it to the server. */
function speculationSetting() {
  const drafts = numberOf("num-drafts");
  return drafts === null ? null : { enabled: true, num_drafts: drafts };
}

// ---- runs ----

async function start() {
  if (controller !== null) return;
  clearMessages();
  if (prompt.value.trim() === "") {
    showError(new ApiError("The prompt is empty: type something to send."));
    prompt.focus();
    return;
  }
  // A browser cannot point at a wrong field in settings that are folded up.
  if (!form.checkValidity()) byId("settings").open = true;
  if (!form.reportValidity()) return;
  controller = new AbortController();
  setRunning(true);
  try {
    if (byId("model").value === "") await fillModels();
    await (byId("compare").checked ? comparison() : single());
  } catch (error) {
    if (error.name === "AbortError") announce("Stopped.");
    else showError(error);
    if (error.status === 401) byId("api-key").focus();
  } finally {
    controller = null;
    setRunning(false);
  }
}

async function single() {
  const panel = new Panel("Answer", "Waiting for the first token …");
  byId("panels").replaceChildren(panel.root);
  const setting = speculationSetting();
  const body = { ...requestBody(), ...(setting ? { speculation: setting } : {}) };
  const run = await stream(body, panel, (current) => drawCharts(current, null));
  announce(`Answer complete: ${run.numTokens} tokens.`);
}

/** The same prompt with and without speculation, one after the other: at once, each would slow the other. */
async function comparison() {
  const panels = [
    new Panel("With speculation", "Waiting for the first token …"),
    new Panel("Without speculation", "Runs when the other has ended."),
  ];
  byId("panels").replaceChildren(...panels.map((panel) => panel.root));
  const body = requestBody();
  let seedNote = "";
  if (body.seed === undefined && body.temperature !== 0) {
    body.seed = crypto.getRandomValues(new Uint32Array(1))[0];
    seedNote = ` Both runs had the seed ${body.seed}.`;
  }
  const fast = await stream({ ...body, speculation: speculationSetting() ?? { enabled: true } }, panels[0],
    (run) => drawCharts(run, null));
  panels[1].answer.dataset.empty = "Waiting for the first token …";
  const plain = await stream({ ...body, speculation: { enabled: false } }, panels[1], (run) => drawCharts(fast, run));
  showVerdict(fast, plain, seedNote);
}

/**
 * @param {object} body
 * @param {Panel} panel
 * @param {(run: Run) => void} draw
 */
async function stream(body, panel, draw) {
  const run = new Run(performance.now());
  let frame = 0;
  const update = () => {
    frame = 0;
    panel.showFigures(run);
    draw(run);
  };
  panel.running = true;
  panel.showBadge("running");
  try {
    for await (const { chunk, at } of streamChat(body, byId("api-key").value, controller.signal)) {
      const step = run.add(chunk, at);
      if (step) panel.append(step);
      // At most once a frame: tokens may come faster than a screen shows them.
      if (frame === 0) frame = requestAnimationFrame(update);
    }
  } finally {
    cancelAnimationFrame(frame);
    update();
    panel.running = false;
    panel.showBadge(badge(run, body.speculation));
    if (run.numTokens === 0) panel.answer.dataset.empty = run.finishReason ? "The answer is empty." : "No answer.";
  }
  return run;
}

/** What drafted, as far as this request let it, and why the answer ended. */
function badge(run, speculation) {
  const reason = { length: "cut at max tokens", stop: "complete" }[run.finishReason] ?? run.finishReason ?? "stopped";
  if (!run.stats) return reason;
  const { scheme, num_drafts: most, exact } = run.stats;
  const drafts = Math.min(most, speculation?.num_drafts ?? most);
  if (scheme === "none" || speculation?.enabled === false || drafts === 0) return `plain decoding · ${reason}`;
  return `${scheme}, ${drafts} draft${drafts === 1 ? "" : "s"} a step${exact ? "" : ", LOSSY"} · ${reason}`;
}

function drawCharts(run, plain) {
  drawn = [run, plain];
  drawSteps(byId("chart-steps"), run.steps);
  const { values, final } = run.acceptanceByPosition;
  drawAcceptance(byId("chart-acceptance"), values);
  byId("acceptance-note").textContent = final ? "of drafts proposed there" : "so far, of all steps";
  const series = [{ name: plain ? "with speculation" : "this answer", points: run.latencies, plain: false }];
  if (plain) series.push({ name: "without", points: plain.latencies, plain: true });
  drawLatency(byId("chart-latency"), series);
  byId("latency-note").textContent = plain ? "solid: with, dashed: without speculation" : "a step's wait, shared by its tokens";
}

// ---- what the page says ----

function showVerdict(fast, plain, seedNote) {
  const box = byId("verdict");
  const say = (tag, className, text) => {
    const node = document.createElement(tag);
    node.className = className;
    node.textContent = text;
    return node;
  };
  const ratio = fast.tokensPerSecond && plain.tokensPerSecond ? fast.tokensPerSecond / plain.tokensPerSecond : null;
  const speed = ratio === null ? "too few tokens to compare speeds" : "the speed of plain decoding";
  const equal = fast.text === plain.text;
  const parts = [];
  if (ratio !== null) parts.push(say("strong", "", `${ratio.toFixed(2)}×`));
  parts.push(say("span", "", speed));
  parts.push(equal ? say("span", "equal", "✓ The texts are equal.") : say("span", "differ", differenceOf(fast, plain)));
  const note = "Speed is tokens a second after the first token; the prompt's cache may help the second run's first token.";
  parts.push(say("p", "note", note + seedNote));
  box.replaceChildren(...parts);
  box.hidden = false;
}

function differenceOf(fast, plain) {
  let same = 0;
  while (same < fast.text.length && fast.text[same] === plain.text[same]) same += 1;
  const reason = fast.stats?.exact === false ? " (this server verifies with a lossy rule)" : "";
  return `✗ The texts differ from character ${same + 1} on${reason}.`;
}

function showError(error) {
  const known = error instanceof ApiError;
  const message = document.createElement("p");
  message.textContent = `${known && error.status ? `${error.status}: ` : ""}${error.message}`;
  const parts = [message];
  const details = known ? errorDetails(error) : "";
  if (details) {
    const second = document.createElement("p");
    second.textContent = details;
    parts.push(second);
  }
  byId("error").replaceChildren(...parts);
  byId("error").hidden = false;
  if (known && error.status === 401) byId("key-row").hidden = false;
}

function errorDetails(error) {
  const parts = [];
  if (error.param) parts.push(`Parameter: ${error.param}.`);
  if (error.retryAfter) parts.push(`Try again in ${error.retryAfter} s.`);
  if (error.status === 401) parts.push("Give the key below the prompt and send again.");
  return parts.join(" ");
}

function clearMessages() {
  byId("error").hidden = true;
  byId("verdict").hidden = true;
  announce("");
}

function announce(text) {
  byId("announce").textContent = text;
}

function setRunning(running) {
  const hadFocus = document.activeElement;
  byId("send").disabled = running;
  byId("stop").disabled = !running;
  // A button that is disabled loses the focus, and the keyboard its place.
  if (running && hadFocus === byId("send")) byId("stop").focus();
  if (!running && hadFocus === byId("stop")) byId("send").focus();
}

// ---- models, theme, keys ----

/** Raises what the server said if it gave no list. */
async function fillModels() {
  const names = await listModels(byId("api-key").value);
  byId("model").replaceChildren(...names.map((name) => new Option(name, name)));
}

async function refreshModels() {
  try {
    await fillModels();
    byId("error").hidden = true;
  } catch (error) {
    showError(error);
    // Only where nobody is writing anything: the focus must not go from under someone's hands.
    if (error.status === 401 && document.activeElement === document.body) byId("api-key").focus();
  }
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function labelTheme() {
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
}

function storedTheme(value) {
  try {
    if (value) localStorage.setItem("pilotfish-theme", value);
    return localStorage.getItem("pilotfish-theme");
  } catch {
    return null; // storage may be forbidden; the choice then lasts as long as the page
  }
}

function begin() {
  const theme = storedTheme(null);
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  labelTheme();
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    storedTheme(document.documentElement.dataset.theme);
    labelTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", labelTheme);

  if (matchMedia("(max-width: 40rem)").matches) byId("settings").open = false;
  byId("panels").replaceChildren(new Panel("Answer", "The answer will appear here, step by step.").root);
  drawCharts(...drawn);
  addEventListener("resize", () => drawCharts(...drawn));
  byId("acceptance-note").textContent = "of drafts proposed there";

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  byId("stop").addEventListener("click", () => controller?.abort());
  byId("api-key").addEventListener("change", () => {
    if (controller === null) refreshModels();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      start();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") controller?.abort();
  });
  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      prompt.value = chip.dataset.prompt;
      prompt.focus();
    });
  }
  refreshModels();
}

begin();
