// The live pages: filtering the table of runs, and looking for news.
"use strict";

const POLL_MS = 2000;
const find = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// --- news -------------------------------------------------------------------------------------

const PROBLEMS = {403: "refused: open the new link of keel ui", 404: "this run is gone"};

function say(text) {
  const link = find("#link");
  link.textContent = text;
  link.className = text === "live" ? "" : "problem";
}

async function look(address) {
  const answer = await fetch(address);
  if (answer.status === 204) return null;
  if (!answer.ok) throw Object.assign(new Error(answer.statusText), { status: answer.status });
  return answer.json();
}

// Rewrites a place; what had the focus there has it afterwards too.
function keepFocus(place, write) {
  const before = document.activeElement, was = place.contains(before);
  const name = each => ["value", "href", "aria-label"].map(key => each.getAttribute(key)).join();
  write();
  if (!was || document.activeElement === before) return;
  all(before.tagName, place).find(each => name(each) === name(before))?.focus({preventScroll: true});
}

const END = 1e9;  // of any scrolling
const isAtEnd = each => each.scrollTop + each.clientHeight > each.scrollHeight - 2;

function write(place, html) {
  const open = all("details", place).map(each => each.open);
  const scroll = all(".tall, .log", place).map(each => each.matches(".log") && isAtEnd(each) ? END : each.scrollTop);
  place.innerHTML = html;  // escaped on the server
  all("details", place).forEach((each, i) => { if (i in open) each.open = open[i]; });
  all(".tall, .log", place).forEach((each, i) => { each.scrollTop = scroll[i] ?? (each.matches(".log") ? END : 0); });
}

function show(news) {
  for (const [name, html] of Object.entries(news.html ?? {})) {
    const place = find(`[data-html="${name}"]`);
    keepFocus(place, () => write(place, html));
  }
  for (const name of news.coming ?? []) find(`[data-chart="${name}"]`).closest("figure").hidden = false;
  for (const [name, figure] of Object.entries(news.charts ?? {})) {
    const element = find(`[data-chart="${name}"]`);
    if (!element) continue;
    element.closest("figure").hidden = false;
    drawWhenNear(element, () => figure);
  }
}

// Looks again and again; `address` is called with the version that is shown, "" for none.
async function follow(address, apply, pause = POLL_MS, version = "") {
  say("live");  // the page has just been loaded
  if (version) await new Promise(done => setTimeout(done, pause));
  for (;;) {
    try {
      if (!document.hidden || !version) {
        const news = await look(address(version));
        say("live");
        if (news) { version = news.version ?? "once"; await apply(news); }
      }
    } catch (error) {
      say(PROBLEMS[error.status] ?? (error.status ? `error ${error.status}` : "keel ui has ended"));
    }
    await new Promise(done => setTimeout(done, pause));
  }
}

// --- pages ------------------------------------------------------------------------------------

function showAge(cell) {  // as `duration` on the server
  const changed = -cell.dataset.value;
  const s = Math.max(0, Math.round(Date.now() / 1000 - changed));
  const units = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
  const [size, unit, part, name] = units.find(each => s >= each[0]) ?? [];
  const text = size ? `${Math.floor(s / size)} ${unit} ${Math.floor(s % size / part)} ${name}` : `${s} s`;
  if (changed && cell.textContent !== text) cell.textContent = text;
}

function runsPage(table) {
  const filter = find("#filter"), compare = find("#compare");
  const rows = () => [...table.tBodies[0].rows];
  const boxes = () => all("input[type=checkbox]", table);
  let chosen = new Set();

  function update() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows()) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
      shown += !row.hidden;
    }
    const number = chosen.size ? `, ${chosen.size} selected` : "";
    find("#count").textContent = `${shown} of ${rows().length}${number}`;
    find("#empty").hidden = shown > 0 || !rows().length;
    find("#none-yet").hidden = rows().length > 0;
    compare.disabled = find("#none").disabled = find("#seeds").disabled = !chosen.size;
  }

  function choose(ids) {
    chosen = new Set(ids);
    for (const box of boxes()) box.checked = chosen.has(box.value);
    history.replaceState([...chosen], "");  // for "back" and a reload: rows may have moved by then
    update();
  }

  const chooseListed = ids => choose(ids.filter(id => rows().some(row => row.dataset.id === id)));

  table.addEventListener("change", () => choose(boxes().filter(b => b.checked).map(b => b.value)));
  filter.addEventListener("input", update);
  find("#none").addEventListener("click", () => choose([]));
  find("#seeds").addEventListener("click", () => {
    const settings = new Set(rows().filter(r => chosen.has(r.dataset.id)).map(r => r.dataset.setting));
    choose(rows().filter(r => settings.has(r.dataset.setting)).map(r => r.dataset.id));
  });
  makeSortable(table);
  setInterval(() => all(".age", table).forEach(showAge), POLL_MS);
  chooseListed(history.state ?? []);
  follow(version => `/rows?version=${version}`, news => keepFocus(table, () => {
    table.tBodies[0].innerHTML = news.html;
    sortRows(table);
    chooseListed([...chosen]);
  }), 2 * POLL_MS, table.dataset.version);
}

async function runPage(place) {
  const base = `/run/${place.dataset.id}`;
  // the data of the first screen is requested before all others
  await new Promise(shown => {
    follow(version => `${base}/data?version=${version}`, news => { try { show(news); } finally { shown(); } });
  });
  follow(version => `${base}/clients?version=${version}`, show, 3 * POLL_MS);
  look(`${base}/labels`).then(show);
}

function comparePage(form) {
  const query = () => new URLSearchParams(new FormData(form));
  let newest = 0;

  async function refresh() {
    const number = ++newest, words = query();
    history.replaceState(null, "", `/compare?${words}`);
    for (const link of all("[data-export]")) link.href = `${link.dataset.export}?${words}`;
    const news = await look(`/compare/data?${words}`);
    if (news && number === newest) show(news);
    return news;
  }

  form.addEventListener("input", refresh);
  form.addEventListener("submit", event => event.preventDefault());
  find("#png").addEventListener("click", () => {
    const chart = find("[data-chart=compare]");
    drawWaiting(chart);
    Plotly.downloadImage(chart, {format: "png", scale: 2, filename: "compare"});
  });
  refresh();
  follow(version => `/compare/data?${query()}&version=${version}`, show, 2 * POLL_MS);
}

if (find("#runs")) runsPage(find("#runs"));
if (find("#run")) runPage(find("#run"));
if (find("#controls")) comparePage(find("#controls"));
if (find("#deployment")) follow(version => `/deployment/data?version=${version}`, show, 2 * POLL_MS);
