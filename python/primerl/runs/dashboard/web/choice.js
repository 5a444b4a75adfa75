// What views share: runs that are chosen, how they are named and marked, how they stand.

import { el, svg } from "/page/assets/common.js";

/** Curves that can be told from each other: six colours, five kinds of dashes. */
export const MOST = 30;
/** Runs that are drawn where none were chosen. */
const FIRST = 8;

/** Ids of the address that are known; where there are none, the newest runs of one kind that have a step. */
export function chosen(query, runs) {
  const known = new Set(runs.map((run) => run.id));
  if (query.has("runs")) return query.get("runs").split(",").filter((id) => known.has(id)).slice(0, MOST);
  const drawn = runs.filter((run) => run.step);
  const alike = drawn.filter((run) => run.kind === drawn[0].kind);
  return (alike.length ? alike : runs).slice(0, FIRST).map((run) => run.id);
}

/** No run at all, in an address. */
export const NONE = "-";

/** What of the address cannot be shown: `{id: why}`. */
export function missing(query, runs) {
  const known = new Set(runs.map((run) => run.id));
  const asked = (query.get("runs") ?? "").split(",").filter((id) => id && id !== NONE);
  const gone = asked.filter((id) => !known.has(id)).map((id) => [id, "the run does not exist, or was removed"]);
  const left = asked.filter((id) => known.has(id)).slice(MOST).map((id) => [id, `at most ${MOST} runs are shown at a time`]);
  return Object.fromEntries([...gone, ...left]);
}

/** The address of a view with these runs and what else is asked for. */
export function addressOf(view, ids, more = {}) {
  const wanted = Object.entries({ ...more, runs: ids.join(",") }).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const search = wanted.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%2C", ",").replaceAll("%2F", "/")}`).join("&");
  return `#/${view}${search ? `?${search}` : ""}`;
}

/** A run's name, with its id where another one has that name. */
export function nameOf(run, runs) {
  return runs.some((other) => other.id !== run.id && other.name === run.name) ? `${run.name} ${run.id}` : run.name;
}

/** The line of the run whose number among the chosen ones it is. */
export function sign(number) {
  if (number < 0) return el("span", { class: "sign" });
  return el("span", { class: "sign" }, svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, svg("line", { class: `s${number % 6} d${number % 5}`, x1: 0, x2: 26, y1: 5, y2: 5 })));
}

export function status(run) {
  return el("span", { class: `status ${run.status}`, text: run.status.toLowerCase(), title: run.reason || null });
}

/** What is wrong with some runs: `{id: why}`. */
export function problems(told, runs) {
  const named = Object.entries(told).map(([id, why]) => {
    const run = runs.find((one) => one.id === id);
    return el("li", {}, el("b", { text: run ? nameOf(run, runs) : id }), `: ${why}`);
  });
  return named.length ? el("ul", { class: "problems", "aria-label": "what cannot be shown" }, named) : "";
}
