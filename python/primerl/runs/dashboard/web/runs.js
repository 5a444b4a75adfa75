// All runs, and curves of those that are chosen over each other.

import { Chart } from "/page/assets/chart.js";
import { cut, el, get, replace, span, table, whole } from "/page/assets/common.js";
import { help } from "/page/assets/help.js";
import { addressOf, chosen, missing, MOST, nameOf, NONE, problems, sign, status } from "./choice.js";

const NAMES = ["reward/all/mean", "entropy/all/mean", "mismatch_kl/all/mean", "loss/mean"];
/** Of one curve; half as many where there are many runs, whose curves are a mean over a faint band. */
const POINTS = 400;
const MANY = 10;
const STATUS = ["running", "pending", "completed", "stopped", "failed", "unknown"];
const MOST_CHARTS = 16;
/** Runs that are asked for at a time, before anything of them was read. */
const PART = 2;

export class Runs {
  constructor(tell) {
    this.tell = tell;
    this.charts = new Map();
    this.range = {};
    this.steps = "";
    this.read = new Set();
    this.search = el("input", { type: "search", placeholder: "name, model, environment", "aria-label": "search runs", on: { input: () => this.list() } });
    this.only = el("select", { "aria-label": "only runs that are", on: { change: () => this.list() } }, el("option", { value: "", text: "all" }), STATUS.map((text) => el("option", { value: text.toUpperCase(), text })));
    this.from = el("input", { type: "number", min: 0, "aria-label": "first step", placeholder: "first" });
    this.to = el("input", { type: "number", min: 0, "aria-label": "last step", placeholder: "last" });
    for (const field of [this.from, this.to]) field.addEventListener("change", () => this.zoom(this.from.value, this.to.value));
    this.more = el("select", { "aria-label": "add a curve", on: { change: () => this.add(this.more.value) } });
    this.rows = el("div", { class: "card", id: "runs-list", tabindex: -1 });
    this.problems = el("div");
    this.grid = el("div", { class: "charts" });
    const button = (text, click) => el("button", { text, on: { click } });
    this.node = el("div", { class: "runs" }, el("h1", { text: "Runs" }),
      el("div", { class: "bar" }, this.search, el("label", {}, "status", this.only), button("Choose none", () => this.choose([])), button("Compare", () => (location.hash = addressOf("compare", this.ids))),
        el("span", { class: "keys" }, el("kbd", { text: "↑" }), el("kbd", { text: "↓" }), " ", el("kbd", { text: "space" }), " choose · ", el("kbd", { text: "/" }), " search · ", el("kbd", { text: "o" }), el("kbd", { text: "c" }), el("kbd", { text: "r" }), " views · on a curve ", el("kbd", { text: "+" }), el("kbd", { text: "-" }), el("kbd", { text: "[" }), el("kbd", { text: "]" }), el("kbd", { text: "0" }))),
      this.rows, el("div", { class: "bar", style: null }, el("label", {}, "Steps", this.from, "to", this.to), button("All steps", () => this.zoom()), el("label", { class: "end" }, this.more)),
      this.problems, this.grid);
  }

  async goTo(query, runs) {
    this.query = query;
    this.runs = runs;
    this.ids = chosen(query, runs);
    this.names = query.has("names") ? query.get("names").split(",").filter(Boolean).slice(0, MOST_CHARTS) : NAMES;
    this.range = { from: query.get("from") ?? "", to: query.get("to") ?? "" };
    [this.from.value, this.to.value] = [this.range.from, this.range.to];
    this.list();
    await this.draw();
  }

  /** The list again: running ones may have more steps. */
  async news(runs) {
    this.runs = runs;
    this.ids = this.query.has("runs") ? this.ids.filter((id) => runs.some((run) => run.id === id)) : chosen(this.query, runs);
    this.list();
    if (this.stepsOf() !== this.steps) await this.draw();
  }

  stepsOf() {
    return this.ids.map((id) => `${id}:${this.runs.find((run) => run.id === id)?.step}`).join();
  }

  choose(ids) {
    this.move({ ids });
  }

  zoom(from = "", to = "") {
    this.move({ from: String(from), to: String(to) });
  }

  add(name) {
    if (name) this.move({ names: this.names.includes(name) ? this.names.filter((one) => one !== name) : [...this.names, name] });
  }

  /** What is looked at is in the address, so that it can be kept or sent. */
  move({ ids = this.ids, names = this.names, from = this.range.from, to = this.range.to }) {
    const own = names.join() === NAMES.join() ? "" : names.join(",");
    // No run at all is a choice too.
    location.hash = ids.length ? addressOf("", ids, { names: own, from, to }) : `#/?runs=${NONE}`;
  }

