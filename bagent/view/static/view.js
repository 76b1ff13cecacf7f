"use strict";
const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

// Parts of a page that take longer are fetched after it; they may have parts themselves. A page
// that is fetched again is such a part, and keeps what it has if that fails.
async function load(box, url) {
  try {
    const response = await fetch(url);
    const parsed = new DOMParser().parseFromString(await response.text(), "text/html");
    if (response.ok) await show(box, url, parsed);
    else if (box.dataset.src) {
      box.textContent = $("main p", parsed)?.textContent || "This part could not be loaded.";
    }
  } catch {
    if (box.dataset.src) box.textContent = "The server does not answer any more.";
  }
}

async function show(box, url, parsed) {
  const active = document.activeElement;
  const focused = box.contains(active) && active.getAttribute("href");
  const parts = $$(".lazy[data-src]", parsed);
  const urls = parts.map(keepContent);
  box.style.minHeight = `${box.offsetHeight}px`;
  box.replaceChildren(...($("main", parsed) || parsed.body).childNodes);
  box.style.minHeight = "0";
  box.dataset.current = url;
  if (focused) {
    const link = $$("a", box).find((each) => each.getAttribute("href") === focused);
    link?.focus({ preventScroll: true });
  }
  addCopyButtons(box);
  for (const link of $$("a[data-part]", box)) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      load(box, link.href);
    });
  }
  await Promise.all(parts.map((part, index) => load(part, urls[index])));
}

// A part that is fetched again shows what it had meanwhile; returns its address.
function keepContent(box) {
  const old = $$(".lazy[data-src]").find((other) => other.dataset.src === box.dataset.src);
  if (!old) return box.dataset.src;
  box.style.minHeight = `${old.offsetHeight}px`;
  box.replaceChildren(...old.childNodes);
  return old.dataset.current || box.dataset.src;
}

for (const box of $$(".lazy[data-src]")) load(box, box.dataset.src);

const count = $("#count");
if (count) {
  fetch(count.dataset.src)
    .then((response) => response.json())
    .then(({ count: rows }) => {
      count.textContent = `${rows.toLocaleString("en")} ${rows === 1 ? "row" : "rows"}`;
    })
    .catch(() => {});
}

// Commands can be copied.
function addCopyButtons(box) {
  if (!navigator.clipboard) return;
  for (const code of $$("code.command", box)) {
    if (code.nextElementSibling?.className === "copy") continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.setAttribute("aria-label", `Copy ${code.textContent}`);
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    });
    code.after(button);
  }
}
addCopyButtons(document);

// The page of a run follows it. Each event has the main numbers; when the tables changed, the
// page is fetched again, with a pause of five times what that took; when the state changed, soon.
const events = $("[data-events]")?.dataset.events;
const FETCH_SHARE = 5;
const SHORTEST_PAUSE = 1000;
let source = null;
let pause = SHORTEST_PAUSE;
let refreshing = false;
let timer = 0;
let due = 0;

function follow() {
  source?.close();
  if (document.hidden) return; // a browser opens only a few connections to one server
  source = new EventSource(events);
  source.onmessage = (event) => showNumbers(JSON.parse(event.data));
}

function showNumbers(state) {
  for (const node of $$("[data-live]")) {
    const value = state[node.dataset.live];
    if (value === null || value === undefined || value === "") continue;
    node.textContent = typeof value === "number" ? value.toLocaleString("en") : value;
  }
  for (const part of $$("#bar [data-part]")) part.style.flexGrow = state[part.dataset.part] || 0;
  const label = `${state.ok} ok, ${state.failed} failed, ${state.remaining ?? "unknown"} remaining`;
  $("#bar")?.setAttribute("aria-label", label);
  const shown = $("[data-events]").dataset;
  const other = state.state !== shown.state;
  if (other || state.version > Number(shown.version)) {
    refreshAfter(other || state.state !== "running" ? SHORTEST_PAUSE : pause);
  }
}

function refreshAfter(milliseconds) {
  const at = performance.now() + milliseconds;
  if (refreshing || (timer && due <= at)) return;
  clearTimeout(timer);
  timer = setTimeout(refresh, milliseconds);
  due = at;
}

async function refresh() {
  refreshing = true;
  const started = performance.now();
  if (!String(getSelection())) await load($("main"), location.href);
  pause = Math.max(SHORTEST_PAUSE, FETCH_SHARE * (performance.now() - started));
  refreshing = false;
  timer = 0;
  follow(); // the server may have opened the tables anew, with another count of versions
}

if (events) {
  follow();
  document.addEventListener("visibilitychange", follow);
}

// Two runs to compare.
const picks = $$(".pick");
const compare = $("#compare");
for (const pick of picks) {
  pick.addEventListener("change", () => {
    const chosen = picks.filter((one) => one.checked);
    for (const other of picks) other.disabled = chosen.length === 2 && !other.checked;
    $("#compare-button").disabled = chosen.length !== 2;
    compare.elements.a.value = chosen[1]?.value || "";
    compare.elements.b.value = chosen[0]?.value || "";
  });
}

// Empty fields of the filter stay out of the address.
$(".filters")?.addEventListener("submit", (event) => {
  for (const field of event.target.elements) if (field.name && !field.value) field.disabled = true;
});
addEventListener("pageshow", () => {
  for (const field of $$(".filters [name]")) field.disabled = false;
});

// Keys.
const help = $("#help");
$("#help-button").addEventListener("click", () => help.showModal());
const rows = $$("tr[data-row]");
let chosen = -1;
function choose(index) {
  if (!rows.length) return;
  rows[chosen]?.classList.remove("chosen");
  chosen = Math.max(0, Math.min(rows.length - 1, index));
  rows[chosen].classList.add("chosen");
  $("a", rows[chosen])?.focus();
  rows[chosen].scrollIntoView({ block: "nearest" });
}
const keys = {
  j: () => choose(chosen + 1),
  k: () => choose(chosen - 1),
  n: () => $("#next-page")?.click(),
  "[": () => $("#before")?.click(),
  "]": () => $("#after")?.click(),
  u: () => ($("[data-up]") || $(".top nav a"))?.click(),
  "/": () => $("input[type=search]")?.focus(),
  "?": () => help.showModal(),
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.closest("input, select, textarea")) return;
  const action = keys[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
});
