// How the run does: numbers of now, curves, where the time goes, who waits for whom, engines, evaluations.

import { Chart } from "./chart.js";
import { el, get, percent, replace, short, span, table, whole, words } from "./common.js";

const CHOSEN = "primerl-charts";
const POINTS = 600;
const of = (...wanted) => (names) => wanted.filter((name) => names.has(name));

/** Failed rollouts of an environment, in all and by kind. */
function errors(environment) {
  const counts = Object.entries(environment.errors ?? {});
  const all = counts.reduce((sum, [, count]) => sum + count, 0);
  const kinds = counts.map(([kind, count]) => `${words(kind)} ${whole(count)}`).join(", ");
  return kinds ? `${whole(all)} (${kinds})` : "0";
}

/** `reward/<env>/mean` of every environment, where there are several. */
function byEnvironment(metric) {
  return (names) => {
    const own = [...names].filter((name) => name.startsWith(`${metric}/`) && name.endsWith("/mean") && name !== `${metric}/all/mean` && !name.includes("/staleness_"));
    return [`${metric}/all/mean`, ...(own.length > 1 ? own : [])].filter((name) => names.has(name));
  };
}

const versionOf = (evaluation) => evaluation.version ?? evaluation.policy_at_the_time;

/** Of the mean reward; of one example there is none. */
function interval(evaluation) {
  const name = Object.keys(evaluation).find((name) => /^avg@\d+\/low$/.test(name));
  return name ? `${short(evaluation[name])} to ${short(evaluation[name.replace("low", "high")])}` : "–";
}

// Scores of one that was closed before its end are of the fast examples.
const ended = (one) => one.complete === false ? `incomplete: ${whole(one.rollouts)} of ${whole(one.expected)}` : whole(one.rollouts);

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
  ["Metrics of the environments", (names) => [...names].filter((name) => /^metric\/.*\/mean$/.test(name)).slice(0, 6)],
  ["Entropy", of("entropy/all/mean")],
  ["Trainer against engine (KL)", of("mismatch_kl/all/mean")],
  ["Norm of the gradient", of("optim/grad_norm")],
  ["Length of a sample, tokens", of("seq_len/all/mean", "seq_len/all/max")],
];

/** Those above where the time goes; the others are below. */
const FIRST = new Set(CHARTS.slice(0, 6).map(([title]) => title));