  list() {
    const wanted = this.search.value.toLowerCase();
    const fits = (run) => (!this.only.value || run.status === this.only.value) && [run.id, run.name, run.model, ...run.environments].join(" ").toLowerCase().includes(wanted);
    const found = this.runs.filter(fits);
    const head = ["", "name", "", "status", { right: "step" }, "kind", "environments", "model", "started", "id"];
    const now = Date.now() / 1000;
    const line = (run) => {
      const number = this.ids.indexOf(run.id);
      const name = nameOf(run, this.runs);
      const box = el("input", { type: "checkbox", value: run.id, checked: number >= 0, "aria-label": `draw ${name}`, on: { change: () => this.choose(number >= 0 ? this.ids.filter((id) => id !== run.id) : [...this.ids, run.id].slice(-MOST)) } });
      return [box, cut(name), sign(number), el("span", {}, status(run), run.reason ? el("span", { class: "faint" }, " ", cut(run.reason_line)) : ""), { right: run.step === null ? "–" : whole(run.step) }, run.kind, cut(run.environments.join(", ")), cut(run.model), `${span(Math.max(0, now - run.started)).replace(/ \d+ s$/, "")} ago`, el("a", { href: `#${run.id}`, text: run.id, title: `the page of ${name}`, on: { click: (event) => this.page(event, run) } })];
    };
    const at = document.activeElement?.closest?.("#runs-list") ? document.activeElement.value : null;
    const lines = found.length ? table(head, found.map(line), "list") : el("p", { class: "empty", text: this.runs.length ? "No run fits." : "No run has been started yet: `primerl run init > rl.toml` writes a config to start from." });
    replace(this.rows, lines);
    // The table is another one, and whoever chooses by key continues there.
    if (at) this.rows.querySelector(`input[value="${CSS.escape(at)}"]`)?.focus({ preventScroll: true });
  }

  async page(event, run) {
    event.preventDefault();
    try {
      const { url } = await get(`/api/runs/${run.id}/page`);
      open(url, "_blank", "noopener");
    } catch (error) {
      this.tell(error);
    }
  }

  async draw() {
    this.steps = this.stepsOf();
    const serial = (this.serial = (this.serial ?? 0) + 1);
    const found = { names: [], runs: {}, problems: {} };
    if (this.ids.length === 0) this.put(found);
    for (const ids of this.parts()) {
      const part = await get("/api/curves", { runs: ids.join(","), names: this.names.join(","), points: this.ids.length > MANY ? POINTS / 2 : POINTS, ...this.range });
      // A later question may have been answered before.
      if (serial !== this.serial) return;
      for (const id of ids) this.read.add(id);
      found.names = [...new Set([...found.names, ...part.names])].sort();
      Object.assign(found.runs, part.runs);
      Object.assign(found.problems, part.problems);
      this.put(found);
    }
  }

  /** Runs whose files the server has read, and the others a few at a time, so that something is seen soon. */
  parts() {
    const fresh = this.ids.filter((id) => !this.read.has(id));
    const parts = [this.ids.filter((id) => this.read.has(id))];
    for (let at = 0; at < fresh.length; at += PART) parts.push(fresh.slice(at, at + PART));
    return parts.filter((part) => part.length > 0);
  }

  put(found) {
    replace(this.problems, problems({ ...missing(this.query, this.runs), ...found.problems }, this.runs));
    const nodes = [];
    for (const name of this.names) {
      const series = this.ids.map((id) => {
        const run = this.runs.find((one) => one.id === id);
        return { name: nameOf(run, this.runs), x: [], y: [], ...found.runs[id]?.[name] };
      });
      if (!series.some((one) => one.x.length) && !this.query.has("names")) continue;
      if (!this.charts.has(name)) this.charts.set(name, new Chart(name, { choose: (from, to) => this.zoom(from, to), remove: () => this.add(name), most: MOST, dashes: true, help: help(name) }));
      this.charts.get(name).show(series);
      nodes.push(this.charts.get(name).node);
    }
    const shown = nodes.length ? nodes : [el("p", { class: "card empty", text: this.nothing() })];
    if (shown.length !== this.grid.children.length || shown.some((node, at) => this.grid.children[at] !== node)) this.grid.replaceChildren(...shown);
    this.more.replaceChildren(el("option", { value: "", text: "Add a curve…" }), ...found.names.filter((name) => !this.names.includes(name)).map((name) => el("option", { value: name, text: name })));
  }

  /** Why no curve is drawn. */
  nothing() {
    if (this.ids.length === 0) return "Choose runs above to draw them.";
    const { from, to } = this.range;
    if (from === "" && to === "") return "None of these runs has trained a step.";
    return `None of these runs has a value at steps ${from || "0"} to ${to || "the last"}; “All steps” shows what there is.`;
  }

  /** Arrow keys go from run to run. */
  key(event) {
    if (event.key === "/") {
      event.preventDefault();
      return this.search.focus();
    }
    const way = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!way || event.target.closest(".chart")) return undefined;
    event.preventDefault();
    const boxes = [...this.rows.querySelectorAll("input[type=checkbox]")];
    const at = boxes.indexOf(document.activeElement);
    boxes[Math.max(0, Math.min(boxes.length - 1, at + way))]?.focus();
    return undefined;
  }
}
