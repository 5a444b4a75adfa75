// The rollouts of a group side by side, the best first.

import { advantage, el, fate, get, replace, reward, versions, whole, words } from "./common.js";
import { GONE, Reading, facts } from "./rollout.js";
import { PENDING, Turn } from "./tokens.js";

/** Rollouts that are shown at a time. */
const COLUMNS = 32;
const MOST = 500;

/** One rollout of the group: how it ended, and its last turn, which is the answer; what led there is a click away. */
class Column {
  constructor(one, colours, signal) {
    this.one = one;
    this.colours = colours;
    this.signal = signal;
    this.fate = el("span", { class: "end" });
    this.facts = el("dl", { class: "facts" });
    this.text = el("div");
    const head = el("div", { class: "row" }, el("h2", {}, el("a", { href: `#/rollouts/${one.rollout}`, text: `Rollout ${one.rollout}` })), this.fate);
    this.node = el("section", { class: "card" }, head, this.facts, this.text);
    this.tell();
  }

  tell() {
    const { one } = this;
    replace(this.fate, fate(one));
    replace(this.facts, ...facts([["reward", reward(one.reward)], ["advantage", advantage(one.advantage)], ["versions", versions(one.versions)], ["turns", whole(one.turns)]]));
  }

  /** As it is known now; its text is read again where it has another turn or fate. */
  async update(one) {
    const before = this.one;
    this.one = one;
    this.tell();
    if (before.turns !== one.turns || before.fate !== one.fate) await this.read();
  }

  async read() {
    const { one, turn: before } = this;
    const text = [];
    if (one.fate === "failed") text.push(el("div", { class: "text prompt", text: one.message ?? words(one.reason ?? "its message is not kept any more") }));
    if (one.turns > 0 && one.turns <= one.turns_gone) text.push(el("p", { class: "note", text: GONE }));
    else if (one.turns > 0) text.push(await this.last());
    if (this.signal.aborted) return;
    this.text.replaceChildren(...text);
    before?.close();
  }

  async last() {
    const { one } = this;
    this.turn = new Turn(one, one.turns - 1, this.colours, this.signal);
    try {
      await this.turn.load();
    } catch (error) {
      // The others are shown whatever one answers.
      return el("p", { class: "note", text: error.message });
    }
    // All have the first prompt, which is shown above.
    if (one.turns === 1) this.turn.node.querySelector(".prompt")?.remove();
    return this.turn.node;
  }
}

export class Group extends Reading {
  constructor(id) {
    super("Group", id);
    this.shown = new Map();
    this.prompt = el("section", { class: "card first", hidden: true }, el("h2", { text: "First prompt" }));
    this.columns = el("div", { class: "columns" });
    this.more = el("button", { hidden: true, on: { click: () => this.want(this.shown.size + COLUMNS) } });
    this.wanted = COLUMNS;
  }

  async open() {
    const { rollouts, matching } = await this.ask();
    if (rollouts.length === 0) return this.body.replaceChildren(el("p", { class: "empty", text: "None of its rollouts is among those that are known." }));
    rollouts.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.rollout - b.rollout);
    [this.all, this.matching] = [rollouts, matching];
    this.body.replaceChildren(this.facts, this.prompt, this.colours.bar, this.columns, el("p", {}, this.more));
    this.reads = false;
    await this.once(async () => {
      await this.first();
      await this.fill();
    });
  }

  ask() {
    return get("/page/rollouts", { group: this.id, limit: MOST }, this.stop.signal);
  }

  /** Its fates and turns change while it goes on; no column changes its place under somebody who reads. */
  async now(now) {
    if (!this.all || now.end || !this.all.some((one) => PENDING.has(one.fate))) return;
    await this.once(async () => {
      const { rollouts, matching } = await this.ask();
      const known = new Map(rollouts.map((one) => [one.rollout, one]));
      const fresh = rollouts.reverse().filter((one) => !this.all.some((shown) => shown.rollout === one.rollout));
      this.all = [...this.all.map((one) => known.get(one.rollout) ?? one), ...fresh];
      this.matching = matching;
      await this.first();
      for (const one of this.all) await this.shown.get(one.rollout)?.update(one);
      await this.fill();
    });
  }

  /** So many columns; whoever reads at the moment goes on with them. */
  async want(count) {
    this.wanted = count;
    await this.once(() => this.fill());
  }

  /** Columns that are wanted and not shown yet. */
  async fill() {
    this.tell();
    while (this.shown.size < Math.min(this.wanted, this.all.length)) {
      const fresh = this.all.filter((one) => !this.shown.has(one.rollout)).slice(0, this.wanted - this.shown.size);
      for (const one of fresh) {
        const column = new Column(one, this.colours, this.stop.signal);
        this.shown.set(one.rollout, column);
        this.columns.append(column.node);
      }
      this.tell();
      for (const one of fresh) await this.shown.get(one.rollout).read();
    }
  }

  tell() {
    const [first] = this.all;
    const [shown, all] = [this.shown.size, Math.max(this.matching, this.all.length)];
    replace(this.facts, ...facts([["environment", first.environment], ["example", whole(first.example)], ["rollouts", shown < all ? `${whole(shown)} of ${whole(all)} shown` : whole(all)],
      ["step", first.step], ["evaluates", first.evaluates === null ? "" : `v${first.evaluates}`]]));
    this.more.hidden = shown >= this.all.length;
    this.more.textContent = `Show ${Math.min(COLUMNS, this.all.length - shown)} more`;
  }

  /** The prompt of the first turn, which all of them have: of one whose first turn is kept. */
  async first() {
    const one = this.all.find((one) => one.turns > 0 && one.turns_gone === 0);
    if (!this.prompt.hidden || !one) return;
    const found = await get(`/page/rollouts/${one.rollout}/turns/0`, { limit: 1 }, this.stop.signal).catch(() => null);
    if (!found?.prompt?.text) return;
    this.prompt.append(el("div", { class: "text prompt", tabindex: 0, role: "group", "aria-label": "the first prompt", text: found.prompt.text }));
    this.prompt.hidden = false;
  }
}
