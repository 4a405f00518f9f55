/** Making elements: texts are always texts, never markup. */

/**
 * A new element. `props` are its properties; `data` and `aria` inside it are attributes' endings.
 * @example el("p", { className: "note", aria: { hidden: "true" } }, "Said.")
 */
export function el(tag, props = {}, ...children) {
  const { data = {}, aria = {}, ...rest } = props;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, data);
  for (const [name, value] of Object.entries(aria)) made.setAttribute(`aria-${name}`, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** An `<option>` for each pair of value and label. */
export const options = (pairs) => pairs.map(([value, label]) => el("option", { value }, label));

/** The element with that id. */
export const byId = (id) => document.getElementById(id);

/** "1 word", "3 words". */
export const count = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
