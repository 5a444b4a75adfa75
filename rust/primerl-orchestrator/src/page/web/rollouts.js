// The last rollouts, the newest first, narrowed to what is asked for.

import { advantage, el, fate, get, replace, reward, span, table, versions, whole, words } from "./common.js";

const FATES = ["in_flight", "waits", "trained", "filtered", "stale", "failed", "cancelled", "evaluated"];
const LIMIT = 50;
const FIELDS = ["step", "environment", "fate", "group"];

export function rows(rollouts) {
  const head = ["rollout", "group", "environment", { right: "example" }, "fate", { right: "step" }, { right: "reward" }, { right: "advantage" }, { right: "turns" }, { right: "tokens" }, "versions", { right: "staleness" }, { right: "took" }];
  const line = (one) => [
    el("a", { href: `#/rollouts/${one.rollout}`, text: String(one.rollout) }),
    el("a", { href: `#/groups/${one.group}`, text: String(one.group), title: "its rollouts side by side" }),
    one.evaluates === null ? one.environment : `${one.environment} (v${one.evaluates})`,
    { right: whole(one.example) },
    el("span", {}, fate(one), one.reason ? el("span", { class: "faint", text: ` ${words(one.reason)}` }) : ""),
    { right: one.step ?? "" }, { right: reward(one.reward) }, { right: advantage(one.advantage) }, { right: whole(one.turns) },
    { right: whole(one.sampled_tokens) }, versions(one.versions), { right: one.staleness ?? "" }, { right: one.took_s === null ? "" : span(one.took_s) },
  ];
  return table(head, rollouts.map(line), "list");
}

export class Rollouts {
  constructor(query) {
    this.filter = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""]));
    this.older = [];
    const change = () => this.go();
    this.fields = {
      step: el("input", { type: "number", min: 1, on: { change } }),
      environment: el("select", { on: { change } }, el("option", { value: "", text: "all" })),
      fate: el("select", { on: { change } }, el("option", { value: "", text: "all" }), FATES.map((name) => el("option", { value: name, text: words(name) }))),
      group: el("input", { type: "number", min: 0, on: { change } }),
    };
    this.count = el("span", { class: "end faint number", role: "status" });
    this.list = el("div", { class: "card" });
    this.more = el("button", { text: "Older", hidden: true, on: { click: () => this.page() } });
    for (const [name, value] of Object.entries(this.filter)) this.fields[name].value = value;
    const bar = el("div", { class: "bar" }, Object.entries(this.fields).map(([name, field]) => el("label", {}, name, field)),
      el("button", { text: "Clear", on: { click: () => (location.hash = "#/rollouts") } }), this.count);
    this.node = el("div", {}, el("h1", { text: "Rollouts" }), bar, this.list, el("p", {}, this.more));
  }

  /** Filters are in the address, so that a list can be kept or sent. */
  go() {
    const wanted = Object.entries(this.fields).filter(([, field]) => field.value !== "").map(([name, field]) => [name, field.value]);
    location.hash = `#/rollouts${wanted.length ? `?${new URLSearchParams(wanted)}` : ""}`;
  }

  async open() {
    await this.first();
  }

  /** The newest; nothing moves under somebody who has asked for older ones. */
  async now(now) {
    const known = now.environments ?? [];
    if (this.fields.environment.options.length !== known.length + 1) {
      this.fields.environment.replaceChildren(el("option", { value: "", text: "all" }), ...known.map((name) => el("option", { value: name, text: name })));
      this.fields.environment.value = this.filter.environment;
    }
    if (this.older.length === 0) await this.first();
  }

  async first() {
    const found = await get("/page/rollouts", { ...this.filter, limit: LIMIT });
    this.show(found, found.rollouts);
  }

  async page() {
    const found = await get("/page/rollouts", { ...this.filter, limit: LIMIT, cursor: this.next });
    this.older = [...(this.older.length ? this.older : this.shown), ...found.rollouts];
    this.show(found, this.older);
  }

  show(found, rollouts) {
    this.shown = rollouts;
    this.next = found.next;
    this.more.hidden = found.next === null;
    this.count.textContent = `${whole(found.matching)} of the last ${whole(found.known)}${found.is_up_to_date ? "" : ", the journal is still being read"}`;
    replace(this.list, rollouts.length ? rows(rollouts) : el("p", { class: "empty", text: found.known ? "No rollout passes these filters." : "No rollout has begun yet." }));
  }
}
