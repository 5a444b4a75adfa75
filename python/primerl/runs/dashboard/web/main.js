// The frame: which view is shown, the runs that are chosen, and the list, asked for again while somebody looks.

import { get, Refused, takeKey, tellProblem } from "/page/assets/common.js";
import { Compare } from "./compare.js";
import { Rollouts } from "./rollouts.js";
import { Runs } from "./runs.js";

const EVERY_MS = 3000;
const main = document.getElementById("main");
const problem = document.getElementById("problem");
const state = document.getElementById("state");
const VIEWS = { runs: Runs, compare: Compare, rollouts: Rollouts };
let view = null;
let shown = null;
let asks = false;
let runs = null;

/** View and query of the address, and what it names where that is no view. */
function address() {
  const [path, search] = location.hash.slice(1).split("?");
  const name = path.replace(/^\//, "") || "runs";
  const known = Object.hasOwn(VIEWS, name);
  return [known ? name : "runs", new URLSearchParams(search), known ? null : path];
}

/** The links to the other views keep the runs that are chosen. */
function links(query) {
  const chosen = query.get("runs");
  for (const link of document.querySelectorAll("nav a")) {
    const name = link.dataset.view;
    link.href = `#/${name === "runs" ? "" : name}${chosen ? `?runs=${chosen}` : ""}`;
    if (name === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function show() {
  takeKey();
  const [name, query, unknown] = address();
  tell(unknown === null ? null : new Error(`There is no view “${unknown}”; these are all runs.`));
  if (name !== shown) {
    view?.close?.();
    view = new VIEWS[name](tell);
    shown = name;
    main.replaceChildren(view.node);
    scrollTo(0, 0);
  }
  links(query);
  if (runs) view.goTo(query, runs).catch(tell);
  else look();
}

function tell(error) {
  tellProblem(problem, error, { owner: "dashboard", known: "; it was printed with its address", button: "Show the runs", use: show });
}

async function look() {
  if (asks || document.hidden) return;
  asks = true;
  try {
    const first = runs === null;
    ({ runs } = await get("/api/runs"));
    const running = runs.filter((run) => run.status === "RUNNING").length;
    state.className = running ? "live" : "";
    state.textContent = `${runs.length} runs, ${running} running`;
    const [, query] = address();
    await (first ? view.goTo(query, runs) : view.news?.(runs));
  } catch (error) {
    if (error.name !== "AbortError") {
      state.className = "lost";
      state.textContent = error instanceof Refused ? "refused" : "cannot be reached";
      if (error instanceof Refused) tell(error);
    }
  } finally {
    asks = false;
  }
}

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", look);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input:not([type=checkbox]), select, textarea")) return;
  const name = { o: "runs", c: "compare", r: "rollouts" }[event.key];
  if (name) document.querySelector(`nav a[data-view=${name}]`).click();
  else view?.key?.(event);
});
setInterval(look, EVERY_MS);
show();
