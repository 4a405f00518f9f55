/** A round on "The cat sat", played step by step with drawn numbers. */

import { count, el } from "./dom.js";
import { parts, playRound, stepsOf } from "./law.js";
import { WORDS, number } from "./laws.js";

const PREFIX = "The cat sat";
const FIRST_SEED = 22; // two guesses stand and the third one does not
const OPENING = [
  { words: ["on", "by", "under"], p: [70, 20, 10], q: [80, 15, 5] },
  { words: ["the", "a", "my"], p: [75, 15, 10], q: [65, 25, 10] },
];
const CLOSING = { words: ["and", "all", "."], p: [30, 10, 60] };

/** Fills the place; plays the same round again when the laws change. */
export function startRound(place, laws) {
  let seed = FIRST_SEED;
  let at = 0;
  let places, round, steps;

  const line = el("p", { className: "sentence-line" });
  const told = el("p", { className: "told", aria: { live: "polite" } });
  const panel = el("div", { className: "panel" });
  const progress = el("p", { className: "note steps" });
  const button = (label, className, onclick) =>
    el("button", { type: "button", className, onclick }, label);
  const back = button("Back", "quiet", () => move(at - 1));
  const next = button("Next", "main", () => move(at + 1));
  const again = button("Play again", "quiet", () => play(seed + 1));
  const seedInput = el("input", { type: "number", min: 0, max: 2 ** 32 - 1, step: 1 });
  seedInput.addEventListener("change", () => {
    if (seedInput.value !== "" && seedInput.checkValidity()) play(seedInput.valueAsNumber);
  });
  place.append(
    el(
      "div",
      { className: "stage" },
      line,
      told,
      panel,
      el(
        "div",
        { className: "row" },
        back,
        next,
        again,
        el("span", { className: "space" }),
        el("label", { className: "seed" }, "Seed ", seedInput),
        progress,
      ),
    ),
  );

  function play(chosen) {
    seed = chosen;
    seedInput.value = seed;
    places = [...OPENING, { words: WORDS, p: laws.p, q: laws.q }, CLOSING];
    round = playRound(places, seed);
    steps = stepsOf(round);
    move(0);
  }

  function move(to) {
    at = Math.max(0, Math.min(steps.length - 1, to));
    const step = steps[at];
    line.replaceChildren(...words(places, round, steps.slice(0, at + 1)));
    told.replaceChildren(...EXPLAIN[step.kind](places, round, step));
    panel.replaceChildren(...picture(places, round, step));
    progress.textContent = `Step ${at + 1} of ${steps.length}`;
    back.disabled = at === 0;
    next.disabled = at === steps.length - 1;
  }

  laws.onChange(() => play(seed));
  play(seed);
}

const wordAt = (places, round, at) => places[at].words[round.drafts[at]];
const ownWord = (places, { own }) => places[own.at].words[own.word];

const STATES = { dropped: ["✗", "dropped"], accepted: ["✓", "kept"], guess: ["?", "guessed"] };

/** The text as it stands after these steps. */
function words(places, round, seen) {
  const now = seen.at(-1);
  const has = (kind, at) => seen.some((step) => step.kind === kind && step.at === at);
  const rejectedAt = round.own.kind === "correction" ? round.own.at : Infinity;
  const settled = seen.some((step) => step.kind === "judge" && step.at === rejectedAt);
  const made = round.drafts.flatMap((_, at) => {
    if (!has("draft", at)) return [];
    const dropped = settled && at >= rejectedAt;
    const state = dropped ? "dropped" : has("judge", at) ? "accepted" : "guess";
    const [mark, said] = STATES[state];
    const current = now.at === at && ["draft", "judge"].includes(now.kind) ? " now" : "";
    return el(
      "span",
      { className: `word ${state}${current}` },
      wordAt(places, round, at),
      el("span", { aria: { hidden: "true" } }, ` ${mark}`),
      el("span", { className: "unseen" }, ` (${said}) `),
    );
  });
  if (has(round.own.kind, round.own.at)) {
    const current = now.kind === round.own.kind ? " now" : "";
    const className = `word ${round.own.kind}${current}`;
    const own = el("span", { className }, ownWord(places, round));
    // A correction stands where the first dropped draft was.
    made.splice(Math.min(rejectedAt, made.length), 0, own);
  }
  return [el("span", { className: "word given" }, PREFIX), ...made];
}

const b = (text) => el("b", {}, text);

