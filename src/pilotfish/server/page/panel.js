/** One answer on the page: its tokens in their steps, what a step was, its figures. */

import { describeStep, formatMs, medianLatency } from "./run.js";

export class Panel {
  /**
   * @param {string} title
   * @param {string} empty what stands there before the first token
   */
  constructor(title, empty) {
    const fragment = document.getElementById("panel").content.cloneNode(true);
    this.root = fragment.querySelector(".panel");
    this.answer = fragment.querySelector(".answer");
    this.line = fragment.querySelector(".step-line");
    this.badge = fragment.querySelector(".badge");
    this.copy = fragment.querySelector(".copy");
    this.list = fragment.querySelector(".figures");
    fragment.querySelector("h2").textContent = title;
    this.answer.setAttribute("aria-label", title);
    this.answer.dataset.empty = empty;
    this.text = "";
    /** @type {WeakMap<Element, import("./run.js").Step>} */
    this.steps = new WeakMap();
    this.current = null;
    this.answer.addEventListener("pointerover", (event) => this.#point(event.target.closest(".step")));
    this.answer.addEventListener("pointerleave", () => this.#point(null));
    this.answer.addEventListener("focusin", (event) => this.#point(event.target.closest(".step")));
    this.answer.addEventListener("focusout", () => this.#point(null));
    this.answer.addEventListener("keydown", (event) => this.#move(event));
    this.copy.addEventListener("click", () => this.#copyText());
  }

  set running(value) {
    this.root.classList.toggle("running", value);
    this.answer.setAttribute("aria-busy", String(value));
    if (!value) this.copy.disabled = this.text === "";
  }

  /** @param {import("./run.js").Step} step */
  append(step) {
    const box = this.answer;
    const follow = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const outer = document.createElement("span");
    outer.className = "step";
    outer.tabIndex = -1;
    for (const token of step.tokens) {
      if (token.text === "") continue; // part of a character that a later token completes
      const inner = document.createElement("span");
      inner.className = token.is_draft ? "token draft" : "token target";
      inner.textContent = token.text;
      outer.append(inner);
      this.text += token.text;
    }
    this.steps.set(outer, step);
    box.append(outer);
    if (follow) box.scrollTop = box.scrollHeight;
  }

  /** @param {import("./run.js").Run} run */
  showFigures(run) {
    const number = (value, digits) => (value === null ? "–" : value.toFixed(digits));
    const latency = medianLatency(run);
    const accepted = run.acceptance === null ? `${run.numDrafts}` : `${Math.round(run.acceptance * 100)}%`;
    const figures = [
      ["tokens/s", number(run.tokensPerSecond, 1), "After the first token"],
      ["TTFT", run.ttft === null ? "–" : formatMs(run.ttft), "Time to the first token"],
      ["mean accepted length", number(run.meanLength, 2), "Tokens a step that verified drafts, the target's own included"],
      [run.acceptance === null ? "drafts accepted" : "acceptance", accepted, "Accepted drafts, of those proposed in the end"],
      ["ITL p50", latency === null ? "–" : formatMs(latency), "Median inter-token latency; the wait for a step is shared by its tokens"],
      ["tokens", `${run.numTokens}`, "Of the answer"],
    ];
    this.list.replaceChildren(...figures.map(([name, value, title]) => {
      const row = document.createElement("div");
      row.title = title;
      const term = document.createElement("dt");
      term.textContent = name;
      const figure = document.createElement("dd");
      figure.textContent = value;
      row.append(term, figure);
      return row;
    }));
  }

  /** @param {string} text such as the scheme's name; "" hides it */
  showBadge(text) {
    this.badge.textContent = text;
    this.badge.hidden = text === "";
  }

  #point(element) {
    this.current?.classList.remove("current");
    this.current = element;
    element?.classList.add("current");
    const step = element && this.steps.get(element);
    this.line.textContent = step ? describeStep(step) : "";
  }

  /** Arrow keys, Home and End go from step to step: hundreds of tab stops would be none. */
  #move(event) {
    const all = this.answer.querySelectorAll(".step");
    if (all.length === 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const focused = document.activeElement.closest(".step");
    const next = {
      ArrowRight: () => (focused ? focused.nextElementSibling : all[0]),
      ArrowLeft: () => (focused ? focused.previousElementSibling : all[all.length - 1]),
      Home: () => all[0],
      End: () => all[all.length - 1],
    }[event.key]?.();
    if (next) {
      event.preventDefault();
      next.focus();
    }
  }

  async #copyText() {
    try {
      await navigator.clipboard.writeText(this.text);
      this.copy.textContent = "Copied";
    } catch {
      // Without HTTPS there is no clipboard to write to: mark the text, for the person to copy it.
      getSelection().selectAllChildren(this.answer);
      this.copy.textContent = "Marked";
    }
    setTimeout(() => { this.copy.textContent = "Copy"; }, 1500);
  }
}
