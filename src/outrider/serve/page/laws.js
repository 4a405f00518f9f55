/** Two laws over three words to drag, and what becomes of a draft judged by them, in numbers. */

import { el } from "./dom.js";
import { parts, rebalance, sum } from "./law.js";

export const WORDS = ["mat", "sofa", "roof"];
const START = { p: [50, 30, 20], q: [60, 10, 30] };
const SIDES = {
  p: { title: "p, the target", note: "what the model wants" },
  q: { title: "q, the draft", note: "what the cheap guesser thinks" },
};

/** A percentage with a decimal where it is no whole number. */
export const number = (value) => {
  const rounded = Math.round(value * 10) / 10;
  return Number.isInteger(rounded) ? String(rounded) : rounded.toFixed(1);
};

/** Fills the place; returns the laws, with `onChange` to be told of every move. */
export function startLaws(place) {
  const laws = { p: [...START.p], q: [...START.q] };
  const listeners = [];
  const inputs = { p: [], q: [] };

  function side(name) {
    const { title, note } = SIDES[name];
    const rows = WORDS.map((word, at) => {
      const label = `${title}: ${word}`;
      const input = el("input", { type: "range", min: 0, max: 100, step: 1, aria: { label } });
      input.addEventListener("input", () => {
        laws[name] = rebalance(laws[name], at, input.valueAsNumber);
        changed();
      });
      const output = el("output", { aria: { hidden: "true" } });
      inputs[name].push({ input, output });
      return el("div", { className: "dial" }, el("span", {}, word), input, output);
    });
    const legend = el("legend", {}, el("b", {}, title), ` ${note}`);
    return el("fieldset", { className: `side ${name}` }, legend, ...rows);
  }

  const picture = el("div", { className: "pairs", aria: { hidden: "true" } });
  const headline = el("p", { className: "headline" });
  const table = el("table", { className: "sums" });
  const again = el(
    "button",
    { type: "button", className: "quiet", onclick: () => reset() },
    "Start over",
  );
  const figure = el(
    "figure",
    {},
    picture,
    el(
      "figcaption",
      {},
      el("span", { className: "key kept" }, "kept, in both"),
      el("span", { className: "key surplus" }, "surplus of q, thrown away"),
      el("span", { className: "key missing" }, "missing from p, repaired"),
    ),
  );
  place.append(
    el("div", { className: "bench" }, el("div", {}, side("p"), side("q"), again), figure),
    headline,
    el("div", { className: "scroll sums-box" }, table),
  );

  function changed() {
    for (const name of Object.keys(inputs)) {
      for (const [at, { input, output }] of inputs[name].entries()) {
        input.value = laws[name][at];
        input.style.setProperty("--at", `${laws[name][at]}%`);
        input.setAttribute("aria-valuetext", `${laws[name][at]} %`);
        output.value = `${laws[name][at]} %`;
      }
    }
    const found = parts(laws.p, laws.q);
    picture.replaceChildren(...WORDS.map((word, at) => pair(word, at, laws, found)));
    headline.replaceChildren(...said(found));
    table.replaceChildren(...rows(laws, found));
    for (const listener of listeners) listener();
  }

  function reset() {
    Object.assign(laws, { p: [...START.p], q: [...START.q] });
    changed();
  }

  laws.onChange = (listener) => listeners.push(listener);
  changed();
  return laws;
}

/** `whole`: the percentage that a full tower stands for. */
function bar(segments, name, whole) {
  const made = segments
    .filter(([, value]) => value > 0)
    .map(([kind, value]) => {
      const label = el("span", {}, number(value));
      const part = el("i", { className: kind }, value >= whole / 8 ? label : null);
      part.style.height = `${(100 * value) / whole}%`;
      return part;
    });
  return el("div", { className: "tower" }, ...made, el("b", {}, name));
}

function pair(word, at, { p, q }, { kept, surplus, missing }) {
  const whole = Math.max(60, ...p, ...q);
  const bars = [
    bar([["kept", kept[at]], ["surplus", surplus[at]]], "q", whole),
    bar([["kept", kept[at]], ["missing", missing[at]]], "p", whole),
  ];
  const name = el("span", {}, `${word} `, el("small", {}, `${q[at]} → ${p[at]}`));
  return el("div", { className: "pair" }, el("div", { className: "towers" }, ...bars), name);
}

function said({ accepted, rejected }) {
  const share = el("b", {}, `${number(accepted)} %`);
  if (!rejected) {
    return [share, " of the drafts are kept. The two agree: there is nothing to repair."];
  }
  const tv = (rejected / 100).toFixed(2);
  const rest = el("b", {}, `${number(rejected)} %`);
  return [
    share,
    ` of the drafts are kept: Σ min(p, q) = 1 − TV = 1 − ${tv}. The other `,
    rest,
    " are thrown away, and a word is drawn again from what p still lacks.",
  ];
}

/** The table: each row follows from those above it, and the last one is the first one again. */
function rows({ p, q }, found) {
  const { kept, surplus, missing, repair, repaired, rejected, out } = found;
  const head = el("tr", {}, el("td"), ...[...WORDS, "sum"].map(column));
  const same = out.every((value, i) => Math.abs(value - p[i]) < 1e-9);
  const line = (name, formula, values, kind) =>
    el(
      "tr",
      { className: kind },
      el("th", { scope: "row" }, el("b", {}, name), ` ${formula}`),
      ...values.map((value) => cell([[kind, value]], number(value))),
      el("td", { className: "num" }, number(sum(values))),
    );
  const last = el(
    "tr",
    { className: "out" },
    el("th", { scope: "row" }, el("b", {}, "comes out"), ` kept + ${number(rejected)} % of repair`),
    ...out.map((value, i) =>
      cell([["kept", kept[i]], ["missing", repaired[i]]], added(kept[i], repaired[i], value)),
    ),
    el("td", { className: "num" }, number(sum(out))),
  );
  const proof = el(
    "caption",
    { aria: { live: "polite" } },
    same ? "What comes out is p again: " : "What comes out is not p: ",
    el("b", {}, out.map(number).join(" / ")),
  );
  return [
    proof,
    el("thead", {}, head),
    el(
      "tbody",
      {},
      line("target", "p", p, "p"),
      line("draft", "q", q, "q"),
      line("kept", "min(p, q)", kept, "kept"),
      line("surplus", "q − kept", surplus, "surplus"),
      line("missing", "p − kept", missing, "missing"),
      line("repair", "max(0, p − q), made to sum to 100", repair, "missing"),
      last,
    ),
  ];
}

function added(kept, repaired, value) {
  if (!repaired) return number(value);
  const how = el("span", { className: "added" }, `${number(kept)} + ${number(repaired)} = `);
  return el("span", {}, how, number(value));
}

const column = (name) => el("th", { scope: "col", className: "num" }, name);

function cell(segments, text) {
  const made = segments.map(([kind, value]) => {
    const part = el("i", { className: `${kind} part` });
    part.style.width = `${value}%`;
    return part;
  });
  const beam = el("div", { className: "beam", aria: { hidden: "true" } }, ...made);
  return el("td", { className: "num" }, text, beam);
}
