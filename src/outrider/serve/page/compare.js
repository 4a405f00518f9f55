/** The same request with a draft and without: speeds, calls, and whether the texts are equal. */

import { perSecond } from "./answer.js";
import { el } from "./dom.js";

const INVARIANT = ["coupled", "greedy"];

/** Whether two runs gave the same tokens, and what that means. */
export function verdict(drafted, plain) {
  const ids = (tally) => tally.tokens.map((token) => token.id).join();
  const same = ids(drafted) === ids(plain);
  if (same) return { same, text: "The same text, token for token." };
  const why = INVARIANT.includes(drafted.rule)
    ? "On this runtime a near-tie may fall to the other side when several rows are scored at once."
    : `Rule ${drafted.rule} keeps the law of the texts, not the text of a seed.`;
  return { same, text: `The texts differ. ${why}` };
}

function bar(label, tally, most) {
  const fill = el("i", { className: "fill" });
  fill.style.width = `${most ? (100 * (tally.tokensPerS ?? 0)) / most : 0}%`;
  return [
    el("dt", {}, label),
    el(
      "dd",
      {},
      el("span", { className: "track", aria: { hidden: "true" } }, fill),
      el("span", { className: "measure" }, el("b", {}, perSecond(tally.tokensPerS)), " tokens/s, "),
      el(
        "span",
        { className: "measure" },
        el("b", {}, tally.tokensPerCall?.toFixed(2) ?? "–"),
        " per target call",
      ),
    ),
  ];
}

/** The panel under an answer; `show` it again as the plain run goes on, `done` at its end. */
export class Comparison {
  constructor(drafted) {
    this.drafted = drafted;
    this.bars = el("dl", { className: "speeds" });
    this.told = el("p", { className: "verdict", role: "status" });
    this.element = el(
      "div",
      { className: "comparison", role: "group", aria: { label: "Compared with plain decoding" } },
      this.bars,
      this.told,
    );
  }

  show(plain, running = true) {
    const most = Math.max(this.drafted.tokensPerS ?? 0, plain.tokensPerS ?? 0);
    this.bars.replaceChildren(
      ...bar("with drafts", this.drafted, most),
      ...bar("plain", plain, most),
    );
    if (running) this.told.textContent = "Plain decoding, with the same seed, is running.";
  }

  done(plain) {
    this.show(plain, false);
    const { same, text } = verdict(this.drafted, plain);
    const times = this.drafted.tokensPerS / plain.tokensPerS;
    const fast = `${times.toFixed(2)} × plain speed in this one run. `;
    const speed = Number.isFinite(times) ? fast : "";
    this.element.dataset.same = same;
    this.told.replaceChildren(speed, el("strong", {}, `${same ? "=" : "≠"} ${text}`));
    if (same) return;
    const summary = el("summary", {}, "The plain text");
    this.element.append(el("details", {}, summary, el("p", { className: "output" }, plain.text)));
  }
}
