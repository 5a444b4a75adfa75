// Runs side by side: what differs in their configs, evaluations, checkpoints, costs. The first one is what others are compared with.

import { el, get, replace, short, signed, span, table, whole } from "/page/assets/common.js";
import { quiet } from "/page/assets/panels.js";
import { chosen, missing, nameOf, problems, sign, status } from "./choice.js";

const UNITS = ["B", "kB", "MB", "GB", "TB"];
const TESTS = { mcnemar: "McNemar's test", paired_t: "Student's test", sign: "sign test" };
/** Short times in shorter units. */
const hours = (value) => (value === null || value === undefined ? "–" : value > 0 && value < 1 ? span(3600 * value) : `${short(value)} h`);
const text = (value) => (value === null || value === undefined ? el("span", { class: "faint", text: "–" }) : el("code", { text: typeof value === "string" ? value : JSON.stringify(value) }));

/** A score with its interval, and how far it is from the first run's. */
export function measured(value, difference) {
  if (!value) return el("span", { class: "faint", text: "–" });
  const kind = difference?.significant ? (difference.by > 0 ? "better" : "worse") : "";
  const ends = (one, form) => (one.low === null ? "" : ` ${form(one.low)} to ${form(one.high)}`);
  const told = !difference ? "" : `${signed(difference.by)}${ends(difference, signed).replace(/^ (.*)$/, " ($1)")}${difference.significant === null ? "" : difference.significant ? ", significant" : ", not significant"}`;
  const tested = !difference ? "" : difference.p === null ? `by intervals: ${difference.unpaired}` : `p ${difference.p < 0.0001 ? "< 0.0001" : short(difference.p)}, ${whole(difference.pairs)} pairs, ${TESTS[difference.test]}`;
  return el("span", {}, el("b", { class: kind, text: short(value.mean) }), el("span", { class: "interval", text: ends(value, short).trim() }), told ? el("span", { class: "interval", text: told }) : "", tested ? el("span", { class: "interval faint", text: tested }) : "",
    el("span", { class: "interval", text: `v${value.version ?? "–"}, ${whole(value.rollouts)} rollouts${value.complete ? "" : ", incomplete"}` }));
}

function size(bytes) {
  const unit = bytes < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log10(bytes) / 3));
  return `${short(bytes / 1000 ** unit)} ${UNITS[unit]}`;
}

function saved(row) {
  const scores = Object.entries(row.scores).flatMap(([environment, found]) => Object.entries(found).map(([name, one]) => el("span", { class: "interval", text: `${environment} ${name} ${short(one.mean)}${one.low === null ? "" : ` (${short(one.low)} to ${short(one.high)})`}` })));
  return el("div", {}, `step ${whole(row.step)}: ${row.kinds.join(", ")}${row.ready ? "" : " (incomplete)"}, ${size(row.bytes)}`, scores);
}

export class Compare {
  constructor() {
    this.body = el("div", {}, el("p", { class: "note", text: "Reading…" }));
    this.node = el("div", { class: "compare" }, el("h1", { text: "Compare" }), this.body);
  }

  async goTo(query, runs) {
    const ids = chosen(query, runs);
    const gone = missing(query, runs);
    if (ids.length === 0) return replace(this.body, problems(gone, runs), el("p", { class: "card empty", text: "Choose runs first." }));
    const found = await get("/api/compare", { runs: ids.join(",") });
    this.show(found, runs, gone);
    return undefined;
  }

  show(found, runs, gone) {
    const told = found.runs;
    // Nodes of their own for every table.
    const head = (first) => [...first, ...told.map((run, number) => el("span", {}, sign(number), nameOf(run, runs)))];
    const line = (title, pick) => [title, ...told.map(pick)];
    const section = (title, note, content) => el("section", { class: "card" }, el("h2", { text: title }), note ? el("p", { class: "note", text: note }) : "", content);
    const numbers = table(head([""]), [
      line("status", (run) => el("span", {}, status(run), run.reason ? el("span", { class: "note reason", text: run.reason }) : "")), line("steps", (run) => whole(run.step)), line("reward, last 5 steps", (run) => short(run.reward)),
      line("wall time", (run) => span(run.cost.wall_s)), line("tokens sampled", (run) => whole(run.cost.sampled_tokens)), line("tokens trained", (run) => whole(run.cost.trained_tokens)),
      line("CPU", (run) => hours(run.cost.cpu_hours)), line("GPU", (run) => hours(run.cost.gpu_hours)),
      line("health", (run) => (run.health === null ? el("span", { class: "faint", text: "Not known." }) : run.health.length ? el("ul", { class: "findings" }, run.health.map((one) => el("li", { text: one.what, title: one.advice }))) : quiet(run.health_steps))),
    ]);
    const scores = found.evaluations.length
      ? table(head(["environment, score"]), found.evaluations.map((row) => [`${row.environment}, ${row.score}`, ...row.values.map((value, at) => measured(value, row.differences[at]))]))
      : el("p", { class: "note", text: "None of these runs has an evaluation." });
    const configs = found.config.length
      ? table(head(["key"]), found.config.map((row) => [el("code", { text: row.key }), ...row.values.map(text)]))
      : el("p", { class: "note", text: told.length > 1 ? "Nothing differs." : "Choose a second run to compare it." });
    const checkpoints = table(head([]), [told.map((run) => (run.checkpoints.length ? el("div", {}, run.checkpoints.map(saved)) : el("span", { class: "faint", text: "none" })))]);
    const broken = Object.fromEntries(told.filter((run) => run.problem).map((run) => [run.id, run.problem]));
    replace(this.body, problems({ ...gone, ...broken }, runs), section("Outcome and cost", "", numbers),
      section("Evaluations", "The newest of each environment that was measured whole, with 95 % intervals over its examples. Differences to the first run that has the score, by pairs of examples where both have measured the same ones (significant: p below 0.05), else from both intervals (0 is outside).", scores),
      section("Configs", "Only what differs. Secrets are not shown.", configs), section("Checkpoints", "What is saved, with the evaluations of that very version.", checkpoints));
  }
}
