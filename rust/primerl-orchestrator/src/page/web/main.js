// The frame: which view is shown, and what goes on now, asked for once a second while somebody looks.

import { get, Refused, span, takeKey, tellProblem } from "./common.js";
import { banner, ending, gone } from "./ending.js";
import { Group } from "./group.js";
import { Overview } from "./overview.js";
import { Rollouts } from "./rollouts.js";
import { Rollout } from "./rollout.js";

const EVERY_MS = 1000;
const main = document.getElementById("main");
const problem = document.getElementById("problem");
const state = document.getElementById("state");
let view = null;
/** Which of the views below it is. */
let shown = null;
let asks = false;
let last = null;

const VIEWS = [
  [/^\/?$/, "overview", () => new Overview()],
  [/^\/rollouts$/, "rollouts", (_, query) => new Rollouts(query)],
  [/^\/rollouts\/(\d+)$/, "rollouts", (found) => new Rollout(found[1])],
  [/^\/groups\/(\d+)$/, "rollouts", (found) => new Group(found[1])],
];

function show() {
  takeKey();
  const [path, search] = location.hash.slice(1).split("?");
  for (const [pattern, name, open] of VIEWS) {
    const found = pattern.exec(path);
    if (!found) continue;
    const query = new URLSearchParams(search);
    tell(null);
    // Another page of the same list: what is there stays until it has come.
    if (pattern === shown && view.goTo) return view.goTo(query).catch(tell);
    view?.close?.();
    view = open(found, query);
    shown = pattern;
    main.replaceChildren(view.node);
    for (const link of document.querySelectorAll("nav a")) {
      if (link.dataset.view === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    scrollTo(0, 0);
    view.open?.().catch(tell);
    if (last) view.now?.(last);
    look();
    return;
  }
  location.hash = "#/";
}

function tell(error) {
  const use = () => {
    // All of it is asked for anew.
    shown = null;
    show();
  };
  tellProblem(problem, error, { owner: "run", named: " (PRIMERL_API_KEY)", button: "Show the run", use });
}

async function look() {
  if (asks || document.hidden) return;
  asks = true;
  try {
    last = await get("/page/now");
    frame(last);
    if (!problem.querySelector("form")) problem.hidden = !last.problem && !last.journal.problem;
    if (!problem.hidden && !problem.querySelector("form")) problem.textContent = last.problem ?? `the journal cannot be read: ${last.journal.problem}`;
    await view.now?.(last);
  } catch (error) {
    if (error.name === "AbortError") return;
    const end = error instanceof Refused ? { kind: "lost", title: "refused" } : gone(last);
    state.className = end.kind;
    state.textContent = end.title;
    if (error instanceof Refused) tell(error);
  } finally {
    asks = false;
  }
}

function frame(now) {
  const run = now.status?.run;
  document.getElementById("folder").textContent = now.folder ?? "";
  document.getElementById("folder").title = now.output_dir ?? "";
  document.title = run ? `${run.step}/${run.max_steps} ${now.folder} – primerl` : `${now.folder} – primerl`;
  const end = ending(now);
  state.className = end?.kind ?? (now.is_live && !run?.finished ? "live" : "");
  if (now.is_live) state.textContent = run?.finished ? `finished: ${run.finished}` : `running for ${span(run?.elapsed_s)}`;
  else state.textContent = end?.title ?? "from the run's files";
  banner(document.getElementById("end"), now);
  if (!now.journal.is_up_to_date && !now.journal.problem) state.textContent += ` · reading the journal: event ${now.journal.events.toLocaleString("en-US")}`;
}

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", look);
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "o") location.hash = "#/";
  else if (event.key === "r") location.hash = "#/rollouts";
  else view.key?.(event);
});
setInterval(look, EVERY_MS);
show();
