/** Many draws in three ways: which of them come out as the target's law. */

import { el } from "./dom.js";
import { WAYS, generator, sum } from "./law.js";
import { WORDS, number } from "./laws.js";

const DRAWS = 10_000;
const BATCHES = 25;
// Four standard errors: with three words and two or three ways, a false alarm in some 5 000 clicks.
const ERRORS = 4;
const TOLD = {
  exact: ["The rule", "keep with min(1, p/q), else repair from max(0, p − q)"],
  keep: ["Wrong: always keep", "take the draft's word as it is"],
  resample: ["Wrong: no residual", "on a rejection, draw again from p itself"],
};

/** The largest gap between frequencies and p, in points, and whether chance alone explains it. */
export function judge(counts, p) {
  const n = sum(counts);
  const gaps = counts.map((times, i) => Math.abs((100 * times) / n - p[i]));
  const fits = gaps.every((gap, i) => gap <= ERRORS * Math.sqrt((p[i] * (100 - p[i])) / n));
  return { gap: Math.max(...gaps), fits };
}

/** Fills the place; what was drawn from other laws is thrown away when they change. */
export function startDraws(place, laws) {
  let counts, random, running;
  const seed = el("input", { type: "number", min: 0, max: 2 ** 32 - 1, step: 1, value: 1 });
  const go = el("button", { type: "button", className: "main" }, "10,000 draws");
  const told = el("p", { className: "note", role: "status" });
  const cards = el("div", { className: "ways" });
  place.append(
    el(
      "div",
      { className: "row" },
      go,
      el("label", { className: "seed" }, "Seed ", seed),
      told,
    ),
    cards,
  );

  function reset() {
    cancelAnimationFrame(running);
    random = generator(seed.valueAsNumber || 0);
    counts = Object.fromEntries(Object.keys(WAYS).map((way) => [way, WORDS.map(() => 0)]));
    go.disabled = false;
    told.textContent = "";
    show();
  }

  function draw(times) {
    for (const [way, next] of Object.entries(WAYS)) {
      for (let i = 0; i < times; i += 1) counts[way][next(laws.p, laws.q, random)] += 1;
    }
  }

  function run(batches) {
    draw(DRAWS / BATCHES);
    show();
    if (batches > 1) {
      running = requestAnimationFrame(() => run(batches - 1));
      return;
    }
    go.disabled = false;
    go.focus();
    const drawn = sum(counts.exact).toLocaleString("en");
    told.textContent = `${drawn} draws each way. The line in each bar is p.`;
  }

  function show() {
    cards.replaceChildren(...Object.keys(WAYS).map((way) => card(way, counts[way], laws)));
  }

  go.addEventListener("click", () => {
    go.disabled = true;
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) return run(BATCHES);
    draw(DRAWS - DRAWS / BATCHES);
    return run(1);
  });
  seed.addEventListener("change", reset);
  laws.onChange(reset);
  reset();
}

function card(way, counts, { p }) {
  const [title, note] = TOLD[way];
  const n = sum(counts);
  const lines = WORDS.map((word, i) => {
    const share = n ? (100 * counts[i]) / n : 0;
    const fill = el("i", { className: "part" });
    fill.style.width = `${share}%`;
    const mark = el("b", { className: "line" });
    mark.style.left = `${p[i]}%`;
    const beam = el("div", { className: "beam", aria: { hidden: "true" } }, fill, mark);
    const drawn = n ? `${share.toFixed(1)} %` : "–";
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, word),
      el("td", {}, beam),
      el("td", { className: "num" }, drawn),
      el("td", { className: "num goal" }, `${number(p[i])} %`),
    );
  });
  const column = (name) => el("th", { scope: "col", className: "num" }, name);
  const head = el("tr", {}, el("td"), el("td"), column("drawn"), column("p"));
  const { gap, fits } = n ? judge(counts, p) : {};
  const far = `${gap?.toFixed(1)} points from p`;
  const said = fits ? `= Within what chance allows: ${far} at most.` : `≠ Biased: up to ${far}.`;
  return el(
    "article",
    { className: `way ${n ? (fits ? "good" : "bad") : ""}`, data: { way } },
    el("h3", {}, title),
    el("p", { className: "note" }, note),
    el("table", {}, el("thead", {}, head), el("tbody", {}, ...lines)),
    el("p", { className: "verdict" }, n ? said : "Nothing drawn yet."),
  );
}
