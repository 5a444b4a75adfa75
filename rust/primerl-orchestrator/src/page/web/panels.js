// Cards of the overview: where the time goes, who waits for what, engines, environments and their workers.

import { cut, el, percent, replace, span, table, whole, words } from "./common.js";

const WAITS = 14;
const WORKERS = 16;
/** Fewer say nothing about a run. */
const FEW_STEPS = 5;
/** What is said of a run's health where no rule finds anything. */
export const quiet = (steps) => (steps < FEW_STEPS ? "Too few steps to tell." : "No rule finds anything wrong.");
/** A worker that has not been heard of for so long is late. */
const LATE_S = 15;
/** Classes by what a state's name begins with; its reason follows after a slash. */
const KINDS = { busy: "busy", serves: "busy", runs: "busy", loads: "loads", lost: "gone", waits: "waits-for", idle: "waits-for", asks: "waits-for", unproved: "waits-for" };
const kind = (state) => KINDS[state.split("/")[0]] ?? "other";
const title = (text) => el("h2", { text });
const note = (text) => el("p", { class: "note", text });
const more = (all, shown) => (all > shown ? el("p", { class: "faint", text: `and ${whole(all - shown)} more` }) : "");

/** Failed rollouts of an environment, in all and by kind. */
function errors(environment) {
  const counts = Object.entries(environment.errors ?? {});
  const all = counts.reduce((sum, [, count]) => sum + count, 0);
  const kinds = counts.map(([kind, count]) => `${words(kind)} ${whole(count)}`).join(", ");
  return kinds ? `${whole(all)} (${kinds})` : "0";
}

export function waits(node, now) {
  // Of a run that is over, what was last seen says nothing any more.
  const all = now.is_live ? [...(now.status.waits ?? [])].sort((a, b) => Boolean(a.usual) - Boolean(b.usual) || b.since_s - a.since_s) : [];
  const lines = all.slice(0, WAITS).map((wait) => {
    const left = wait.deadline_s === null ? "no deadline" : `${span(Math.max(0, wait.deadline_s))} left`;
    const late = wait.deadline_s !== null && wait.deadline_s < 0;
    return el("li", {}, el("span", {}, el("b", { text: wait.who }), ` → ${wait.for}`), el("span", { class: `end number ${late ? "late" : "faint"}`, title: left, text: span(wait.since_s) }));
  });
  const nobody = now.is_live ? "Nobody waits." : now.end ? "The run is over." : "Only the page of the run itself knows.";
  replace(node, title("Who waits for what"), lines.length ? el("ul", { class: "waits" }, lines) : note(nobody), more(all.length, lines.length));
}

export function engines(node, now) {
  const rows = (now.status.engines ?? []).map((one) => [cut(one.name ?? whole(one.engine)), one.version === null ? "none" : `v${one.version}`, now.is_live ? one.doing : "–",
    { right: `${now.is_live ? whole(one.running) : "–"}${one.limit ? ` / ${whole(one.limit)}` : ""}` }, { right: percent(one.idle_share) }, one.url]);
  const head = ["engine", "proved", "does", { right: "requests" }, { right: "idle" }, "address"];
  replace(node, title("Engines"), rows.length ? table(head, rows) : note(now.is_live ? "None has joined." : "None is known."));
}

export function environments(node, now) {
  const live = (count) => ({ right: now.is_live ? whole(count) : "–" });
  const rows = (now.status.environments ?? []).map((one) => [cut(one.name), { right: whole(one.examples) }, live(one.workers), live(one.in_flight), live(one.queued), errors(one)]);
  const failures = Object.entries(now.status.failures ?? {}).map(([name, count]) => `${words(name)} ${whole(count)}`).join(", ");
  replace(node, title("Environments"), table(["environment", { right: "examples" }, { right: "workers" }, { right: "in flight" }, { right: "queued" }, "errors"], rows),
    failures ? note(`Failures: ${failures}`) : "");
}

/** `env_task_0:4711`, or `env_task_0@its-machine:4711` of one that has joined: its machine, and its number on it. */
const WORKER = /^env_(.*)_(\d+)(?:@([^:]*))?:\d+$/;

/** Where a worker writes: as it says, or as the launcher has it. One that has joined writes on its own machine. */
function logOf(one) {
  const [, , number, machine] = WORKER.exec(one.name) ?? [];
  if (one.log) return one.log;
  return number === undefined || machine !== undefined ? "" : `logs/envs/*/${one.environment}/env_worker_${number}.log`;
}

const machineOf = (one) => one.machine ?? one.host ?? WORKER.exec(one.name)?.[3] ?? "";

/** Those that are late first. */
export function workers(node, now) {
  const all = now.is_live ? (now.status.workers ?? []) : [];
  const late = (one) => one.last_seen_s > LATE_S;
  const shown = [...all].sort((a, b) => late(b) - late(a)).slice(0, WORKERS);
  const elsewhere = all.some(machineOf);
  const rows = shown.map((one) => [cut(one.name), cut(one.environment), ...(elsewhere ? [machineOf(one) || "this one"] : []), { right: whole(one.running) },
    { right: el("span", { class: late(one) ? "late" : "", text: `${span(one.last_seen_s)} ago` }) }, el("code", { text: logOf(one) })]);
  const refused = (now.status.refused_workers ?? []).map((one) => note(`${whole(one.refused)} refused of ${one.environment}: ${one.reason}`));
  const head = ["worker", "environment", ...(elsewhere ? ["machine"] : []), { right: "in flight" }, { right: "heard of" }, "log"];
  const nobody = now.is_live ? "None has registered." : now.end ? "The run is over." : "Only the page of the run itself knows.";
  replace(node, title("Env workers"), rows.length ? table(head, rows) : note(nobody), more(all.length, rows.length), ...(now.is_live ? refused : []));
}

/** What rules find wrong with the run, the first to look at first; each leads to its curve. */
export function health(node, { steps, findings }, draw) {
  const lines = findings.map((one) => el("li", { class: "finding" }, el("b", { text: one.what }), el("span", { text: one.advice }),
    el("button", { text: one.curve, title: "draw this curve", on: { click: () => draw(one.curve) } })));
  replace(node, title("Health"), lines.length ? el("ul", { class: "findings" }, lines) : note(quiet(steps)));
}

/** Where the time went. */
export function idle(node, now) {
  const { idle } = now;
  if (!idle) return replace(node, title("Where the time goes"), note("The journal is being read."));
  const bar = (name, states) => el("div", { class: "idle" }, el("b", { class: "cut", title: name, text: name }),
    el("div", { class: "shares", role: "img", "aria-label": states.map((one) => `${one.what} ${percent(one.share)}`).join(", ") }, states.map((one) => {
      const part = el("i", { class: kind(one.state), title: `${one.what}: ${percent(one.share)}` });
      part.style.flexGrow = Math.round(1000 * one.share);
      return part;
    })),
    el("div", { class: "reasons" }, states.filter((one) => one.share >= 0.005).slice(0, 6).map((one) => el("span", {}, el("i", { class: kind(one.state) }), `${one.what} ${percent(one.share)}`))));
  return replace(node, el("div", { class: "row" }, title("Where the time goes"), el("span", { class: "end faint", text: `of ${span(idle.seconds)}` })),
    now.only_evaluates ? "" : bar("Trainer", idle.trainer), ...idle.engines.map((one) => bar(`Engine ${one.engine}`, one.states)), ...idle.workers.map((one) => bar(`Workers of ${one.environment}`, one.states)));
}
