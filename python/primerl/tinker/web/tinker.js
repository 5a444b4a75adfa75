// The page of a server of the Tinker API: clients, queue, losses, samples, engines; asked for once a second while somebody looks.

import { Chart, MOST } from "./chart.js";
import { cut, el, get, Refused, replace, short, span, table, takeKey, tellProblem, whole, words } from "./common.js";

const EVERY_MS = 1000;
const main = document.getElementById("main");
const problem = document.getElementById("problem");
const state = document.getElementById("state");
let asks = false;

const title = (text) => el("h2", { text });
const note = (text) => el("p", { class: "note", text });
const tile = (name, value, more = "") => el("div", { class: "card tile" }, el("dt", { text: name }), el("dd", {}, value, el("small", { text: more, title: more })));
const card = () => el("section", { class: "card" });
const tiles = el("dl", { class: "tiles" });
const [clients, queue, engines, samples] = [card(), card(), card(), card()];
const losses = new Chart("Loss a token, of the sum that clients see", { most: MOST });
main.replaceChildren(tiles, el("div", { class: "stack" }, clients), el("div", { class: "wide" }, losses.node, el("div", { class: "stack" }, queue, engines)), samples);

/** Without the session, where that is the same for all. */
function names(models) {
  const sessions = new Set(models.map((one) => one.model_id.split(":")[0]));
  return (id) => (sessions.size > 1 ? id : id.split(":").slice(1).join(" "));
}

function drawClients({ models }) {
  const rows = models.map((one) => [cut(one.model_id), cut(one.base_model), { right: whole(one.rank) }, { right: whole(one.steps) }, { right: whole(one.calls) }, { right: whole(one.queued) },
    { right: short(one.loss_sum) }, { right: one.heard_s === null ? "–" : `${span(one.heard_s)} ago` }]);
  const head = ["client", "base model", { right: "rank" }, { right: "steps" }, { right: "calls" }, { right: "queued" }, { right: "last loss, sum" }, { right: "last seen" }];
  replace(clients, title("Training clients"), rows.length ? table(head, rows) : note("None is connected."));
}

function drawQueue({ queue: kinds, models }) {
  const running = models.filter((one) => one.running).map((one) => note(`${words(one.running)} of ${one.model_id} is computed.`));
  const rows = Object.entries(kinds).map(([kind, count]) => [words(kind), { right: whole(count) }]);
  replace(queue, title("Queue"), ...running, rows.length ? table(["call", { right: "unanswered" }], rows) : note("Nothing waits."));
}

function drawEngines({ engines: all }) {
  const rows = all.map((one) => [cut(one.name), one.url ? cut(one.sampler ?? "–") : "not there", one.digest ? el("code", { text: one.digest.slice(0, 8) }) : "–", { right: whole(one.requests) }, { right: whole(one.loads) }]);
  replace(engines, title("Engines"), table(["engine", "holds", "proved digest", { right: "requests" }, { right: "loads" }], rows));
}

function drawSamples(all) {
  const rows = all.map((one) => [cut(one.sampler), el("div", { class: "text", text: one.prompt }), el("div", { class: "text", text: one.text }), { right: whole(one.tokens) }, { right: whole(one.of) }, one.stopped ? "stop" : "length", { right: short(one.mean_logprob) }]);
  const head = ["sampler", "end of the prompt", "sample", { right: "tokens" }, { right: "of" }, "ended by", { right: "log-prob. a token" }];
  replace(samples, title("Last samples"), rows.length ? table(head, rows) : note("None yet."));
}

function draw(now) {
  const { status } = now;
  document.getElementById("folder").textContent = now.folder;
  document.getElementById("folder").title = now.output_dir;
  document.title = `${status.models.length} clients ${now.folder} – primerl`;
  state.className = "live";
  state.textContent = `serves ${now.model} for ${span(now.elapsed_s)}`;
  const there = status.engines.filter((one) => one.url).length;
  tiles.replaceChildren(tile("Training clients", whole(status.models.length), `${whole(status.sessions)} sessions`), tile("Sampling clients", whole(status.samplers)),
    tile("Unanswered calls", whole(status.waiting)), tile("Engines", `${whole(there)} / ${whole(status.engines.length)}`, "joined"));
  drawClients(status);
  drawQueue(status);
  drawEngines(status);
  drawSamples(now.samples);
  const name = names(status.models);
  const curves = Object.entries(now.losses).filter(([, curve]) => curve.x.length > 0);
  losses.show(curves.slice(-MOST).map(([id, curve]) => ({ name: name(id), ...curve })), curves.slice(0, -MOST).map(([id]) => id));
}

function tell(error) {
  tellProblem(problem, error, { owner: "server", named: " (TINKER_API_KEY)", button: "Show the server", use: look });
}

async function look() {
  if (asks || document.hidden) return;
  asks = true;
  try {
    draw(await get("/page/now"));
    problem.hidden = true;
  } catch (error) {
    state.className = "lost";
    state.textContent = error instanceof Refused ? "refused" : "the server does not answer";
    if (error instanceof Refused) tell(error);
  } finally {
    asks = false;
  }
}

takeKey();
document.addEventListener("visibilitychange", look);
setInterval(look, EVERY_MS);
look();
