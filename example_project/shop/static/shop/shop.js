// Presses buttons and shows what came of it. Whatever comes from elsewhere is set as text.

const { activity, csrf, last } = document.body.dataset;
const POLL_MS = 500;
const PATIENCE_MS = 15_000;
const WORDS = {
  created: "new",
  deduplicated: "duplicate",
  replaced: "new, replaces",
  joined: "joins",
  rerun: "follows",
  bypassed: "queued",
  queued: "waits",
  merged: "merged",
};

const byId = (id) => document.getElementById(id);
const many = (number, one) => `${number} ${one}${number === 1 ? "" : "s"}`;

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

// -- Pressing ---------------------------------------------------------------------------------

async function order(form) {
  const { key, ...wish } = Object.fromEntries(new FormData(form));
  const headers = { "Content-Type": "application/json" };
  if (key) headers["Idempotency-Key"] = JSON.stringify(key);
  const answer = await fetch(form.dataset.url, { method: "POST", headers, body: JSON.stringify(wish) });
  countAnswer(form, `${answer.status} ${answer.statusText}`);
}

async function post(form, number, times) {
  const body = new FormData(form);
  if (form.dataset.kind === "save" && times > 1) {
    body.set("description", `${body.get("description")} (${number})`);
  }
  const answer = await fetch(form.dataset.url, { method: "POST", headers: { "X-CSRFToken": csrf }, body });
  if (!answer.ok) throw new Error(`The press was answered with ${answer.status} ${answer.statusText}.`);
}

async function press(form, times) {
  const numbers = Array.from({ length: times }, (_, index) => index + 1);
  const send = form.dataset.kind === "order" ? order : post;
  if (form.dataset.kind === "save") {
    for (const number of numbers) await send(form, number, times); // the order of saves matters
  } else {
    await Promise.all(numbers.map((number) => send(form, number, times)));
  }
}

for (const form of document.querySelectorAll("form")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    press(form, Number(event.submitter?.value ?? 1)).then(() => showError(""), (error) => showError(error.message));
  });
}

let refused = "";

function showError(text) {
  refused = text;
  trouble(text);
}

const answers = new Map();

function countAnswer(form, answer) {
  answers.set(answer, (answers.get(answer) ?? 0) + 1);
  const texts = [...answers].sort().map(([text, times]) => `${text} × ${times}`);
  form.parentElement.querySelector("[data-answers]").textContent = texts.join(", ");
}

function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  byId("key").value = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

byId("new-key").addEventListener("click", newKey);
newKey();

// -- Watching ---------------------------------------------------------------------------------

let since = Number(sessionStorage.getItem("since") ?? last);
let newest = since;

byId("start-over").addEventListener("click", () => {
  since = newest;
  sessionStorage.setItem("since", since);
  answers.clear();
  document.querySelector("[data-answers]").textContent = "none yet";
  newKey();
  watch();
});

async function watch() {
  const answer = await fetch(`${activity}?since=${since}`);
  if (!answer.ok) throw new Error(answer.statusText);
  const seen = await answer.json();
  newest = seen.last;
  if (since > newest) since = 0; // the shop began anew
  for (const card of document.querySelectorAll("[data-tasks]")) show(card, seen.events);
  const waits = waitsInVain(seen.events);
  trouble(waits ? "A task has waited for 15 seconds, and nothing runs. Is a worker running?" : refused);
  if (anythingEnded(seen.events)) refreshShelf();
}

