// One rollout to read, turn by turn and token by token; and the rollouts of a group side by side.

import { advantage, el, fate, get, reward, short, signed, span, versions, whole, words } from "./common.js";

const MODES = { logprob: "log-probability", advantage: "advantage", version: "version" };
const CHOSEN = "primerl-colours";
const LIMIT = 4000;
/** A log-probability of this and less has the full colour. */
const UNLIKELY = -5;
/** Rollouts of a group that are shown. */
const COLUMNS = 32;
const GONE_ADVANTAGES = "Its advantages differ by token and are not kept any more: the batch that had them is gone.";
const GONE = "Turns from before the oldest event that is kept are not shown.";

function mix(name, share) {
  return `color-mix(in srgb, var(--${name}) ${Math.round(100 * share)}%, transparent)`;
}

/** The colour behind a token; `extent`: the largest advantage that is shown. */
function colour(token, mode, extent) {
  if (mode === "version") return token.version === undefined ? "" : mix(`c${token.version % 6}`, 0.4);
  if (mode === "advantage") return token.advantage ? mix(token.advantage > 0 ? "plus" : "minus", 0.12 + 0.55 * Math.min(1, Math.abs(token.advantage) / extent)) : "";
  return token.logprob === undefined ? "" : mix("hot", 0.75 * Math.sqrt(Math.min(1, token.logprob / UNLIKELY)));
}

/** Tokens that can be looked at one by one, by pointer or arrow keys. */
class Tokens {
  constructor(colours) {
    this.colours = colours;
    this.tokens = [];
    this.at = -1;
    this.node = el("div", { class: "text tokens", tabindex: 0, role: "group", "aria-label": "sampled tokens; arrow keys go through them" });
    const find = (event) => [...this.node.children].indexOf(event.target.closest(".tokens > span"));
    this.node.addEventListener("pointerover", (event) => this.look(find(event)));
    this.node.addEventListener("pointerleave", () => this.look(-1));
    this.node.addEventListener("blur", () => this.look(-1));
    this.node.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (way === undefined) return;
      event.preventDefault();
      this.look(Math.max(0, Math.min(this.tokens.length - 1, this.at + way)));
    });
    colours.add(this);
  }

  add(found) {
    const fresh = found.ids.map((id, at) => ({
      id, text: found.pieces?.[at] ?? `[${id}]`, logprob: found.logprobs[at], version: found.versions[at], advantage: found.advantages?.[at], gone: found.advantages_are_gone,
    }));
    this.tokens.push(...fresh);
    this.node.append(...fresh.map((token) => {
      // A character of several tokens is shown with the last of them.
      if (token.text === "") return el("span", { class: "none", text: "·" });
      return el("span", {}, token.text.split(/(\n)/).map((part) => (part === "\n" ? [el("i", { class: "mark", text: "⏎" }), "\n"] : part)));
    }));
    this.colours.changed();
  }

  paint(mode, extent) {
    [...this.node.children].forEach((node, at) => (node.style.backgroundColor = colour(this.tokens[at], mode, extent)));
  }

  look(at) {
    this.node.children[this.at]?.classList.remove("at");
    this.at = at;
    this.node.children[at]?.classList.add("at");
    this.colours.look(at < 0 ? null : this.tokens[at], at);
  }
}

/** What colours stand for, in all texts of a view, and the token that is looked at. */
class Colours {
  constructor() {
    this.all = [];
    this.mode = sessionStorage.getItem(CHOSEN) ?? "logprob";
    this.buttons = Object.entries(MODES).map(([mode, name], at) => el("button", { text: name, title: `key ${at + 1}`, "aria-pressed": String(mode === this.mode), on: { click: () => this.choose(mode) } }));
    this.scale = el("span", { class: "scale" });
    this.bar = el("div", { class: "bar" }, el("span", { class: "note", text: "Colour by" }), this.buttons, this.scale);
    this.inspect = el("div", { class: "inspect", hidden: true, role: "status" });
  }

  add(tokens) {
    this.all.push(tokens);
  }

  choose(mode) {
    this.mode = mode;
    sessionStorage.setItem(CHOSEN, mode);
    Object.keys(MODES).forEach((known, at) => this.buttons[at].setAttribute("aria-pressed", String(known === mode)));
    this.changed();
  }

  key(event) {
    const mode = Object.keys(MODES)[Number(event.key) - 1];
    if (mode) this.choose(mode);
  }

