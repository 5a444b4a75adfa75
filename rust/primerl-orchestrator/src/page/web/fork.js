// Where a conversation forked: what a turn's prompt has in common with the conversation before it.

import { el, whole } from "./common.js";

/** Characters that are shown before the fork, and after it. */
const BEFORE = 120;
const AFTER = 240;

/** Of two texts: how long they are alike, what comes before that place, and what follows in each. */
export function diverges(before, now) {
  const most = Math.min(before.length, now.length);
  let shared = 0;
  while (shared < most && before[shared] === now[shared]) shared += 1;
  // Half of a pair of surrogates is no character.
  if (shared > 0 && /[\ud800-\udbff]/.test(before[shared - 1])) shared -= 1;
  const cut = (text) => text.slice(shared, shared + AFTER) + (text.length > shared + AFTER ? "…" : "");
  return { shared, context: (shared > BEFORE ? "…" : "") + before.slice(Math.max(0, shared - BEFORE), shared), was: cut(before), now: cut(now) };
}

/** Texts of the turns of a rollout, as far as they were read. */
export class Conversation {
  texts = new Map();
  last = new Map();

  /** Adds a turn and what the server says of it; returns where it forked, or `null`: it extends another one, begins, or its
   * text is not known. */
  add(turn, found) {
    const prompt = found.prompt?.text;
    const session = turn.session ?? "";
    const before = this.last.get(session);
    const isFork = turn.parent === null && before !== undefined;
    const parent = turn.parent === null ? "" : this.texts.get(turn.parent);
    if (typeof prompt !== "string" || parent === undefined || found.next !== null || found.prompt.is_whole === false) {
      this.last.delete(session);
      return null;
    }
    const text = parent + prompt + (found.pieces ?? []).join("");
    this.texts.set(turn.turn, text);
    this.last.set(session, { turn: turn.turn, text });
    return isFork ? { ...diverges(before.text, prompt), of: before.turn } : null;
  }
}

export function forked(found) {
  return el("div", { class: "forked" }, el("p", { class: "note", text: `Turn ${found.of} and this one are alike for ${whole(found.shared)} characters, and differ from there on:` }),
    el("div", { class: "text" }, found.context, el("del", { class: "minus", text: found.was || "(it ended here)" }), el("ins", { class: "plus", text: found.now || "(it ends here)" })));
}
