/**
 * The arithmetic of speculative decoding over a few words. A law is an array of percentages that
 * sum to 100; chance comes in as numbers u in [0, 1), so that all here is a function of its input.
 */

export const sum = (values) => values.reduce((all, one) => all + one, 0);

/** A generator of numbers in [0, 1): Mulberry32, the same for the same seed. */
export function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** The place that u falls on when weights are laid end to end. */
export function pick(weights, u) {
  let left = u * sum(weights);
  for (const [place, weight] of weights.entries()) {
    if (left < weight) return place;
    left -= weight;
  }
  return weights.findLastIndex((weight) => weight > 0);
}

/**
 * All parts of judging a draft from q against p.
 * kept + missing = p, kept + surplus = q, and kept + rejected · repair = out, which is p.
 * Where nothing can be rejected there is nothing to repair: `repair` is all zeros.
 */
export function parts(p, q) {
  const kept = p.map((_, i) => Math.min(p[i], q[i]));
  const missing = p.map((_, i) => p[i] - kept[i]);
  const surplus = q.map((_, i) => q[i] - kept[i]);
  const rejected = sum(surplus);
  const repair = missing.map((part) => (rejected ? (100 * part) / rejected : 0));
  const repaired = repair.map((part) => (rejected * part) / 100);
  const out = kept.map((part, i) => part + repaired[i]);
  return { kept, missing, surplus, rejected, accepted: sum(kept), repair, repaired, out };
}

/** The same law with one value changed; the others keep their proportions, all stay integers. */
export function rebalance(law, place, wanted) {
  const value = Math.max(0, Math.min(100, Math.round(wanted)));
  const others = law.map((_, i) => i).filter((i) => i !== place);
  const before = sum(others.map((i) => law[i]));
  const shares = others.map((i) =>
    before ? ((100 - value) * law[i]) / before : (100 - value) / others.length,
  );
  const changed = [...law];
  changed[place] = value;
  others.forEach((i, k) => (changed[i] = Math.floor(shares[k])));
  // What rounding down left over goes to the largest remainders.
  const byRemainder = [...others.keys()].sort((a, b) => (shares[b] % 1) - (shares[a] % 1));
  for (const k of byRemainder.slice(0, 100 - sum(changed))) changed[others[k]] += 1;
  return changed;
}

/** Three ways to draw the next word with a draft's help; the first one is exact. */
export const WAYS = {
  exact(p, q, random) {
    const draft = pick(q, random());
    if (random() * q[draft] < p[draft]) return draft;
    return pick(parts(p, q).missing, random());
  },
  keep(p, q, random) {
    return pick(q, random());
  },
  resample(p, q, random) {
    const draft = pick(q, random());
    if (random() * q[draft] < p[draft]) return draft;
    return pick(p, random());
  },
};

/**
 * A whole round: every place drafts from its q, then the drafts are judged one by one.
 * `places` hold `words`, `p` and `q`; the last one, where a bonus would stand, only `p`.
 * Returns what was drafted, the verdicts up to the first rejection, and the target's own word.
 */
export function playRound(places, seed) {
  const random = generator(seed);
  const drafting = places.slice(0, -1);
  const drafts = drafting.map(({ q }) => pick(q, random()));
  const verdicts = [];
  for (const [at, { p, q }] of drafting.entries()) {
    const u = random();
    const chance = Math.min(1, p[drafts[at]] / q[drafts[at]]);
    verdicts.push({ at, u, chance, stands: u < chance });
    if (u >= chance) break;
  }
  const last = verdicts.at(-1);
  const at = last.stands ? drafting.length : last.at;
  const law = last.stands ? places[at].p : parts(places[at].p, places[at].q).repair;
  const kind = last.stands ? "bonus" : "correction";
  return { drafts, verdicts, own: { at, kind, law, word: pick(law, random()) } };
}

/** What the reader sees one after the other. */
export function stepsOf({ drafts, verdicts, own }) {
  return [
    { kind: "start" },
    ...drafts.map((_, at) => ({ kind: "draft", at })),
    { kind: "score" },
    ...verdicts.map(({ at }) => ({ kind: "judge", at })),
    { kind: own.kind, at: own.at },
    { kind: "end" },
  ];
}