/** Curves that always come together do not repeat what their title says. */
function label(name) {
  return name.replace(/\/mean$/, "").replace(/^(reward|metric|time|rollouts|staleness|seq_len)\//, "") || name;
}

const KINDS = [[/^(busy|serves|runs)/, "busy"], [/^loads/, "loads"], [/^lost/, "gone"], [/^(waits|idle|asks|unproved)/, "waits-for"], [/./, "other"]];
const kind = (state) => KINDS.find(([pattern]) => pattern.test(state))[1];

const tile = (name, value, more = "") => el("div", { class: "card tile" }, el("dt", { text: name }), el("dd", {}, value, el("small", { text: more, title: more })));
const since = (now) => `${now.is_live ? "running" : "ran"} for ${span(now.status.run.elapsed_s)}`;
const sampling = ({ is_live, status: { tokens } }) => tile(is_live ? "Tokens/s" : "Tokens", whole(is_live ? tokens.per_second : tokens.sampled), is_live ? `${whole(tokens.sampled)} sampled` : "sampled");
const flying = ({ is_live, status: { rollouts } }) => tile("In flight", is_live ? whole(rollouts.in_flight) : "–", is_live ? `of ${whole(rollouts.limit)}, ${whole(rollouts.queued)} queued` : "the run is over");

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
    tile("Lost", whole(rollouts.failed + rollouts.stale + rollouts.cancelled), `${rollouts.failed} failed, ${rollouts.stale} stale, ${rollouts.cancelled} cancelled`),
    tile("Staleness", short(step["staleness/mean"]), `at most ${short(step["staleness/max"])}`),
    tile("Trainer idle", percent(trainer.idle_share), trainer.doing),
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
    this.idle = el("section", { class: "card", id: "idle" });
    this.waits = el("section", { class: "card", id: "waits" });
    this.engines = el("section", { class: "card", id: "engines" });
    this.workers = el("section", { class: "card", id: "workers" });
    this.evaluations = el("section", { class: "card", id: "evaluations" });
    this.measured = new Chart("Evaluations: mean reward by policy version", { dots: true, unit: "version" });
    const all = el("button", { text: "All steps", on: { click: () => this.choose() } });
    this.bar = el("div", { class: "bar" }, el("label", {}, "Steps", this.from, "to", this.to), all,
      el("span", { class: "faint" }, "drag over a curve to look closer"), el("label", { class: "end" }, this.more));
    this.node = el("div", {}, el("h1", { text: "Overview" }), this.tiles, this.bar, this.grid,
      el("div", { class: "wide" }, this.idle, this.waits, this.engines, this.workers, this.evaluations), this.others);
  }

  async now(now) {
    this.evaluates = now.only_evaluates;
    this.bar.hidden = this.grid.hidden = this.evaluates;
    this.tell(now);
    if (now.rows === this.rows) return;
    this.rows = now.rows;
    await Promise.all([this.evaluates ? null : this.curves(), this.measure()]);
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
    const names = [...new Set(wanted(this.names).flatMap(([, names]) => names))].slice(0, 64);
    const found = await get("/page/curves", { names: names.join(","), points: POINTS, ...this.range });
    this.names = new Set(found.names);
    const shown = new Set();
    for (const [title, names, own] of wanted(this.names)) {
      if (names.length === 0) continue;
      const one = names.length === 1;
      const series = names.filter((name) => found.curves[name]).map((name) => ({ name: one ? name : label(name), ...found.curves[name] }));
      if (!series.some((one) => one.x.length > 0)) continue;
      shown.add(title);
      if (!this.charts.has(title)) this.charts.set(title, new Chart(title, { choose: (from, to) => this.choose(from, to), remove: own && (() => this.add(own)) }));
      const chart = this.charts.get(title);
      const place = FIRST.has(title) ? this.grid : this.others;
      if (chart.node.parentNode === null) place.append(chart.node);
      chart.show(series);
    }
    for (const [title, chart] of this.charts) if (!shown.has(title)) chart.node.remove();
    if (shown.size === 0) replace(this.grid, el("p", { class: "card empty", text: "No step is trained yet." }));
    else this.grid.querySelector(".empty")?.remove();
    if (this.more.options.length !== found.names.length + 1) {
      this.more.replaceChildren(el("option", { value: "", text: "Add a curve…" }), ...found.names.map((name) => el("option", { value: name, text: name })));
    }
    this.more.value = "";
  }

  async measure() {
    const { evaluations } = await get("/page/evaluations", { limit: 1000 });
    if (!this.evaluates) this.draw(evaluations);
    if (evaluations.length === 0) return replace(this.evaluations, el("h2", { text: "Evaluations" }), el("p", { class: "note", text: "None has ended yet." }));
    const passes = (one) => Object.entries(one).filter(([name]) => /^pass@\d+$/.test(name));
    const failed = (one) => Object.entries(one.errors ?? {}).map(([kind, count]) => [`errors/${kind}`, count]);
    const metrics = (one) => [...passes(one), ...Object.entries(one.metrics ?? {}), ...failed(one)].map(([name, value]) => `${name} ${short(value)}`).join("  ");
    const rows = evaluations.slice(-12).reverse().map((one) => [
      one.environment, one.model ?? (this.evaluates ? "the checkpoint" : `v${versionOf(one)}`), { right: short(one.mean_reward) }, { right: interval(one) }, { right: ended(one) }, { right: whole(one.failed) }, metrics(one)]);
    replace(this.evaluations, el("h2", { text: "Evaluations" }),
      table(["environment", "measured", { right: "reward" }, { right: "95 % interval" }, { right: "rollouts" }, { right: "failed" }, "metrics"], rows));
  }

  draw(evaluations) {
    const environments = [...new Set(evaluations.map((one) => one.environment))];
    this.measured.show(environments.map((name) => {
      const own = evaluations.filter((one) => one.environment === name && one.mean_reward !== null);
      return { name, x: own.map(versionOf), y: own.map((one) => one.mean_reward) };
    }));
    if (evaluations.length > 0 && this.measured.node.parentNode === null) this.evaluations.before(this.measured.node);
  }

  tell(now) {
    const status = now.status;
    this.where(now.idle);
    if (!status) return replace(this.tiles);
    replace(this.tiles, ...(this.evaluates ? ofEvaluation(now) : ofTraining(now)));
    // Of a run that is over, what was last seen says nothing any more.
    const waits = now.is_live ? [...(status.waits ?? [])].sort((a, b) => Boolean(a.usual) - Boolean(b.usual) || b.since_s - a.since_s) : [];
    const lines = waits.slice(0, 14).map((wait) => el("li", {}, el("span", {}, el("b", { text: wait.who }), ` → ${wait.for}`),
      el("span", { class: `end number ${wait.deadline_s !== null && wait.deadline_s < 0 ? "late" : "faint"}`, title: wait.deadline_s === null ? "no deadline" : `${span(Math.max(0, wait.deadline_s))} left`, text: span(wait.since_s) })));
    replace(this.waits, el("h2", { text: "Who waits for what" }), lines.length ? el("ul", { class: "waits" }, lines) : el("p", { class: "note", text: now.is_live ? "Nobody waits." : "The run is over." }),
      waits.length > lines.length ? el("p", { class: "faint", text: `and ${waits.length - lines.length} more` }) : "");
    const engines = (status.engines ?? []).map((one) => [one.name ?? whole(one.engine), one.version === null ? "none" : `v${one.version}`, one.doing, { right: `${whole(one.running)}${one.limit ? ` / ${whole(one.limit)}` : ""}` }, { right: percent(one.idle_share) }, one.url]);
    replace(this.engines, el("h2", { text: "Engines" }), engines.length ? table(["engine", "proved", "does", { right: "requests" }, { right: "idle" }, "address"], engines) : el("p", { class: "note", text: "None has joined." }));
    const environments = (status.environments ?? []).map((one) => [one.name, { right: whole(one.examples) }, { right: whole(one.workers) }, { right: now.is_live ? whole(one.in_flight) : "–" }, { right: now.is_live ? whole(one.queued) : "–" }, { right: errors(one) }]);
    const failures = Object.entries(status.failures ?? {}).map(([name, count]) => `${words(name)} ${whole(count)}`).join(", ");
    replace(this.workers, el("h2", { text: "Environments" }), table(["environment", { right: "examples" }, { right: "workers" }, { right: "in flight" }, { right: "queued" }, { right: "errors" }], environments),
      failures ? el("p", { class: "note", text: `Failures: ${failures}` }) : "");
  }

  /** Where the time went. */
  where(idle) {
    if (!idle) return replace(this.idle, el("h2", { text: "Where the time goes" }), el("p", { class: "note", text: "The journal is being read." }));
    const bar = (name, states) => el("div", { class: "idle" }, el("b", { text: name }),
      el("div", { class: "shares", role: "img", "aria-label": states.map((one) => `${one.what} ${percent(one.share)}`).join(", ") }, states.map((one) => {
        const part = el("i", { class: kind(one.state), title: `${one.what}: ${percent(one.share)}` });
        part.style.flexGrow = Math.round(1000 * one.share);
        return part;
      })),
      el("div", { class: "reasons" }, states.filter((one) => one.share >= 0.005).slice(0, 6).map((one) => el("span", {}, el("i", { class: kind(one.state) }), `${one.what} ${percent(one.share)}`))));
    replace(this.idle, el("div", { class: "row" }, el("h2", { text: "Where the time goes" }), el("span", { class: "end faint", text: `of ${span(idle.seconds)}` })),
      this.evaluates ? "" : bar("Trainer", idle.trainer), ...idle.engines.map((one) => bar(`Engine ${one.engine}`, one.states)), ...idle.workers.map((one) => bar(`Workers of ${one.environment}`, one.states)));
  }
}
