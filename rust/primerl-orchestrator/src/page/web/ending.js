// How a run that is over ended, as its launcher wrote.

import { el, replace, span } from "./common.js";

/** Exit codes of one that was interrupted. */
const STOPPED = new Set([129, 130, 143]);

/** `{kind, title, why, more}`; `null` while the run continues, and where it is not known. */
export function ending(now) {
  if (!now.end) return null;
  const { exit_code: code, wall_s } = now.end;
  const kind = code === 0 ? "finished" : STOPPED.has(code) ? "stopped" : "failed";
  const reason = String(now.end.reason ?? "");
  // What follows is the end of a log.
  const [why] = reason.split("\n");
  return { kind, title: `${kind}${typeof wall_s === "number" ? ` after ${span(wall_s)}` : ""}`, why, more: reason.slice(why.length).trimStart() };
}

/** What is known of a run whose server answers no more, by what it said last. */
export function gone(last) {
  const run = last?.status?.run;
  if (!last?.is_live || !run) return { kind: "lost", title: "cannot be reached" };
  if (run.finished) return { kind: "finished", title: `finished: ${run.finished}` };
  // The last look may have been a moment before its end.
  if (run.max_steps > 0 && run.step >= run.max_steps) return { kind: "", title: `all ${run.max_steps} steps are trained; the run has ended` };
  // Most runs that go away have ended: nothing is wrong as far as anyone here knows.
  return { kind: "stopped", title: "the run has ended, or cannot be reached" };
}

/** A banner of what went wrong, or nothing. */
export function banner(node, now) {
  const end = ending(now);
  node.hidden = !end || end.kind === "finished";
  if (node.hidden) return;
  node.className = end.kind;
  replace(node, el("b", { text: end.title }), end.why ? `: ${end.why}` : "",
    end.more ? el("details", {}, el("summary", { text: "more" }), el("div", { class: "text", text: end.more })) : "");
}
