// Sampled tokens, coloured by what is chosen, and the one that is looked at.

import { el, get, short, signed, whole } from "./common.js";

const MODES = { logprob: "log-probability", advantage: "advantage", version: "version" };
const CHOSEN = "primerl-colours";
const LIMIT = 4000;
/** A log-probability of this and less has the full colour. */
const UNLIKELY = -5;
const GONE_ADVANTAGES = "Its advantages differ by token and are not kept any more: the batch that had them is gone.";
/** What may still be trained. */
export const PENDING = new Set(["in_flight", "waits"]);

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
  constructor(colours, fate) {
    this.colours = colours;
    this.fate = fate;
    this.tokens = [];
    this.places = new WeakMap();
    this.at = -1;
    this.node = el("div", { class: "text tokens", tabindex: 0, role: "group", "aria-label": "sampled tokens; arrow keys go through them" });
    // Between two lines there is no token: the last one is still looked at.
    this.node.addEventListener("pointerover", (event) => this.look(this.places.get(event.target.closest(".tokens > span")) ?? this.at));
    this.node.addEventListener("pointerleave", () => this.look(-1));
    this.node.addEventListener("blur", () => this.look(-1));
    this.node.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (way === undefined || this.tokens.length === 0) return;
      event.preventDefault();
      const at = Math.max(0, Math.min(this.tokens.length - 1, this.at + way));
      this.node.children[at].scrollIntoView({ block: "nearest" });
      this.look(at);
    });
  }

  add(found) {
    const fresh = found.ids.map((id, at) => ({
      id, text: found.pieces?.[at] ?? `[${id}]`, logprob: found.logprobs[at], version: found.versions[at], advantage: found.advantages?.[at], gone: found.advantages_are_gone,
    }));
    const nodes = fresh.map((token) => {
      // A character of several tokens is shown with the last of them.
      if (token.text === "") return el("span", { class: "none", text: "·" });
      return el("span", {}, token.text.split(/(\n)/).map((part) => (part === "\n" ? [el("i", { class: "mark", text: "⏎" }), "\n"] : part)));
    });
    nodes.forEach((node, at) => this.places.set(node, this.tokens.length + at));
    this.tokens.push(...fresh);
    this.node.append(...nodes);
  }

  /** What is told of tokens that are shown may come later than they do. */
  give(found) {
    (found.advantages ?? []).forEach((advantage, at) => (this.tokens[found.from + at].advantage = advantage));
    for (let at = found.from; at < found.from + found.ids.length; at += 1) this.tokens[at].gone = found.advantages_are_gone;
  }

  paint(mode, extent) {
    [...this.node.children].forEach((node, at) => (node.style.backgroundColor = colour(this.tokens[at], mode, extent)));
  }

  look(at) {
    if (at === this.at) return;
    this.node.children[this.at]?.classList.remove("at");
    this.at = at;
    this.node.children[at]?.classList.add("at");
    this.colours.look(at < 0 ? null : this.tokens[at], at, this);
  }
}

/** What colours stand for, in all texts of a view, and the token that is looked at. */
export class Colours {
  constructor() {
    this.all = new Set();
    this.mode = sessionStorage.getItem(CHOSEN) ?? "logprob";
    this.buttons = Object.entries(MODES).map(([mode, name], at) => el("button", { text: name, title: `key ${at + 1}`, "aria-pressed": String(mode === this.mode), on: { click: () => this.choose(mode) } }));
    this.scale = el("span", { class: "scale" });
    this.bar = el("div", { class: "bar" }, el("span", { class: "note", text: "Colour by" }), this.buttons, this.scale);
    this.inspect = el("div", { class: "inspect", hidden: true, role: "status" });
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
    const tokens = [...this.all].flatMap((one) => one.tokens);
    const extent = tokens.reduce((most, token) => Math.max(most, Math.abs(token.advantage ?? 0)), 0) || 1;
    for (const one of this.all) one.paint(this.mode, extent);
    this.scale.replaceChildren(...this.meaning(tokens, extent));
  }