function show(card, events) {
  const names = card.dataset.tasks.split(" ");
  const mine = events.filter((event) => names.includes(event.task));
  const gone = new Set(mine.filter(({ kind }) => kind === "superseded").map((event) => event.task_id));
  // The body of a chord is shown with its runs, and counted nowhere: it is not unique.
  const isCounted = ({ task }) => !card.dataset.counted || card.dataset.counted === task;
  const calls = mine.filter((event) => event.kind === "call" && isCounted(event)).sort(byTime).map((call, index) => ({
    ...call,
    number: index + 1,
    gone: call.outcome !== "deduplicated" && gone.has(call.task_id),
  }));
  const runs = mine.filter(({ kind }) => kind === "run");
  const replaced = calls.filter((call) => call.gone).length;
  const duplicates = calls.filter((call) => call.duplicate && !call.gone && call.outcome !== "rerun").length;
  const queued = calls.filter((call) => call.outcome === "queued").length;
  const merged = calls.filter((call) => call.outcome === "merged").length;
  const counts = { calls: calls.length, duplicates, queued, merged, replaced, spared: duplicates + replaced, runs: runs.filter(isCounted).length };
  for (const place of card.querySelectorAll("[data-count]")) setText(place, counts[place.dataset.count]);
  fill(card.querySelector(".calls"), calls.map(callItem));
  fill(card.querySelector("ul.runs"), runs.reverse().map(runItem));
  if (calls.length + runs.length) setText(card.querySelector("[data-summary]"), summary(counts, runs));
}

const byTime = (one, other) => new Date(one.at) - new Date(other.at);

function callItem(call) {
  const by = call.source === "beat" ? "beat: " : "";
  const word = call.gone ? "replaced" : (WORDS[call.outcome] ?? "refused");
  const double = ["deduplicated", "joined", "merged"].includes(call.outcome);
  const className = call.gone ? "gone" : double ? "double" : call.outcome in WORDS ? "" : "bad";
  return element("li", `${call.number} ${by}${word}`, className);
}

function runItem(run) {
  const state = { running: "runs", success: "done" }[run.outcome] ?? run.outcome;
  const seconds = run.ended_at ? ` in ${((new Date(run.ended_at) - new Date(run.at)) / 1000).toFixed(1)} s` : "";
  const by = run.source === "beat" ? ", called by beat" : "";
  const earlier = run.earlier ? ` (earlier${by})` : "";
  const className = { running: "running", success: "" }[run.outcome] ?? "bad";
  const item = element("li", `${state}${seconds}${earlier}${run.result ? `: ${run.result}` : ""}`, className);
  item.append(element("code", `${run.task.split(".").pop()}(${run.arguments})`));
  return item;
}

function summary(counts, runs) {
  const running = runs.filter((run) => run.outcome === "running").length;
  const spared = [many(counts.duplicates, "duplicate"), ...(counts.replaced ? [`${counts.replaced} replaced`] : []),
    ...(counts.queued ? [`${counts.queued} queued`] : [])];
  return [many(counts.calls, "call"), ...spared, many(counts.runs, "run"), running ? "at work" : "none at work"].join(", ");
}

/** Replace a list only where it has changed, so that a reader keeps their place in it. */
function fill(list, items) {
  const html = items.map((item) => item.outerHTML).join("");
  if (list.dataset.html === html) return;
  list.dataset.html = html;
  list.replaceChildren(...items);
}

function setText(place, text) {
  if (place.textContent !== String(text)) place.textContent = text;
}

function waitsInVain(events) {
  const runs = events.filter(({ kind }) => kind === "run");
  if (runs.some((run) => run.outcome === "running")) return false;
  const known = new Set(events.filter(({ kind }) => kind !== "call").map((event) => event.task_id));
  return events.some((event) => event.kind === "call" && event.task_id && !event.duplicate
    && event.outcome !== "joined" && !known.has(event.task_id) && Date.now() - new Date(event.at) > PATIENCE_MS);
}

let ended = -1;

function anythingEnded(events) {
  const before = ended;
  ended = events.filter((event) => event.ended_at).length;
  return ended !== before;
}

async function refreshShelf() {
  const search = byId("search");
  const answer = await fetch(`${search.dataset.url}?q=${encodeURIComponent(search.value)}`);
  const { products } = await answer.json();
  byId("shelf").replaceChildren(...products.map((product) => {
    const row = element("tr", "");
    row.append(element("td", product.name), element("td", product.description), element("td", product.stock, "number"));
    return row;
  }));
}

byId("search").addEventListener("input", () => refreshShelf().catch(unreachable));

function trouble(text) {
  const place = byId("trouble");
  place.hidden = !text;
  setText(place, text);
}

function unreachable() {
  trouble("The shop is unavailable. Is it still running?");
}

async function poll() {
  if (!document.hidden) await watch().catch(unreachable);
  setTimeout(poll, POLL_MS);
}

poll();
