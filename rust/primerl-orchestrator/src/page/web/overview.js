// How the run does: numbers of now, curves, where the time goes, who waits for whom, engines, evaluations.

import { Chart, MOST } from "./chart.js";
import { arrange, el, get, percent, replace, short, span, whole } from "./common.js";
import { Evaluations } from "./evaluations.js";
import { help } from "./help.js";
import { engines, environments, health, idle, waits, workers } from "./panels.js";

const CHOSEN = "primerl-charts";
const POINTS = 600;
const of = (...wanted) => (names) => wanted.filter((name) => names.has(name));

/** `reward/<env>/mean` of every environment, where there are several. */
function byEnvironment(metric) {
  return (names) => {
    const own = [...names].filter((name) => name.startsWith(`${metric}/`) && name.endsWith("/mean") && name !== `${metric}/all/mean` && !name.includes("/staleness_"));
    return [`${metric}/all/mean`, ...(own.length > 1 ? own : [])].filter((name) => names.has(name));
  };
}

/** Title, and which columns it shows of those there are. */
const CHARTS = [
  ["Reward", byEnvironment("reward")],
  ["Loss", (names) => {
    const parts = of("loss/rl/mean", "loss/ce/mean", "loss/ref_kl/mean")(names);
    return [...of("loss/mean")(names), ...(parts.length > 1 ? parts : [])];
  }],
  ["Throughput of the trainer, tokens/s", of("perf/throughput")],
  ["Staleness", of("staleness/mean", "staleness/max")],
  ["Rollouts lost a step", of("rollouts/failed", "rollouts/stale", "rollouts/cancelled", "rollouts/filtered")],
  ["Errors, share of rollouts", of("errors/model", "errors/engine", "errors/tool", "errors/environment", "errors/timeout", "errors/infrastructure")],
  ["Seconds of a step", of("time/step", "time/wait_for_batch", "time/forward_backward")],
  ["Metrics of the environments", (names) => [...names].filter((name) => /^metric\/.*\/mean$/.test(name))],
  ["Entropy", of("entropy/all/mean")],
  ["Trainer against engine (KL)", of("mismatch_kl/all/mean")],
  ["Norm of the gradient", of("optim/grad_norm")],
  ["Share of the tokens that is computed", of("perf/shared_tokens")],
  ["Length of a sample, tokens", of("seq_len/all/mean", "seq_len/all/max")],
];

/** Those above where the time goes; the others are below. */
const FIRST = new Set(CHARTS.slice(0, 6).map(([title]) => title));