  changed() {
    const tokens = this.all.flatMap((one) => one.tokens);
    const extent = tokens.reduce((most, token) => Math.max(most, Math.abs(token.advantage ?? 0)), 0) || 1;
    for (const one of this.all) one.paint(this.mode, extent);
    const gradient = (...colours) => {
      const node = el("i");
      node.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
      return node;
    };
    if (this.mode === "logprob") this.scale.replaceChildren("certain", gradient("transparent", mix("hot", 0.75)), `${UNLIKELY} nats and less`);
    else if (this.mode === "advantage") this.scale.replaceChildren(...(tokens.some((token) => token.advantage) ? [signed(-extent), gradient(mix("minus", 0.67), "transparent", mix("plus", 0.67)), signed(extent)] : [tokens.some((token) => token.gone) ? GONE_ADVANTAGES : "no token was given an advantage other than 0"]));
    else {
      const known = [...new Set(tokens.map((token) => token.version))].filter((version) => version !== undefined).sort((a, b) => a - b);
      this.scale.replaceChildren(...known.slice(0, 12).flatMap((version) => {
        const node = el("i", { class: "step" });
        node.style.background = mix(`c${version % 6}`, 0.4);
        return [node, `v${version}`];
      }));
    }
  }

  look(token, at) {
    this.inspect.hidden = token === null;
    if (token === null) return;
    const fact = (name, value) => el("span", {}, el("span", { class: "note", text: `${name} ` }), value);
    this.inspect.replaceChildren(fact("token", whole(at)), el("code", { text: JSON.stringify(token.text) }), fact("id", String(token.id)),
      fact("log-probability", token.logprob === undefined ? "–" : token.logprob.toFixed(4)), fact("probability", token.logprob === undefined ? "–" : short(Math.exp(token.logprob))),
      fact("version", token.version === undefined ? "–" : `v${token.version}`), fact("advantage", token.gone ? "not kept any more" : token.advantage === undefined ? "not trained" : signed(token.advantage)));
  }
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== "").map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", {}, value))));
}

/** The prompt and the tokens of one turn; more of them when asked for. */
async function read(rollout, turn, colours, into, signal) {
  const tokens = new Tokens(colours);
  const path = `/page/rollouts/${rollout}/turns/${turn}`;
  const more = el("button", { text: "More tokens" });
  const load = async (from) => {
    const found = await get(path, { from, limit: LIMIT }, signal);
    if (found.prompt?.text) {
      const cut = found.prompt.is_whole ? "" : "\n… (cut here)";
      into.append(el("div", { class: "text prompt", tabindex: 0, role: "group", "aria-label": "what is new in the prompt", text: found.prompt.text + cut }));
    }
    if (from === 0) into.append(tokens.node);
    if (from === 0 && found.advantages_are_gone) into.append(el("p", { class: "note", text: GONE_ADVANTAGES }));
    if (found.answer) into.append(el("div", { class: "text", text: found.answer }));
    tokens.add(found);
    if (found.next === null) return more.remove();
    more.onclick = () => load(found.next);
    into.append(more);
  };
  await load(0);
}

class Reading {
  constructor(title, id) {
    this.id = id;
    this.colours = new Colours();
    this.stop = new AbortController();
    this.body = el("div", {}, el("p", { class: "note", text: "Reading…" }));
    this.node = el("div", {}, el("h1", { text: `${title} ${id}` }), this.body, this.colours.inspect);
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
  }

  async open() {
    const signal = this.stop.signal;
    let told;
    try {
      told = await get(`/page/rollouts/${this.id}`, {}, signal);
    } catch (error) {
      this.body.replaceChildren(el("p", { class: "empty", text: error.message }));
      return;
    }
    const { rollouts } = await get("/page/rollouts", { group: told.group, limit: 500 }, signal);
    const others = rollouts.reverse().map((one) => el("a", { href: `#/rollouts/${one.rollout}`, "aria-current": one.rollout === told.rollout ? "page" : null, title: `reward ${short(one.reward)}`, text: `${one.rollout} (${short(one.reward)})` }));
    const turns = el("div", {});
    this.body.replaceChildren(
      facts([["fate", fate(told)], ["why", told.reason && words(told.reason)], ["reward", reward(told.reward)], ["advantage", advantage(told.advantage)], ["step", told.step], ["staleness", told.staleness],
        ["versions", versions(told.versions)], ["environment", told.environment], ["example", whole(told.example)], ["tokens", whole(told.sampled_tokens)], ["worker", String(told.worker)], ["leased at", span(told.leased_s)], ["took", told.took_s === null ? "" : span(told.took_s)]]),
      el("div", { class: "bar" }, el("a", { href: `#/groups/${told.group}`, text: `Group ${told.group} side by side` }), el("span", { class: "note", text: "its rollouts:" }), others),
      ...this.reports(told), this.colours.bar, turns);
    if (told.earlier_turns_are_gone) turns.append(el("p", { class: "note", text: GONE }));
    if (told.turn_list.length === 0) turns.append(el("p", { class: "card empty", text: "No turn is recorded." }));
    for (const turn of told.turn_list) {
      const card = this.turn(turn);
      turns.append(card);
      await read(this.id, turn.turn, this.colours, card, signal);
    }
  }

