/** The view to chat in: a form, a conversation, and how the next answer is drafted. */

import { Answer, Tally } from "./answer.js";
import { Comparison } from "./compare.js";
import { byId, el, options } from "./dom.js";
import { chat } from "./server.js";

const EXAMPLES = {
  "Edit a function": `Repeat this Python function exactly, with one change: rename the variable total to result.

def summarize(orders, customers, minimum=0):
    total = 0
    names = []
    for order in orders:
        if order.amount < minimum:
            continue
        total += order.amount
        customer = customers[order.customer_id]
        if customer.name not in names:
            names.append(customer.name)
    average = total / len(orders) if orders else 0
    return {"total": total, "average": average, "names": sorted(names)}
`,
  "Why is the sky blue?": "Why is the sky blue, and why are sunsets red?",
};
const LONGEST_DRAFT = 16;
const AS_STARTED = ["", "the server's"];

/** The view, for a server that offers that; `refused` hears of errors first, and may handle one. */
export function startChat(offers, refused) {
  const form = byId("options").elements;
  const [prompt, send, stop, clear] = ["prompt", "send", "stop", "clear"].map(byId);
  const messages = [];
  let running = null;

  fill(form, offers);
  byId("settings").open = matchMedia("(min-width: 900px)").matches;
  byId("examples").replaceChildren(
    ...Object.entries(EXAMPLES).map(([label, text]) => {
      const use = () => ((prompt.value = text), prompt.focus());
      return el("button", { type: "button", className: "quiet", onclick: use }, label);
    }),
  );

  function busy(controller) {
    running = controller;
    stop.hidden = !controller;
    send.hidden = clear.disabled = Boolean(controller);
    clear.hidden = !messages.length;
    byId("welcome").hidden = Boolean(messages.length);
  }

  function problem(error) {
    const again = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    byId("problem").textContent = error.message + again;
    byId("problem").hidden = false;
  }

  /** Feeds chunks to `take`; whether the reader stopped them. */
  async function stream(body, signal, take) {
    try {
      for await (const chunk of chat(body, signal)) take(chunk);
      return false;
    } catch (error) {
      if (error.name === "AbortError") return true;
      throw error;
    }
  }

  async function converse(text) {
    const request = { model: offers.model, ...requested(form) };
    const said = el("p", { className: "said" }, text);
    const answer = new Answer();
    const turn = el("div", { className: "turn" }, said, answer.element);
    byId("log").append(turn);
    messages.push({ role: "user", content: text });
    byId("problem").hidden = true;
    prompt.value = "";
    const controller = new AbortController();
    busy(controller);
    stop.focus();
    scrollTo(0, document.body.scrollHeight);
    const body = { ...request, messages: [...messages] };
    try {
      const stopped = await stream(body, controller.signal, (chunk) => {
        answer.take(chunk);
        follow(turn);
      });
      answer.end({ stopped, seed: request.seed });
      messages.push({ role: "assistant", content: answer.tally.text });
      if (byId("compare").checked && !stopped) {
        await compare(answer, { ...body, speculation: false }, controller.signal);
      }
    } catch (error) {
      if (messages.at(-1).role === "user") {
        // Not answered, or not to the end: the message goes back to where it can be changed.
        messages.pop();
        prompt.value = text;
        answer.end({ broken: true });
        if (!answer.tally.tokens.length) turn.remove();
      }
      if (!refused(error)) problem(error);
    }
    busy(null);
    prompt.focus();
  }

  async function compare(answer, body, signal) {
    const plain = new Tally();
    const panel = new Comparison(answer.tally);
    answer.element.append(panel.element);
    panel.show(plain);
    try {
      const stopped = await stream(body, signal, (chunk) => {
        plain.take(chunk);
        panel.show(plain);
        follow(answer.element);
      });
      if (stopped) panel.told.textContent = "The plain run was stopped.";
      else panel.done(plain);
    } catch (error) {
      panel.told.textContent = "The plain run failed.";
      throw error;
    }
  }

  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || !prompt.value.trim()) return;
    if (!byId("options").checkValidity()) {
      byId("settings").open = true;
      byId("options").reportValidity();
      return;
    }
    converse(prompt.value);
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  stop.addEventListener("click", () => running?.abort());
  byId("ask").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  clear.addEventListener("click", () => {
    messages.length = 0;
    byId("log").replaceChildren();
    byId("problem").hidden = true;
    busy(null);
    prompt.focus();
  });
  byId("options").addEventListener("submit", (event) => event.preventDefault());
}

/** What the server offers, in the form. */
function fill(form, { drafter, drafters, rules, limits, context_tokens: context }) {
  const named = drafters.map((name) => [
    name,
    name === drafter ? `${name} (the server's)` : name,
  ]);
  const longest = Math.min(LONGEST_DRAFT, limits.draft_length);
  const lengths = Array.from({ length: longest }, (_, i) => [i + 1, i + 1]);
  form.drafter.replaceChildren(...options(named));
  form.drafter.value = drafter;
  form.rule.replaceChildren(...options([AS_STARTED, ...rules.map((name) => [name, name])]));
  form.draft_length.replaceChildren(...options([AS_STARTED, ["auto", "auto"], ...lengths]));
  const most = Math.min(limits.max_tokens, context - 1);
  form.max_tokens.max = most;
  form.max_tokens.value = Math.min(form.max_tokens.value, most);
}

/** The form as the request's parameters. Without a seed one is drawn here: JSON of the server may
 * hold larger ones than a page can read. */
function requested(form) {
  const length = form.draft_length.value;
  const speculation = { drafter: form.drafter.value };
  if (form.rule.value) speculation.rule = form.rule.value;
  if (length) speculation.draft_length = length === "auto" ? length : Number(length);
  const [drawn] = crypto.getRandomValues(new Uint32Array(1));
  return {
    speculation,
    temperature: form.temperature.valueAsNumber,
    top_p: form.top_p.valueAsNumber,
    max_tokens: form.max_tokens.valueAsNumber,
    seed: form.seed.value === "" ? drawn : form.seed.valueAsNumber,
  };
}

/** Keep the end in sight, unless the reader has scrolled up. */
function follow(element) {
  const { bottom } = element.getBoundingClientRect();
  const composer = byId("ask").getBoundingClientRect().top;
  if (bottom > composer && bottom - composer < 240) scrollBy({ top: bottom - composer + 16 });
}