/** Curves that always come together do not repeat what their title says. */
function label(name) {
  return name.replace(/\/mean$/, "").replace(/^(reward|metric|time|rollouts|staleness|seq_len)\//, "") || name;
}

const tile = (name, value, more = "") => el("div", { class: "card tile" }, el("dt", { text: name }), el("dd", {}, value, el("small", { text: more, title: more })));
const since = (now) => `${now.is_live ? "running" : "ran"} for ${span(now.status.run.elapsed_s)}`;
/** Of a run whose launcher was killed, the journal knows no rates. */
const sampling = ({ is_live, status: { tokens } }) => tile(is_live ? "Tokens/s" : "Tokens", whole(is_live ? tokens.per_second : tokens?.sampled), is_live ? `${whole(tokens.sampled)} sampled` : "sampled");
const over = (now) => (now.end ? "the run is over" : "as of its files");
const flying = (now) => {
  const { in_flight, limit, queued } = now.status.rollouts;
  return tile("In flight", now.is_live ? whole(in_flight) : "–", now.is_live ? `of ${whole(limit)}, ${whole(queued)} queued` : over(now));
};

/** Its numbers, as they are now. */
function ofTraining(now) {
  const { run, rollouts, trainer } = now.status;
  const step = now.status.last_step ?? {};
  return [
    tile("Step", `${whole(run.step)} / ${whole(run.max_steps)}`, since(now)),
    tile("Reward", short(step["reward/all/mean"]), "last batch"),
    tile("Policy", run.policy_version === null ? "–" : `v${run.policy_version}`, run.published_version === null ? "none is published" : `v${run.published_version} published`),
    sampling(now),
    flying(now),
    tile("Trained", whole(rollouts.trained), `${whole(rollouts.dispatched)} leased`),
    tile("Lost", whole(rollouts.failed + rollouts.stale + rollouts.cancelled), `${whole(rollouts.failed)} failed, ${whole(rollouts.stale)} stale, ${whole(rollouts.cancelled)} cancelled`),
    tile("Staleness", short(step["staleness/mean"]), `at most ${short(step["staleness/max"])}`),
    tile("Trainer idle", percent(trainer?.idle_share), now.is_live && trainer.doing ? `now: ${trainer.doing}` : ""),
  ];
}

/** Of `primerl eval`: nothing is trained. */
function ofEvaluation(now) {
  const { rollouts, environments } = now.status;
  const errors = (environments ?? []).flatMap((one) => Object.values(one.errors ?? {})).reduce((sum, count) => sum + count, 0);
  return [
    tile("Measured", whole(rollouts.evaluated), since(now)),
    flying(now),
    sampling(now),
    tile("Errors", whole(errors), "a rollout that fails is tried once more"),
  ];
}

const stack = (...cards) => el("div", { class: "stack" }, cards);

export class Overview {
  constructor() {
    this.charts = new Map();
    this.rows = -1;
    this.range = {};
    this.own = JSON.parse(localStorage.getItem(CHOSEN) ?? "[]");
    this.tiles = el("dl", { class: "tiles" });
    this.grid = el("div", { class: "charts" });
    this.others = el("div", { class: "charts" });
    this.from = el("input", { type: "number", min: 1, "aria-label": "first step", placeholder: "first" });
    this.to = el("input", { type: "number", min: 1, "aria-label": "last step", placeholder: "last" });
    for (const field of [this.from, this.to]) field.addEventListener("change", () => this.choose(this.from.value, this.to.value));
    this.more = el("select", { "aria-label": "add a curve", on: { change: () => this.add(this.more.value) } });
    this.health = el("section", { class: "card", id: "health" });
    this.idle = el("section", { class: "card", id: "idle" });
    this.waits = el("section", { class: "card", id: "waits" });
    this.engines = el("section", { class: "card", id: "engines" });
    this.workers = el("section", { class: "card", id: "workers" });
    this.environments = el("section", { class: "card", id: "environments" });
    this.evaluations = new Evaluations();
    const all = el("button", { text: "All steps", on: { click: () => this.choose() } });
    this.bar = el("div", { class: "bar" }, el("label", {}, "Steps", this.from, "to", this.to), all,
      el("span", { class: "faint" }, "drag over a curve to look closer"), el("label", { class: "end" }, this.more));
    this.node = el("div", {}, el("h1", { text: "Overview" }), this.tiles, this.health, this.bar, this.grid,
      el("div", { class: "wide" }, stack(this.idle), stack(this.waits, this.engines), stack(this.environments, this.workers), this.evaluations.curve.node), this.evaluations.node, this.others);
  }

  async now(now) {
    this.evaluates = now.only_evaluates;
    this.bar.hidden = this.grid.hidden = this.health.hidden = this.evaluates;
    this.isOver = now.end !== null;
    this.tell(now);
    if (now.rows === this.rows) return;
    this.rows = now.rows;
    await Promise.all([this.evaluates ? null : this.curves(), this.evaluates ? null : this.judge(), this.evaluations.read(this.evaluates)]);
  }

  async judge() {
    const found = await get("/page/health");
    health(this.health, found, (name) => (this.own.includes(name) ? null : this.add(name)));
  }

  async choose(from = "", to = "") {
    this.range = { from, to };
    [this.from.value, this.to.value] = [from, to];
    await this.curves();
  }

  async add(name) {
    this.own = this.own.includes(name) ? this.own.filter((known) => known !== name) : [...this.own, name];
    localStorage.setItem(CHOSEN, JSON.stringify(this.own));
    await this.curves();
  }

  async curves() {
    this.names ??= new Set((await get("/page/curves")).names);
    const wanted = (names) => [...CHARTS.map(([title, pick]) => [title, pick(names), null]), ...this.own.map((name) => [name, [name], name])];
    const names = [...new Set(wanted(this.names).flatMap(([, names]) => names.slice(0, MOST)))].slice(0, 64);
    const found = await get("/page/curves", { names: names.join(","), points: POINTS, ...this.range });
    this.names = new Set(found.names);
    const shown = new Set();
    const places = new Map([[this.grid, []], [this.others, []]]);
    for (const [title, names, own] of wanted(this.names)) {
      if (names.length === 0) continue;
      const one = names.length === 1;
      const series = names.filter((name) => found.curves[name]).map((name) => ({ name: one ? name : label(name), ...found.curves[name] }));
      if (!series.some((one) => one.x.length > 0)) continue;
      shown.add(title);
      if (!this.charts.has(title)) this.charts.set(title, new Chart(title, { choose: (from, to) => this.choose(from, to), remove: own && (() => this.add(own)), help: help(names[0]) }));
      const chart = this.charts.get(title);
      places.get(FIRST.has(title) ? this.grid : this.others).push(chart.node);
      chart.show(series, names.slice(MOST).map(label));
    }
    for (const [place, nodes] of places) arrange(place, nodes);
    for (const [title, chart] of this.charts) if (!shown.has(title)) chart.node.remove();
    if (shown.size === 0) replace(this.grid, el("p", { class: "card empty", text: this.isOver ? "No step was trained." : "No step is trained yet." }));
    else this.grid.querySelector(".empty")?.remove();
    if (this.more.options.length !== found.names.length + 1) {
      this.more.replaceChildren(el("option", { value: "", text: "Add a curve…" }), ...found.names.map((name) => el("option", { value: name, text: name })));
    }
    this.more.value = "";
  }

  tell(now) {
    idle(this.idle, now);
    if (!now.status) return replace(this.tiles);
    replace(this.tiles, ...(this.evaluates ? ofEvaluation(now) : ofTraining(now)));
    waits(this.waits, now);
    engines(this.engines, now);
    environments(this.environments, now);
    return workers(this.workers, now);
  }
}