  reports(told) {
    const lines = (told.reports ?? []).map((report) => {
      const metrics = Object.entries(report.metrics).map(([name, value]) => `${name} ${short(value)}`);
      const flags = [report.trainable ? null : "not trained", report.ok ? null : "failed", report.truncated ? "truncated" : null, report.stop_condition && `stopped by ${report.stop_condition}`].filter(Boolean);
      return el("p", { class: "note" }, `${report.session ? `Session ${report.session.slice(0, 12)}: ` : "Reported: "}reward ${short(report.reward)}`, metrics.length ? `, ${metrics.join(", ")}` : "", flags.length ? ` (${flags.join(", ")})` : "");
    });
    const error = told.error ? `${words(told.error.kind)}: ${told.error.message}` : told.message;
    if (error) lines.push(el("div", { class: "text prompt", text: error }));
    return [...lines, ...told.turn_failures.map((message) => el("div", { class: "text prompt", text: `A turn failed: ${message}` }))];
  }

  turn(turn) {
    const goesOn = turn.parent === null ? words(turn.fork) : `extends turn ${turn.parent}`;
    return el("section", { class: "card turn" }, el("div", { class: "row" }, el("h2", { text: `Turn ${turn.turn}` }), el("span", { class: "note", text: goesOn, title: turn.parent === null ? "why it extends no earlier turn" : null }),
      turn.session ? el("span", { class: "faint", text: `session ${turn.session.slice(0, 12)}`, title: turn.session }) : "", turn.model ? el("span", { class: "faint", text: turn.model }) : "",
      el("span", { class: "end faint number", text: `${whole(turn.new_prompt_tokens)} new of ${whole(turn.prompt_tokens)} prompt tokens, ${whole(turn.sampled_tokens)} sampled at temperature ${short(turn.temperature)}, ended by ${words(turn.finish)}, ${turn.versions.map(([version, tokens]) => `v${version}: ${whole(tokens)}`).join(", ")}` })));
  }
}

export class Group extends Reading {
  constructor(id) {
    super("Group", id);
  }

  async open() {
    const signal = this.stop.signal;
    const { rollouts } = await get("/page/rollouts", { group: this.id, limit: COLUMNS }, signal);
    if (rollouts.length === 0) return this.body.replaceChildren(el("p", { class: "empty", text: "None of its rollouts is among those that are known." }));
    rollouts.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.rollout - b.rollout);
    const [first] = rollouts;
    const prompt = el("section", { class: "card" }, el("h2", { text: "First prompt" }));
    const columns = el("div", { class: "columns" });
    this.body.replaceChildren(
      facts([["environment", first.environment], ["example", whole(first.example)], ["rollouts", whole(rollouts.length)], ["step", first.step], ["evaluates", first.evaluates === null ? "" : `v${first.evaluates}`]]), prompt, el("p", {}), this.colours.bar, columns);
    for (const one of rollouts) {
      const into = el("div", {});
      columns.append(el("section", { class: "card" }, el("div", { class: "row" }, el("h2", {}, el("a", { href: `#/rollouts/${one.rollout}`, text: `Rollout ${one.rollout}` })), el("span", { class: "end" }, fate(one))),
        facts([["reward", reward(one.reward)], ["advantage", advantage(one.advantage)], ["versions", versions(one.versions)], ["turns", whole(one.turns)]]), into));
      if (one.turns === 0) continue;
      if (one.turns <= one.turns_gone) {
        into.append(el("p", { class: "note", text: GONE }));
        continue;
      }
      const answer = el("div", {});
      // The last turn is the answer; what led there is a click away.
      try {
        await read(one.rollout, one.turns - 1, this.colours, answer, signal);
      } catch (error) {
        if (signal.aborted) return;
        // The others are shown whatever one answers.
        into.append(el("p", { class: "note", text: error.message }));
        continue;
      }
      const shown = answer.querySelector(".prompt");
      if (shown && one.turns === 1) {
        shown.remove();
        if (!prompt.querySelector(".text")) prompt.append(shown);
      }
      into.append(...answer.childNodes);
    }
  }
}