  /** The colours, with words. */
  meaning(tokens, extent) {
    const gradient = (...colours) => {
      const node = el("i");
      node.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
      return node;
    };
    if (this.mode === "logprob") return ["certain", gradient("transparent", mix("hot", 0.75)), `${UNLIKELY} nats and less`];
    if (this.mode === "advantage") {
      if (tokens.some((token) => token.advantage)) return [signed(-extent), gradient(mix("minus", 0.67), "transparent", mix("plus", 0.67)), signed(extent)];
      if (tokens.some((token) => token.gone)) return [GONE_ADVANTAGES];
      return [tokens.some((token) => token.advantage !== undefined) ? "no token was given an advantage other than 0" : [...this.all].some((one) => PENDING.has(one.fate)) ? "not trained yet" : "not trained"];
    }
    const known = [...new Set(tokens.map((token) => token.version))].filter((version) => version !== undefined).sort((a, b) => a - b);
    const steps = known.slice(0, 12).flatMap((version) => {
      const node = el("i", { class: "step" });
      node.style.background = mix(`c${version % 6}`, 0.4);
      return [node, `v${version}`];
    });
    return known.length > 12 ? [...steps, `and ${known.length - 12} more`] : steps;
  }

  look(token, at, tokens) {
    this.inspect.hidden = token === null;
    if (token === null) return;
    const fact = (name, value) => el("span", {}, el("span", { class: "note", text: `${name} ` }), value);
    this.inspect.replaceChildren(fact("token", whole(at)), el("code", { text: JSON.stringify(token.text) }), fact("id", String(token.id)),
      fact("log-probability", token.logprob === undefined ? "–" : token.logprob.toFixed(4)), fact("probability", token.logprob === undefined ? "–" : short(Math.exp(token.logprob))),
      fact("version", token.version === undefined ? "–" : `v${token.version}`), fact("advantage", token.gone ? "not kept any more" : token.advantage === undefined ? (PENDING.has(tokens.fate) ? "not trained yet" : "not trained") : signed(token.advantage)));
    // At the other end of the window, where it would cover what it tells of.
    const above = tokens.node.children[at].getBoundingClientRect().bottom > innerHeight - this.inspect.offsetHeight - 10;
    this.inspect.classList.toggle("above", above);
    this.inspect.style.top = above ? `${document.querySelector("body > header").offsetHeight}px` : "";
  }
}

/** One turn to read: what is new in its prompt, and its tokens; more of them when asked for. */
export class Turn {
  /** Of a rollout, as a list tells of it. */
  constructor(one, turn, colours, signal) {
    this.path = `/page/rollouts/${one.rollout}/turns/${turn}`;
    this.colours = colours;
    this.signal = signal;
    this.tokens = new Tokens(colours, one.fate);
    this.more = el("button", { text: "More tokens", hidden: true });
    this.notes = el("div");
    this.node = el("div");
    colours.all.add(this.tokens);
  }

  /** Throws what the server says. */
  async load(from = 0) {
    const found = await get(this.path, { from, limit: LIMIT }, this.signal);
    if (from === 0) this.begin(found);
    this.tokens.add(found);
    this.tell(found);
    this.more.hidden = found.next === null;
    this.more.onclick = () => this.load(found.next);
    return found;
  }

  begin(found) {
    if (found.prompt?.text) {
      const end = found.prompt.is_whole ? "" : "\n… (cut here)";
      this.node.append(el("div", { class: "text prompt", tabindex: 0, role: "group", "aria-label": "what is new in the prompt", text: found.prompt.text + end }));
    }
    this.node.append(this.tokens.node, this.notes);
    if (found.answer) this.node.append(el("div", { class: "text", text: found.answer }));
    this.node.append(this.more);
  }

  /** Advantages that are known by now, of a rollout that is over. */
  async refresh(fate) {
    this.tokens.fate = fate;
    for (let from = 0; from < this.tokens.tokens.length; from += LIMIT) {
      const found = await get(this.path, { from, limit: LIMIT }, this.signal);
      this.tokens.give(found);
      this.tell(found);
    }
  }

  tell(found) {
    this.notes.replaceChildren(...(found.advantages_are_gone ? [el("p", { class: "note", text: GONE_ADVANTAGES })] : []));
    this.colours.changed();
  }

  /** It is shown no more. */
  close() {
    this.colours.all.delete(this.tokens);
    this.node.remove();
  }
}
