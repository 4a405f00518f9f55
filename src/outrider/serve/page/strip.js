/** The rounds of an answer, a column each: kept drafts, the model's own token, what was dropped. */

import { count, el } from "./dom.js";

const CELL_PX = 8;
const MOST_DROPPED = 12; // a tree may drop dozens; the sentence below has the number

/** "Round 3: 5 drafted, 3 kept, 1 correction." */
export function sentence(round, number) {
  const { drafted, accepted, corrections, bonuses } = round;
  if (!drafted) return `Round ${number}: nothing drafted, 1 plain token.`;
  const own = corrections
    ? ", 1 correction"
    : bonuses
      ? ", 1 bonus"
      : ", and the answer ended there";
  return `Round ${number}: ${drafted} drafted, ${accepted} kept${own}.`;
}

/** Grows by a round at a time; tells which round is pointed at, or `null`. */
export class Strip {
  constructor(onChoose) {
    this.rounds = [];
    this.chosen = null;
    this.onChoose = onChoose;
    this.bars = el("div", {
      className: "strip scroll",
      tabIndex: 0,
      role: "img",
    });
    this.told = el("p", { className: "round-told", aria: { live: "off" } });
    this.element = el("div", { className: "rounds" }, this.bars, this.told);
    this.bars.addEventListener("keydown", (event) => this.#walk(event));
    this.bars.addEventListener("pointerover", ({ target }) => {
      const column = target.closest("[data-round]");
      if (column) this.#choose(Number(column.dataset.round));
    });
    this.bars.addEventListener("pointerleave", () => this.#choose(null));
    this.bars.addEventListener("blur", () => this.#choose(null));
  }

  add(round) {
    const number = this.rounds.push(round);
    const own = round.corrections ? "correction" : round.drafted ? "bonus" : "plain";
    const parts = [
      ["accepted", round.accepted],
      [own, round.corrections + round.bonuses],
      ["dropped", Math.min(MOST_DROPPED, round.drafted - round.accepted)],
    ];
    const cells = parts
      .filter(([, height]) => height > 0)
      .map(([kind, height]) => {
        const cell = el("i", { className: `cell ${kind}` });
        cell.style.height = `${height * CELL_PX - 2}px`;
        return cell;
      });
    this.bars.append(el("span", { className: "column", data: { round: number } }, ...cells));
    this.bars.scrollLeft = this.bars.scrollWidth;
    this.told.textContent = sentence(round, number);
    this.bars.setAttribute(
      "aria-label",
      `${count(number, "round")}. The last: ${sentence(round, number)} Arrow keys go through them.`,
    );
  }

  #walk(event) {
    const now = this.chosen ?? this.rounds.length + 1;
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 1, End: this.rounds.length };
    if (!(event.key in next) || !this.rounds.length) return;
    event.preventDefault();
    this.told.setAttribute("aria-live", "polite"); // the reader asked for it
    this.#choose(Math.max(1, Math.min(this.rounds.length, next[event.key])));
    this.bars.children[this.chosen - 1].scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  #choose(number) {
    this.bars.children[this.chosen - 1]?.classList.remove("lit");
    this.chosen = number;
    this.bars.children[number - 1]?.classList.add("lit");
    const shown = number ?? this.rounds.length;
    if (shown) this.told.textContent = sentence(this.rounds[shown - 1], shown);
    this.onChoose(number);
  }
}