/** What each kind of step says. */
const EXPLAIN = {
  start: () => [
    "This much is settled. A small draft model now guesses three words, one after the other; ",
    "that is cheap.",
  ],
  draft: (places, round, { at }) => [
    `Guess ${at + 1}: the draft draws from its own q and gets `,
    b(wordAt(places, round, at)),
    `, which it thinks ${places[at].q[round.drafts[at]]} % likely.`,
  ],
  score: () => [
    "The target looks at all three guesses and the place after them in ",
    b("one pass"),
    ". Now every place has its p. That pass is what costs, and it costs little more than a pass ",
    "for a single word.",
  ],
  judge: (places, round, { at }) => {
    const draft = round.drafts[at];
    const { p, q } = places[at];
    const { u, chance, stands } = round.verdicts[at];
    const said =
      chance < 1
        ? `p / q = ${p[draft]} / ${q[draft]}: it stands with probability ${chance.toFixed(2)}. `
        : `p = ${p[draft]} is not below q = ${q[draft]}: it stands, whatever is drawn. `;
    const drawn = `The drawn u is ${u.toFixed(2)}: `;
    const behind = at < round.drafts.length - 1 ? ", and what was guessed behind it goes too" : "";
    const end = stands ? [b("kept"), "."] : [b("rejected"), `${behind}.`];
    return [b(wordAt(places, round, at)), ". ", said, drawn, ...end];
  },
  correction: (places, round) => [
    "The repair: from what p still lacks there, max(0, p − q) made to sum to 100, the target ",
    "draws ",
    b(ownWord(places, round)),
    ". This is what makes it exact: words that the draft guesses too rarely get back what they ",
    "are owed.",
  ],
  bonus: (places, round) => [
    "All three stand. The pass has the target's law for the next place as well, so one word ",
    "comes free, drawn from p: ",
    b(ownWord(places, round)),
    ".",
  ],
  end: (places, round) => {
    const kept = round.verdicts.filter((verdict) => verdict.stands).length;
    return [
      b(`${count(kept + 1, "word")} from one pass`),
      `: ${count(kept, "guess", "guesses")} kept and one ${round.own.kind}. `,
      kept
        ? `Without a draft they would have taken ${kept + 1} passes.`
        : "No more than without a draft, and no less.",
      " The next round begins here.",
    ];
  },
};

/** Bars of the laws that a step is about, and the drawn number where there is one. */
function picture(places, round, step) {
  if (step.kind === "draft") return [law(places[step.at], ["q"], round.drafts[step.at])];
  if (step.kind === "score") {
    return places.map((place, at) => law(place, place.q ? ["p", "q"] : ["p"], round.drafts[at]));
  }
  if (step.kind === "judge") {
    const { at } = step;
    return [law(places[at], ["p", "q"], round.drafts[at]), gauge(round.verdicts[at])];
  }
  if (step.kind === "correction") {
    const { p, q, words } = places[step.at];
    return [law({ words, p, q, repair: parts(p, q).repair }, ["p", "q", "repair"], round.own.word)];
  }
  if (step.kind === "bonus") return [law(places[step.at], ["p"], round.own.word)];
  return [];
}

function law(place, names, chosen) {
  const lines = names.map((name) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, name),
      ...place[name].map((value, i) => {
        const fill = el("i", { className: `part ${name === "repair" ? "missing" : name}` });
        fill.style.width = `${value}%`;
        const beam = el("div", { className: "beam", aria: { hidden: "true" } }, fill);
        return el("td", { className: i === chosen ? "num chosen" : "num" }, number(value), beam);
      }),
    ),
  );
  const head = place.words.map((word, i) =>
    el("th", { scope: "col", className: i === chosen ? "num chosen" : "num" }, word),
  );
  return el(
    "table",
    { className: "law" },
    el("thead", {}, el("tr", {}, el("td"), ...head)),
    el("tbody", {}, ...lines),
  );
}

function gauge({ u, chance, stands }) {
  const keep = el("i", { className: "keep" });
  keep.style.width = `${100 * chance}%`;
  const mark = el("b", { className: u > 0.75 ? "left" : "" }, `u ${u.toFixed(2)}`);
  mark.style.left = `${100 * u}%`;
  const verdict = stands ? "kept" : "rejected";
  const label = `u is ${u.toFixed(2)}, the limit ${chance.toFixed(2)}: ${verdict}`;
  return el(
    "div",
    { className: "gauge", role: "img", aria: { label } },
    el("div", { className: "rail" }, keep, mark),
    el(
      "p",
      { className: "note" },
      el("span", {}, `kept below ${chance.toFixed(2)}`),
      chance < 1 ? el("span", {}, "rejected from there on") : null,
    ),
  );
}
