// One chart: lines over steps, drawn as SVG. Pointer or arrow keys read values; dragging chooses steps for all charts.

import { el, short, svg, whole } from "./common.js";

const HEIGHT = 168;
const SPACE = { left: 46, right: 8, top: 8, bottom: 20 };

/** About `count` round numbers from `low` to `high`. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  const found = [];
  for (let at = Math.ceil(low / size - 1e-9) * size; at <= high + size * 1e-6; at += size) found.push(Math.abs(at) < size * 1e-9 ? 0 : at);
  return found;
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

export class Chart {
  /** `choose(from, to)`: somebody wants to see these steps; `choose()`: all. */
  constructor(title, { choose = () => {}, dots = false, unit = "step", remove = null } = {}) {
    this.series = [];
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
    if (remove) head.append(el("button", { text: "×", title: `Remove ${title}`, "aria-label": `Remove ${title}`, on: { click: remove } }));
    this.node = el("section", { class: "card" }, head, el("div", { class: "chart" }, this.picture), this.legend);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  /** `[{name, x: [steps], y: [values]}]` */
  show(series) {
    this.series = series.filter((one) => one.x.length > 0).slice(0, 6);
    this.draw();
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
    const across = (width - SPACE.left - SPACE.right) / (this.high - this.low || 1);
    const x = (step) => (this.high === this.low ? (width + SPACE.left) / 2 : SPACE.left + (step - this.low) * across);
    const y = (value) => HEIGHT - SPACE.bottom - ((value - bottom) / (top - bottom)) * (HEIGHT - SPACE.top - SPACE.bottom);
    this.toStep = (left) => Math.max(this.low, Math.min(this.high, this.low + (left - SPACE.left) / across));
    this.x = x;
    this.y = y;
    const grid = ticks(bottom, top, 4).flatMap((value) => [
      svg("line", { class: "grid", x1: SPACE.left, x2: width - SPACE.right, y1: y(value), y2: y(value) }),
      svg("text", { x: SPACE.left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)),
    ]);
    const below = ticks(this.low, this.high, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger).map((step) =>
      svg("text", { x: x(step), y: HEIGHT - 5, "text-anchor": x(step) > width - 24 ? "end" : "middle" }, whole(step)));
    const lines = this.series.map((one, number) => {
      const path = one.x.map((step, at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(one.y[at]).toFixed(1)}`).join("");
      return svg("path", { class: `s${number}`, d: path });
    });
    const few = this.dots || this.series.every((one) => one.x.length === 1);
    const dots = few ? this.series.flatMap((one, number) => one.x.map((step, at) => svg("circle", { class: `s${number}`, cx: x(step), cy: y(one.y[at]), r: 3 }))) : [];
    this.overlay = svg("g");
    this.picture.replaceChildren(...grid, ...below, ...lines, ...dots, this.overlay);
    this.mark();
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
    const keys = this.series.map((one, number) => {
      const at = step === null ? one.x.length - 1 : nearest(one, step);
      if (step !== null) marks.push(svg("circle", { class: `s${number}`, cx: this.x(one.x[at]), cy: this.y(one.y[at]), r: 3.5 }));
      const key = svg("svg", { viewBox: "0 0 10 10" }, svg("rect", { class: `k${number}`, width: 10, height: 10, rx: 2 }));
      return el("span", {}, key, one.name, el("b", { text: short(one.y[at]) }));
    });
    this.overlay.replaceChildren(...marks);
    this.legend.replaceChildren(...keys);
    this.where.textContent = step === null ? "" : `${this.unit} ${whole(step)}`;
  }
}
