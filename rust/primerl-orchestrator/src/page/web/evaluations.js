// What evaluations measured: a curve by version, and a line each, the newest first.

import { Chart } from "./chart.js";
import { cut, el, get, replace, short, table, whole } from "./common.js";

const LINES = 12;
/** Drawn in the curve. */
const DRAWN = 1000;
const versionOf = (evaluation) => evaluation.version ?? evaluation.policy_at_the_time;

/** Of the mean reward; of one example there is none. */
function interval(evaluation) {
  const name = Object.keys(evaluation).find((name) => /^avg@\d+\/low$/.test(name));
  return name ? `${short(evaluation[name])}\u00a0to\u00a0${short(evaluation[name.replace("low", "high")])}` : "–";
}

// Scores of one that was closed before its end are of the fast examples.
const ended = (one) => one.complete === false ? `incomplete: ${whole(one.rollouts)} of ${whole(one.expected)}` : whole(one.rollouts);

function metrics(evaluation) {
  const passes = Object.entries(evaluation).filter(([name]) => /^pass@\d+$/.test(name));
  const failed = Object.entries(evaluation.errors ?? {}).map(([kind, count]) => [`errors/${kind}`, count]);
  return [...passes, ...Object.entries(evaluation.metrics ?? {}), ...failed].map(([name, value]) => `${name}\u00a0${short(value)}`).join(", ");
}

export class Evaluations {
  constructor() {
    this.curve = new Chart("Evaluations: mean reward by policy version", { dots: true, unit: "version" });
    this.curve.node.hidden = true;
    this.lines = el("div");
    /** As the server counts them: those before this one are shown. */
    this.cursor = null;
    this.older = el("button", { text: "Older", on: { click: () => this.go(this.next) } });
    this.newest = el("button", { text: "Newest", on: { click: () => this.go(null) } });
    this.pages = el("div", { class: "bar pages", hidden: true }, this.newest, this.older);
    this.node = el("section", { class: "card", id: "evaluations" }, this.lines, this.pages);
  }

  async go(cursor) {
    this.cursor = cursor;
    await this.tell();
  }

  async read(onlyEvaluates) {
    this.onlyEvaluates = onlyEvaluates;
    await Promise.all([onlyEvaluates ? null : this.draw(), this.tell()]);
  }

  async tell() {
    const { evaluations, next } = await get("/page/evaluations", { limit: LINES, cursor: this.cursor });
    this.next = next;
    const [first, last] = [(next ?? 0) + 1, (next ?? 0) + evaluations.length];
    if (this.cursor === null) this.all = last;
    const title = el("h2", { text: "Evaluations" });
    if (evaluations.length === 0) return replace(this.lines, title, el("p", { class: "note", text: "None has ended yet." }));
    const rows = evaluations.reverse().map((one) => [
      cut(one.environment), one.model ?? (this.onlyEvaluates ? "the checkpoint" : `v${versionOf(one)}`), { right: short(one.mean_reward) }, { right: interval(one) }, { right: ended(one) }, { right: whole(one.failed) }, metrics(one)]);
    const where = this.all > LINES ? el("span", { class: "end faint number", text: `${whole(first)} to ${whole(last)} of ${whole(Math.max(this.all, last))}` }) : "";
    replace(this.lines, el("div", { class: "row" }, title, where), table(["environment", "measured", { right: "reward" }, { right: "95 % interval" }, { right: "rollouts" }, { right: "failed" }, "metrics"], rows));
    this.pages.hidden = this.all <= LINES;
    this.newest.disabled = this.cursor === null;
    this.older.disabled = next === null;
    return undefined;
  }

  async draw() {
    const { evaluations } = await get("/page/evaluations", { limit: DRAWN });
    const environments = [...new Set(evaluations.map((one) => one.environment))].sort();
    this.curve.node.hidden = evaluations.length === 0;
    this.curve.show(environments.map((name) => {
      const own = evaluations.filter((one) => one.environment === name && one.mean_reward !== null);
      return { name, x: own.map(versionOf), y: own.map((one) => one.mean_reward) };
    }));
  }
}
