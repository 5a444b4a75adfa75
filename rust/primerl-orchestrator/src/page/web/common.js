// What all views share: elements, requests, numbers. What a model wrote only ever becomes text of a node.

const STORED = "primerl-key";

/** An element; children that are strings become text. `{class, text, on: {click}, ...attributes}` */
export function el(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

export function svg(tag, given = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A key, and the view that may follow it: a key may hold any character, a slash too. */
const KEY = /^#key=(.*?)(\/(?:(?:rollouts|groups)(?:[/?].*)?)?)?$/;

/** The key of `#key=...` is kept for this tab and taken out of the address, where it would be seen and copied. */
export function takeKey() {
  const given = KEY.exec(location.hash);
  if (!given) return;
  sessionStorage.setItem(STORED, decoded(given[1]));
  history.replaceState(null, "", `#${given[2] || "/"}`);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    // It was not encoded: a percent sign is one.
    return text;
  }
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * Shows what went wrong, in the server's words; `null`: nothing. Where the key of `owner` is missing or wrong, asks for
 * it and calls `use`; `named` says what it is, `known` where it is from, `button` what it is for.
 */
export function tellProblem(problem, error, { owner, named = "", known = named, button, use }) {
  // What is being typed stays.
  if (error?.name === "AbortError" || (error?.status === 401 && problem.querySelector("form"))) return;
  problem.hidden = !error;
  problem.textContent = error?.message ?? "";
  if (!(error instanceof Refused) || error.status !== 401) return;
  const field = el("input", { type: "password", name: "key", autocomplete: "off", "aria-label": `the ${owner}'s key` });
  const submit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(STORED, field.value);
    problem.replaceChildren();
    use();
  };
  const hasKey = sessionStorage.getItem(STORED) !== null;
  const asked = hasKey ? `That is not the ${owner}'s key${named}. ` : `This ${owner} has a key${known}. `;
  problem.replaceChildren(el("form", { class: "row", on: { submit } }, asked, field, el("button", { text: button })));
  field.focus();
}

/** The JSON at a path; throws `Refused` with the server's own words. */
export async function get(path, query = {}, signal = undefined) {
  const wanted = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(wanted).toString();
  const key = sessionStorage.getItem(STORED);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(search ? `${path}?${search}` : path, { headers, signal });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, body.error?.message ?? `the server answered ${answer.status}`);
  return body;
}

export function whole(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

/** Three digits, however large or small. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  if (size >= 1e4) return whole(value);
  return String(Number(value.toPrecision(size >= 1000 ? 4 : 3)));
}

export function signed(value) {
  return value > 0 ? `+${short(value)}` : short(value).replace("-", "−");
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.max(0, Math.round(1000 * seconds))} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function words(name) {
  return String(name).replaceAll("_", " ");
}

/** A name that may be long: cut where there is no room for it, whole in its title. */
export function cut(text) {
  return el("span", { class: "cut", text, title: text });
}

/** Rows of a table: cells are strings, nodes, or `{right: ...}`. */
export function table(head, rows, kind = "") {
  const cell = (tag) => (content) => {
    const right = content !== null && typeof content === "object" && "right" in content;
    return el(tag, { class: right ? "right" : null }, right ? content.right : (content ?? ""));
  };
  const line = (tag, cells) => el("tr", {}, cells.map(cell(tag)));
  return el("div", { class: "scroll" },
    el("table", { class: kind }, el("thead", {}, line("th", head)), el("tbody", {}, rows.map((row) => line("td", row)))));
}

export function fate(row) {
  return el("span", { class: `fate ${row.fate}`, text: words(row.fate), title: row.message ?? (row.reason ? words(row.reason) : null) });
}

export function reward(value) {
  return el("span", { class: "number", text: short(value) });
}

export function advantage(value) {
  if (typeof value !== "number") return el("span", { class: "faint", text: value ?? "–" });
  return el("span", { class: value > 0 ? "plus" : value < 0 ? "minus" : "", text: signed(value) });
}

export function versions(range) {
  if (!range) return "–";
  return range[0] === range[1] ? `v${range[0]}` : `v${range[0]}–${range[1]}`;
}

/** Puts the nodes into the place in this order, before what else is there: one may come later than those that belong
 * behind it. Those that are where they belong are not touched, and keep their focus. */
export function arrange(place, nodes) {
  let before = null;
  for (const node of nodes) {
    if (node.parentNode !== place || node.previousElementSibling !== before) {
      if (before) before.after(node);
      else place.prepend(node);
    }
    before = node;
  }
}

/** Puts a new content in place of the old one, unless they are the same: a selection or a focus stays where it is. */
export function replace(node, ...content) {
  const next = document.createElement(node.tagName);
  next.append(...content);
  if (node.isEqualNode(next) || (node.childNodes.length > 0 && sameChildren(node, next))) return;
  node.replaceChildren(...next.childNodes);
}

function sameChildren(a, b) {
  return a.childNodes.length === b.childNodes.length && [...a.childNodes].every((child, at) => child.isEqualNode(b.childNodes[at]));
}
