// One chart: lines over steps, drawn as SVG. Pointer or arrow keys read values; dragging chooses steps for all charts, and
// so do the keys + and - (closer, wider), [ and ] (earlier, later) and 0 (all).

import { el, short, svg, whole } from "./common.js";

const HEIGHT = 168;
const SPACE = { right: 8, top: 8, bottom: 20 };
/** Curves that can be told from each other. */
export const MOST = 6;
/** Kinds of dashes; with the colours there are thirty. */
const DASHES = 5;
/** Between an axis and what is written at it. */
const GAP = 6;
const pen = document.createElement("canvas").getContext("2d");

/** About `count` round numbers from `low` to `high`, `least` apart at least. */
function ticks(low, high, count, least = 0) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = Math.max(least, [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough));
  const found = [];
  for (let at = Math.ceil(low / size - 1e-9) * size; at <= high + size * 1e-6; at += size) found.push(Math.abs(at) < size * 1e-9 ? 0 : at);
  return found;
}

/** How wide the widest of these is, in pixels, as it is drawn. */
function widest(texts) {
  pen.font = "11px system-ui, -apple-system, 'Segoe UI', sans-serif";
  return Math.max(0, ...texts.map((text) => pen.measureText(text).width));
}

/** The point whose step is nearest. */
function nearest(points, step) {
  let low = 0;
  let high = points.x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points.x[middle] <= step) low = middle;
    else high = middle;
  }
  return Math.abs(points.x[low] - step) <= Math.abs(points.x[high] - step) ? low : high;
}

const meanAt = (mean, step) => mean.y[nearest(mean, step)];

