// Rollouts of the same example in several runs, and at several steps of each.

import { advantage, el, fate, get, replace, short, whole } from "/page/assets/common.js";
import { addressOf, chosen, missing, nameOf, problems, sign } from "./choice.js";

const LIMIT = 20;
const TOKENS = 4096;

export class Rollouts {
  constructor(tell) {
    this.tell = tell;
    const change = () => (location.hash = addressOf("rollouts", this.ids, { environment: this.environment.value, example: this.example.value, of: this.example.value && this.of }));
    this.environment = el("select", { "aria-label": "environment", on: { change } });
    this.example = el("input", { type: "number", min: 0, "aria-label": "number of the example", placeholder: "any", on: { change } });
    /** Each run has its examples in an order of its own: the number is of this one. */
    this.whose = el("span", { class: "note" });
    this.body = el("div", {}, el("p", { class: "note", text: "Reading…" }));
    this.node = el("div", { class: "reading" }, el("h1", { text: "Rollouts of the same example" }), el("div", { class: "bar" }, el("label", {}, "environment", this.environment), el("label", {}, "example", this.example), this.whose), this.body);
  }

  async goTo(query, runs) {
    this.ids = chosen(query, runs);
    const environment = query.get("environment") ?? "";
    const trained = this.ids.flatMap((id) => runs.find((run) => run.id === id).environments);
    this.offer([...trained, environment], environment);
    this.example.value = query.get("example") ?? "";
    this.of = this.ids.includes(query.get("of")) ? query.get("of") : this.ids[0];
    this.whose.textContent = this.ids.length > 1 ? `by its number in ${nameOf(runs.find((run) => run.id === this.of), runs)}` : "";
    const gone = missing(query, runs);
    if (this.ids.length === 0) return replace(this.body, problems(gone, runs), el("p", { class: "card empty", text: "Choose runs first." }));
    const serial = (this.serial = (this.serial ?? 0) + 1);
    let found;
    try {
      found = await get("/api/rollouts", { runs: this.ids.join(","), environment, example: this.example.value, of: this.example.value && this.of, limit: LIMIT });
    } catch (error) {
      // What was shown is of another question.
      if (serial === this.serial) replace(this.body, problems(gone, runs));
      throw error;
    }
    if (serial !== this.serial) return undefined;
    this.offer([...found.environments, environment], environment);
    const columns = this.ids.filter((id) => found.runs[id]).map((id) => this.column(runs.find((run) => run.id === id), found.runs[id], runs));
    replace(this.body, problems({ ...gone, ...found.problems }, runs), el("div", { class: "columns" }, columns));
    return undefined;
  }

  /** Environments to choose from: those that are trained, and those of evaluations once they are known. */
  offer(names, chosen) {
    const known = [...new Set(names)].filter(Boolean).sort();
    this.environment.replaceChildren(el("option", { value: "", text: "all" }), ...known.map((name) => el("option", { value: name, text: name })));
    this.environment.value = chosen;
  }

  column(run, list, runs) {
    const rows = list.rollouts.map((one) => {
      const place = el("div", { hidden: true });
      const open = el("button", { text: "Read", "aria-expanded": "false", on: { click: () => this.read(run, one, place, open) } });
      const same = el("a", { href: addressOf("rollouts", this.ids, { environment: one.environment, example: one.example, of: run.id }), text: `example ${whole(one.example)}`, title: "only this example, in all these runs" });
      return el("div", { class: "turn" }, el("div", { class: "row" }, el("b", { text: one.step !== null ? `step ${whole(one.step)}` : one.evaluates !== null ? `evaluates v${one.evaluates}` : "not trained" }), one.fate === "evaluated" ? "" : fate(one), el("span", { class: "end number", text: `reward ${short(one.reward)}` })),
        el("div", { class: "row" }, el("span", { class: "note" }, same, `, rollout ${one.rollout}, ${whole(one.turns)} turn${one.turns === 1 ? "" : "s"}`, one.advantage === null ? "" : [", advantage ", advantage(one.advantage)]), open), place);
    });
    const fit = `${whole(list.matching)} of ${whole(list.known)} fit${list.matching > rows.length ? `, the newest ${rows.length} are shown` : ""}`;
    const known = list.is_up_to_date ? fit : `${fit}; the journal is still being read`;
    return el("section", { class: "card" }, el("h2", {}, sign(this.ids.indexOf(run.id)), nameOf(run, runs)), el("p", { class: "note", text: known }), rows.length ? rows : el("p", { class: "empty", text: "None fits." }));
  }

  async read(run, one, place, open) {
    place.hidden = !place.hidden;
    open.setAttribute("aria-expanded", String(!place.hidden));
    open.textContent = place.hidden ? "Read" : "Close";
    if (place.hidden || place.firstChild) return;
    if (one.turns === 0) return place.append(el("p", { class: "note", text: one.message ?? "No turn is recorded." }));
    try {
      for (let turn = one.turns_gone; turn < one.turns; turn += 1) {
        const found = await get(`/api/runs/${run.id}/rollouts/${one.rollout}/turns/${turn}`, { limit: TOKENS });
        if (found.prompt?.text) place.append(el("div", { class: "text prompt", text: found.prompt.text }));
        place.append(el("div", { class: "text", text: (found.pieces ?? found.ids).join(found.pieces ? "" : " ") + (found.next === null ? "" : "…") }));
      }
    } catch (error) {
      place.append(el("p", { class: "note", text: error.message }));
    }
    return undefined;
  }
}
