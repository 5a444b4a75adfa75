// The last rollouts, in an order, narrowed to what is asked for, a page at a time.

import { advantage, cut, el, fate, get, replace, reward, span, table, versions, whole, words } from "./common.js";

const FATES = ["in_flight", "waits", "trained", "filtered", "stale", "failed", "cancelled", "evaluated"];
/** Which they are, and what its pages are called: the first one, the one before, the next. */
const ORDERS = {
  newest: ["newest first", "Newest", "Newer", "Older"],
  highest_reward: ["highest reward first", "Highest", "Higher", "Lower"],
  lowest_reward: ["lowest reward first", "Lowest", "Lower", "Higher"],
};
const LIMIT = 100;
const FILTERS = ["step", "environment", "fate", "group", "min_reward", "max_reward", "order"];
/** Which page it is: the one behind a rollout, or the one before it. */
const PLACES = ["cursor", "until"];

function rows(rollouts) {
  const head = ["rollout", "group", "environment", { right: "example" }, "fate", { right: "step" }, { right: "reward" }, { right: "advantage" }, { right: "turns" }, { right: "tokens" }, "versions", { right: "staleness" }, { right: "took" }];
  const line = (one) => [
    el("a", { href: `#/rollouts/${one.rollout}`, text: String(one.rollout) }),
    el("a", { href: `#/groups/${one.group}`, text: String(one.group), title: "its rollouts side by side" }),
    cut(one.evaluates === null ? one.environment : `${one.environment} (v${one.evaluates})`),
    { right: whole(one.example) },
    el("span", {}, fate(one), one.reason ? el("span", { class: "faint", text: ` ${words(one.reason)}` }) : ""),
    { right: one.step ?? "" }, { right: reward(one.reward) }, { right: advantage(one.advantage) }, { right: whole(one.turns) },
    { right: whole(one.sampled_tokens) }, versions(one.versions), { right: one.staleness ?? "" }, { right: one.took_s === null ? "" : span(one.took_s) },
  ];
  return table(head, rollouts.map(line), "list");
}

/** Ways to the other pages, and where this one is. */
class Pager {
  constructor() {
    this.links = ["first", "previous", "next"].map(() => el("a", { class: "button" }));
    this.where = el("span", { class: "faint number" });
    this.node = el("nav", { class: "bar pages", "aria-label": "Pages" }, this.links, this.where);
  }

  /** `places`: those of the pages; `null` where there is none. */
  show(names, places, where) {
    this.links.forEach((link, at) => {
      link.textContent = names[at];
      const place = places[at];
      if (place === null) {
        link.removeAttribute("href");
        link.setAttribute("aria-disabled", "true");
      } else {
        link.setAttribute("href", place);
        link.removeAttribute("aria-disabled");
      }
    });
    this.where.textContent = where;
  }
}

export class Rollouts {
  constructor(query) {
    const change = () => this.go();
    const reward = (label) => el("input", { type: "number", step: "any", "aria-label": label, on: { change } });
    this.fields = {
      step: el("input", { type: "number", min: 1, on: { change } }),
      environment: el("select", { on: { change } }, el("option", { value: "", text: "all" })),
      fate: el("select", { on: { change } }, el("option", { value: "", text: "all" }), FATES.map((name) => el("option", { value: name, text: words(name) }))),
      group: el("input", { type: "number", min: 0, on: { change } }),
      min_reward: reward("least reward"),
      max_reward: reward("highest reward"),
      order: el("select", { on: { change } }, Object.entries(ORDERS).map(([name, [text]]) => el("option", { value: name === "newest" ? "" : name, text }))),
    };
    const { min_reward: least, max_reward: most, ...others } = this.fields;
    const labels = Object.entries(others).map(([name, field]) => el("label", {}, name, field));
    labels.splice(-1, 0, el("label", {}, "reward", least, "to", most));
    const bar = el("div", { class: "bar" }, labels, el("button", { text: "Clear", on: { click: () => (location.hash = "#/rollouts") } }));
    this.list = el("div", { class: "card" });
    this.pagers = [new Pager(), new Pager()];
    this.node = el("div", {}, el("h1", { text: "Rollouts" }), bar, this.pagers[0].node, this.list, this.pagers[1].node);
    this.take(query);
  }

  /** What the address asks for. */
  take(query) {
    this.filter = Object.fromEntries(FILTERS.map((name) => [name, query.get(name) ?? ""]));
    this.place = Object.fromEntries(PLACES.map((name) => [name, query.get(name) ?? ""]));
    for (const [name, value] of Object.entries(this.filter)) this.fields[name].value = value;
  }

  /** Filters and place are in the address, so that a list can be kept or sent. */
  address(asked) {
    const wanted = Object.entries(asked).filter(([, value]) => value !== "");
    return `#/rollouts${wanted.length ? `?${new URLSearchParams(wanted)}` : ""}`;
  }

  go() {
    location.hash = this.address(Object.fromEntries(Object.entries(this.fields).map(([name, field]) => [name, field.value])));
  }

  async open() {
    await this.read();
  }

  /** To another page, or to another list. */
  async goTo(query) {
    this.take(query);
    const { top } = this.node.getBoundingClientRect();
    await this.read();
    if (top < 0) scrollTo(0, 0);
  }

  /** The first page as it is now; nothing moves under somebody who has turned to another one. */
  async now(now) {
    const known = now.environments ?? [];
    if (this.fields.environment.options.length !== known.length + 1) {
      this.fields.environment.replaceChildren(el("option", { value: "", text: "all" }), ...known.map((name) => el("option", { value: name, text: name })));
      this.fields.environment.value = this.filter.environment;
    }
    if (this.place.cursor === "" && this.place.until === "") await this.read();
  }

  async read() {
    const asked = { ...this.filter, ...this.place };
    const found = await get("/page/rollouts", { ...asked, limit: LIMIT });
    // Somebody has turned the page meanwhile.
    if (this.address(asked) !== this.address({ ...this.filter, ...this.place })) return;
    const text = JSON.stringify(found);
    if (text === this.text) return;
    this.text = text;
    this.show(found);
  }

  show(found) {
    const { rollouts, matching, before, known } = found;
    const others = matching < known ? ` that pass, of the last ${whole(known)}` : "";
    const place = rollouts.length ? `${whole(before + 1)} to ${whole(before + rollouts.length)} of ${whole(matching)}${others}` : "";
    const where = `${place}${found.is_up_to_date ? "" : `${place ? ", " : ""}the journal is still being read`}`;
    const to = (place) => this.address({ ...this.filter, ...place });
    const places = [before > 0 ? to({}) : null, found.previous === null ? null : to({ until: found.previous }), found.next === null ? null : to({ cursor: found.next })];
    const [, ...names] = ORDERS[this.filter.order] ?? ORDERS.newest;
    for (const pager of this.pagers) pager.show(names, places, where);
    replace(this.list, rollouts.length ? rows(rollouts) : el("p", { class: "empty", text: known ? "No rollout passes these filters." : "No rollout has begun yet." }));
  }
}
