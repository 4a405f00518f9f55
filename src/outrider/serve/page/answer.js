/** One answer as it streams: its tokens by origin, its rounds, and what they came to. */

import { el } from "./dom.js";
import { sum } from "./law.js";
import { Strip } from "./strip.js";

const ORIGINS = {
  accepted: "accepted: drafted and kept",
  correction: "correction: the model's own, after a rejected draft",
  bonus: "bonus: the model's own, after all drafts stood",
  plain: "plain: nothing was drafted",
};

export const perSecond = (value) => (value === null ? "–" : value.toFixed(value < 10 ? 1 : 0));
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const total = (rounds, name) => sum(rounds.map((round) => round[name]));

/**
 * What has come of one request: feed it chunks. `trace` is the server's own summary, once it is
 * there; until then the speed is by this page's clock, from the first round on.
 */
export class Tally {
  constructor() {
    Object.assign(this, { tokens: [], rounds: [], text: "", finish: null });
    Object.assign(this, { trace: null, rule: null, drafter: null, failed: false, first: null });
  }

  /** Takes a chunk; the tokens of the round in it, if it has one. */
  take(chunk, now = performance.now()) {
    const [choice] = chunk.choices;
    if (!choice) {
      const { trace, rule, drafter } = chunk.outrider;
      Object.assign(this, { trace, rule, drafter });
      return null;
    }
    this.text += choice.delta.content ?? "";
    this.finish = choice.finish_reason;
    this.failed ||= choice.outrider?.drafter_failed ?? false;
    if (!choice.outrider?.round) return null;
    const { tokens, round } = choice.outrider;
    this.first ??= { now, tokens: tokens.length };
    this.now = now;
    this.tokens.push(...tokens);
    this.rounds.push(round);
    return tokens;
  }

  get tokensPerS() {
    if (this.trace) return this.trace.decode_tokens_per_s;
    const since = this.first && (this.now - this.first.now) / 1000;
    return since ? (this.tokens.length - this.first.tokens) / since : null;
  }

  get tokensPerCall() {
    return this.rounds.length ? this.tokens.length / this.rounds.length : null;
  }

  get facts() {
    const drafted = total(this.rounds, "drafted");
    return [
      ["tokens per second", perSecond(this.tokensPerS)],
      ["tokens per target call", this.tokensPerCall?.toFixed(2) ?? "–"],
      ["of the drafts kept", percent(total(this.rounds, "accepted"), drafted)],
      ["tokens", String(this.tokens.length)],
    ];
  }
}

/** The card of an answer. */
export class Answer {
  constructor() {
    this.tally = new Tally();
    this.text = el("p", { className: "output" });
    this.strip = new Strip((round) => this.#light(round));
    this.facts = el("dl", { className: "facts" });
    this.notes = el("p", { className: "note end" });
    this.element = el(
      "article",
      { className: "answer", aria: { busy: "true", label: "Answer" } },
      this.text,
      this.strip.element,
      this.facts,
      this.notes,
    );
  }

  take(chunk) {
    const tokens = this.tally.take(chunk);
    if (tokens) {
      const number = this.tally.rounds.length;
      // A character that is not complete yet has no text, but its token counts.
      for (const { id, text, origin } of tokens.filter((token) => token.text)) {
        const title = `${ORIGINS[origin]} · round ${number} · token ${id}`;
        const data = { round: number };
        this.text.append(el("span", { className: `token ${origin}`, title, data }, text));
      }
      this.strip.add(this.tally.rounds.at(-1));
    }
    this.#tell();
  }

  /** No more comes; `stopped`: because the reader wanted no more, `broken`: because of an error. */
  end({ stopped = false, broken = false, seed } = {}) {
    const { finish, drafter, rule, failed } = this.tally;
    const told = [
      drafter && `drafter ${drafter}`,
      rule && `rule ${rule}`,
      seed !== undefined && `seed ${seed}`,
      failed && "the drafter failed on the way; the rest was decoded plainly",
      stopped && "stopped",
      broken && "broken off, and not part of the conversation",
      finish === "length" && "cut after the most tokens",
    ];
    this.notes.textContent = told.filter(Boolean).join(" · ");
    this.element.setAttribute("aria-busy", "false");
    this.#tell();
  }

  #tell() {
    const made = this.tally.facts.map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", { className: "value" }, value)),
    );
    this.facts.replaceChildren(...made);
  }

  #light(round) {
    for (const span of this.text.children) {
      span.classList.toggle("lit", Number(span.dataset.round) === round);
    }
  }
}