export class Chart {
  /** `choose(from, to)`: somebody wants to see these steps; `choose()`: all. `most`: curves at a time, which are told
   * apart by their dashes too where `dashes` is set. `help`: a node next to the title. */
  constructor(title, { choose = () => {}, dots = false, unit = "step", remove = null, most = MOST, dashes = false, help = null } = {}) {
    this.most = most;
    this.dashes = dashes;
    this.series = [];
    this.others = [];
    this.title = title;
    this.choose = choose;
    this.dots = dots;
    this.unit = unit;
    this.at = null;
    this.drag = null;
    this.legend = el("div", { class: "legend" });
    this.picture = svg("svg", { tabindex: 0, role: "img", "aria-label": title });
    const head = el("div", { class: "row" }, el("h2", { text: title }));
    this.where = el("span", { class: "end faint number" });
    head.append(this.where);
    if (help) head.firstChild.after(help);
    if (remove) head.append(el("button", { text: "×", title: `Remove ${title}`, "aria-label": `Remove ${title}`, on: { click: remove } }));
    this.node = el("section", { class: "card" }, head, el("div", { class: "chart" }, this.picture), this.legend);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  /** `[{name, x: [steps], y: [values], mean: {x, y, window} or none}]`; `others`: names of those that are not drawn. */
  show(series, others = []) {
    // With dashes there are enough signs that each series keeps its own in all charts, also where others are empty.
    const numbered = this.dashes ? series.map((one, number) => ({ number, ...one })) : series;
    const drawn = numbered.filter((one) => one.x.length > 0);
    this.series = drawn.slice(0, this.most).map((one, number) => ({ number, ...one }));
    this.others = [...drawn.slice(this.most).map((one) => one.name), ...others];
    this.draw();
  }

  /** Its colour, of which there are six, and its dashes. */
  kind(number) {
    return `s${number % MOST}${this.dashes ? ` d${number % DASHES}` : ""}`;
  }

  /** What stands for it in the legend. */
  sign(number) {
    if (!this.dashes) return svg("svg", { viewBox: "0 0 10 10" }, svg("rect", { class: `k${number}`, width: 10, height: 10, rx: 2 }));
    return svg("svg", { class: "dashes", viewBox: "0 0 26 10" }, svg("line", { class: this.kind(number), x1: 0, x2: 26, y1: 5, y2: 5 }));
  }

  /** Another part of the steps: `way` of its width to the right, `factor` as wide. */
  turnTo(way, factor) {
    const [middle, half] = [(this.low + this.high) / 2, (this.high - this.low) / 2];
    if (half <= 0) return;
    const [at, wide] = [middle + 2 * way * half, Math.max(factor * half, 2)];
    this.choose(Math.max(0, Math.floor(at - wide)), Math.ceil(at + wide));
  }

  listen() {
    const stepOf = (event) => this.toStep?.(event.clientX - this.picture.getBoundingClientRect().left);
    const move = (step) => {
      this.at = step;
      this.mark();
    };
    this.picture.addEventListener("pointermove", (event) => move(stepOf(event)));
    this.picture.addEventListener("pointerleave", () => move(null));
    this.picture.addEventListener("pointerdown", (event) => (this.drag = stepOf(event)));
    this.picture.addEventListener("pointerup", (event) => {
      const [from, to] = [this.drag, stepOf(event)].sort((a, b) => a - b);
      this.drag = null;
      if (to - from > (this.high - this.low) / 50) this.choose(Math.floor(from), Math.ceil(to));
      else this.mark();
    });
    this.picture.addEventListener("dblclick", () => this.choose());
    this.picture.addEventListener("blur", () => move(null));
    this.picture.addEventListener("keydown", (event) => {
      if (this.high !== undefined && !event.ctrlKey && !event.metaKey && !event.altKey) {
        const turn = { "+": [0, 0.5], "=": [0, 0.5], "-": [0, 2], "[": [-0.25, 1], "]": [0.25, 1] }[event.key];
        if (turn) return this.turnTo(...turn);
        if (event.key === "0") return this.choose();
      }
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (way === undefined || this.series.length === 0) return;
      event.preventDefault();
      const points = this.series[0];
      const at = this.at === null ? points.x.length - 1 : nearest(points, this.at) + way * (event.shiftKey ? 10 : 1);
      move(points.x[Math.max(0, Math.min(points.x.length - 1, at))]);
    });
  }

  draw() {
    const width = this.picture.clientWidth;
    if (width === 0) return;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    if (this.series.length === 0) {
      this.toStep = undefined;
      this.picture.replaceChildren(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing yet"));
      this.legend.replaceChildren();
      return;
    }
    const all = (pick) => this.series.flatMap((one) => pick(one));
    this.low = Math.min(...all((one) => one.x[0]));
    this.high = Math.max(...all((one) => one.x[one.x.length - 1]));
    const values = all((one) => one.y);
    let bottom = values.reduce((a, b) => Math.min(a, b));
    let top = values.reduce((a, b) => Math.max(a, b));
    if (bottom === 0 && top === 0) top = 1;
    else if (bottom === top) [bottom, top] = [bottom - (Math.abs(bottom) || 1) / 2, top + (Math.abs(top) || 1) / 2];
    // Near zero, zero is in the picture.
    if (bottom > 0 && bottom < 0.3 * top) bottom = 0;
    const grid = ticks(bottom, top, 4).map((value) => [value, short(value)]);
    const left = Math.ceil(widest(grid.map(([, text]) => text))) + 2 * GAP;
    const across = (width - left - SPACE.right) / (this.high - this.low || 1);
    this.x = (step) => (this.high === this.low ? (width + left) / 2 : left + (step - this.low) * across);
    this.y = (value) => HEIGHT - SPACE.bottom - ((value - bottom) / (top - bottom)) * (HEIGHT - SPACE.top - SPACE.bottom);
    this.toStep = (at) => Math.max(this.low, Math.min(this.high, this.low + (at - left) / across));
    this.overlay = svg("g");
    this.picture.replaceChildren(...this.axes(grid, left, width), ...this.lines(), this.overlay);
    this.mark();
  }

  axes(grid, left, width) {
    const room = 3 * GAP + widest([whole(this.high)]);
    const below = ticks(this.low, this.high, Math.max(2, Math.floor((width - left) / Math.max(room, 40))), 1);
    return [
      ...grid.flatMap(([value, text]) => [
        svg("line", { class: "grid", x1: left, x2: width - SPACE.right, y1: this.y(value), y2: this.y(value) }),
        svg("text", { x: left - GAP, y: this.y(value) + 4, "text-anchor": "end" }, text),
      ]),
      ...below.map((step) =>
        svg("text", { x: this.x(step), y: HEIGHT - 5, "text-anchor": this.x(step) > width - 24 ? "end" : "middle" }, whole(step))),
    ];
  }

  /** A curve that is too long for its single points to be seen is a faint band behind its mean. */
  lines() {
    const path = (kind, { x, y }) =>
      svg("path", { class: kind, d: x.map((step, at) => `${at ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(y[at]).toFixed(1)}`).join("") });
    const bands = this.series.map((one) => one.mean && path(`${this.kind(one.number)} band`, one)).filter(Boolean);
    const lines = this.series.map((one) => path(this.kind(one.number), one.mean ?? one));
    const few = this.dots || this.series.every((one) => one.x.length === 1);
    const dots = few ? this.series.flatMap((one) => one.x.map((step, at) => svg("circle", { class: `s${one.number % MOST}`, cx: this.x(step), cy: this.y(one.y[at]), r: 3 }))) : [];
    return [...bands, ...lines, ...dots];
  }

  /** The values under the cursor; without one, the last. */
  mark() {
    if (!this.toStep) return;
    const marks = [];
    const step = this.at === null ? null : this.series[0].x[nearest(this.series[0], this.at)];
    if (this.drag !== null && this.at !== null) {
      const [from, to] = [this.drag, this.at].sort((a, b) => a - b);
      marks.push(svg("rect", { class: "zoom", x: this.x(from), y: 0, width: this.x(to) - this.x(from), height: HEIGHT - SPACE.bottom }));
    }
    if (step !== null) marks.push(svg("line", { class: "cursor", x1: this.x(step), x2: this.x(step), y1: 0, y2: HEIGHT - SPACE.bottom }));
    const keys = this.series.map((one) => {
      const at = step === null ? one.x.length - 1 : nearest(one, step);
      if (step !== null) marks.push(svg("circle", { class: `s${one.number % MOST}`, cx: this.x(one.x[at]), cy: this.y(one.y[at]), r: 3.5 }));
      const mean = one.mean ? ` (mean ${short(meanAt(one.mean, one.x[at]))})` : "";
      return el("span", {}, this.sign(one.number), one.name, el("b", { text: short(one.y[at]) }), mean);
    });
    if (this.others.length) keys.push(el("span", { class: "faint", text: `and ${this.others.length} more`, title: this.others.join("\n") }));
    this.overlay.replaceChildren(...marks);
    this.legend.replaceChildren(...keys);
    const mean = this.series.find((one) => one.mean)?.mean;
    this.where.textContent = step !== null ? `${this.unit} ${whole(step)}` : mean ? `mean of ${whole(mean.window)} ${this.unit}s` : "";
  }
}
