/** The page: which of the two views is shown, and the key where the server asks for one. */

import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { startDraws } from "./draws.js";
import { startLaws } from "./laws.js";
import { startRound } from "./round.js";
import { hasKey, keepKey, offers } from "./server.js";

const TITLES = { chat: "Outrider: chat", exact: "Outrider: why it is exact" };

function show(name) {
  document.title = TITLES[name];
  for (const view of Object.keys(TITLES)) {
    byId(`${view}-view`).hidden = view !== name;
    const link = document.querySelector(`nav a[href="#${view}"]`);
    if (view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function route() {
  const name = location.hash.slice(1);
  if (!(name in TITLES)) return;
  show(name);
  scrollTo(0, 0);
}

/** Asks for a key when that is what was missing; whether it was. */
function askForKey(error) {
  if (error.status !== 401) return false;
  if (hasKey()) byId("key-problem").textContent = "The server did not take that key.";
  byId("key").hidden = false;
  byId("ask").hidden = true;
  byId("key-input").focus();
  return true;
}

let started = false;

/** Learns what the server offers; the chat begins when it has told. */
async function connect() {
  try {
    const offered = await offers();
    byId("about").textContent = `${offered.model} · version ${offered.version}`;
    byId("key").hidden = true;
    byId("ask").hidden = false;
    if (!started) startChat(offered, askForKey);
    started = true;
    return true;
  } catch (error) {
    if (askForKey(error)) return false;
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
    return false;
  }
}

byId("key").addEventListener("submit", async (event) => {
  event.preventDefault();
  keepKey(byId("key-input").value.trim());
  byId("key-input").value = "";
  if (await connect()) byId("prompt").focus();
});
addEventListener("hashchange", route);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});

const laws = startLaws(byId("laws"));
startRound(byId("round"), laws);
startDraws(byId("draws"), laws);
show("chat");
route();
connect();
