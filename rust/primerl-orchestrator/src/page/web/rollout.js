// One rollout to read, turn by turn and token by token. What is not over is looked at again and again.

import { advantage, el, fate, get, replace, reward, short, span, versions, whole, words } from "./common.js";
import { Conversation, forked } from "./fork.js";
import { Colours, PENDING, Turn } from "./tokens.js";

export const GONE = "Turns from before the oldest event that is kept are not shown.";
/** Rollouts of its group that are named. */
const OTHERS = 64;

export function facts(pairs) {
  return pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", {}, value)));
}

/** A view of texts. */
export class Reading {
  constructor(title, id) {
    this.id = id;
    this.colours = new Colours();
    this.stop = new AbortController();
    this.facts = el("dl", { class: "facts" });
    this.body = el("div", {}, el("p", { class: "note", text: "Reading…" }));
    this.node = el("div", { class: "reading" }, el("h1", { text: `${title} ${id}` }), this.body, this.colours.inspect);
    this.reads = true;
  }

  /** `read`, unless it is reading already. */
  async once(read) {
    if (this.reads || this.stop.signal.aborted) return;
    this.reads = true;
    try {
      await read();
    } finally {
      this.reads = false;
    }
  }

  close() {
    this.stop.abort();
  }

  key(event) {
    this.colours.key(event);
  }
}

export class Rollout extends Reading {
  constructor(id) {
    super("Rollout", id);
    this.turns = [];
    this.conversation = new Conversation();
    this.group = el("div", { class: "bar" });
    this.reports = el("div");
    this.list = el("div");
  }

  async open() {
    try {
      this.told = await get(`/page/rollouts/${this.id}`, {}, this.stop.signal);
    } catch (error) {
      this.body.replaceChildren(el("p", { class: "empty", text: error.message }));
      return;
    }
    this.body.replaceChildren(this.facts, this.group, this.reports, this.colours.bar, this.list);
    this.reads = false;
    await this.once(() => this.show(this.told));
  }

  /** Of what is not over there may be more by now. */
  async now(now) {
    if (!this.told || !PENDING.has(this.told.fate) || now.end) return;
    await this.once(async () => {
      const told = await get(`/page/rollouts/${this.id}`, {}, this.stop.signal);
      // Leased again, it begins anew.
      if (told.leased_s !== this.told.leased_s) this.clear();
      const isOver = !PENDING.has(told.fate);
      this.told = told;
      await this.show(told);
      if (isOver) for (const turn of this.turns) await turn.refresh(told.fate);
    });
  }

  clear() {
    for (const turn of this.turns) turn.close();
    this.turns = [];
    this.conversation = new Conversation();
    this.list.replaceChildren();
  }

  async show(told) {
    replace(this.facts, ...facts([["fate", fate(told)], ["why", told.reason && words(told.reason)], ["reward", reward(told.reward)], ["advantage", advantage(told.advantage)], ["step", told.step], ["staleness", told.staleness],
      ["versions", versions(told.versions)], ["environment", told.environment], ["example", whole(told.example)], ["tokens", whole(told.sampled_tokens)], ["worker", String(told.worker)], ["leased at", span(told.leased_s)], ["took", told.took_s === null ? "" : span(told.took_s)]]));
    replace(this.reports, ...reports(told));
    await this.others(told);
    await this.read(told);
  }

  /** The others of its group, by number. */
  async others(told) {
    const { rollouts, matching } = await get("/page/rollouts", { group: told.group, limit: OTHERS }, this.stop.signal);
    const links = rollouts.reverse().map((one) => el("a", { href: `#/rollouts/${one.rollout}`, "aria-current": one.rollout === told.rollout ? "page" : null, title: `reward ${short(one.reward)}`, text: `${one.rollout} (${short(one.reward)})` }));
    const more = matching > links.length ? [el("a", { href: `#/rollouts?group=${told.group}`, text: `and ${whole(matching - links.length)} more` })] : [];
    replace(this.group, el("a", { href: `#/groups/${told.group}`, text: `Group ${told.group} side by side` }), el("span", { class: "note", text: "its rollouts:" }), ...links, ...more);
  }

  /** Turns that are not shown yet; those that are stay as they are. */
  async read(told) {
    this.list.querySelector(".empty")?.remove();
    if (told.earlier_turns_are_gone && !this.list.firstChild) this.list.append(el("p", { class: "note", text: GONE }));
    for (const turn of told.turn_list.slice(this.turns.length)) {
      const shown = new Turn(told, turn.turn, this.colours, this.stop.signal);
      this.turns.push(shown);
      this.list.append(el("section", { class: "card turn" }, head(turn), shown.node));
      const fork = this.conversation.add(turn, await shown.load());
      if (fork) shown.node.prepend(forked(fork));
    }
    if (this.turns.length === 0) this.list.append(el("p", { class: "card empty", text: PENDING.has(told.fate) ? "No turn has ended yet." : "No turn is recorded." }));
  }
}

/** What the environment told of it, and what went wrong. */
function reports(told) {
  const lines = (told.reports ?? []).map((report) => {
    const metrics = Object.entries(report.metrics).map(([name, value]) => `${name} ${short(value)}`);
    const flags = [report.trainable ? null : "not trained", report.ok ? null : "failed", report.truncated ? "truncated" : null, report.stop_condition && `stopped by ${report.stop_condition}`].filter(Boolean);
    return el("p", { class: "note" }, `${report.session ? `Session ${report.session.slice(0, 12)}: ` : "Reported: "}reward ${short(report.reward)}`, metrics.length ? `, ${metrics.join(", ")}` : "", flags.length ? ` (${flags.join(", ")})` : "");
  });
  const error = told.error ? `${words(told.error.kind)}: ${told.error.message}` : told.message;
  if (error) lines.push(el("div", { class: "text prompt", text: error }));
  return [...lines, ...told.turn_failures.map((message) => el("div", { class: "text prompt", text: `A turn failed: ${message}` }))];
}

function head(turn) {
  const goesOn = turn.parent === null ? words(turn.fork) : `extends turn ${turn.parent}`;
  return el("div", { class: "row" }, el("h2", { text: `Turn ${turn.turn}` }), el("span", { class: "note", text: goesOn, title: turn.parent === null ? "why it extends no earlier turn" : null }),
    turn.session ? el("span", { class: "faint", text: `session ${turn.session.slice(0, 12)}`, title: turn.session }) : "", turn.model ? el("span", { class: "faint", text: turn.model }) : "",
    el("span", { class: "end faint number", text: `${whole(turn.new_prompt_tokens)} new of ${whole(turn.prompt_tokens)} prompt tokens, ${whole(turn.sampled_tokens)} sampled at temperature ${short(turn.temperature)}, ended by ${words(turn.finish)}, ${turn.versions.map(([version, tokens]) => `v${version}: ${whole(tokens)}`).join(", ")}` }));
}

