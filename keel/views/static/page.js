// The live pages: filtering the table of runs, and looking for news.
"use strict";

const POLL_MS = 2000;
const find = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// --- news -------------------------------------------------------------------------------------

const PROBLEMS = {403: "refused: open the new link of keel ui", 404: "this run is gone"};

// Looks again and again. `address` is called with the version that is shown, "" for none.
async function follow(address, apply) {
  let version = "";
  for (;;) {
    let text = "live";
    try {
      const answer = document.hidden && version ? {status: 204} : await fetch(address(version));
      if (answer.status === 200) {
        const news = await answer.json();
        version = news.version;
        apply(news);
      } else if (answer.status !== 204) {
        text = PROBLEMS[answer.status] ?? `error ${answer.status}`;
      }
    } catch {
      text = "keel ui has ended";
    }
    find("#link").textContent = text;
    find("#link").className = text === "live" ? "" : "problem";
    await new Promise(done => setTimeout(done, POLL_MS));
  }
}

// Rewrites a place. What is open stays open; a log at its end stays there.
function write(place, html) {
  const open = all("details", place).map(each => each.open);
  const log = find(".log", place);
  const isAtEnd = !log || log.scrollTop + log.clientHeight > log.scrollHeight - 2;
  const scroll = log?.scrollTop;
  place.innerHTML = html;  // escaped on the server
  all("details", place).forEach((each, i) => { if (i in open) each.open = open[i]; });
  for (const each of all(".log", place)) each.scrollTop = isAtEnd ? each.scrollHeight : scroll;
}

function show(news) {
  for (const [name, html] of Object.entries(news.html)) write(find(`[data-html="${name}"]`), html);
  for (const [name, figure] of Object.entries(news.charts)) {
    const element = find(`[data-chart="${name}"]`);
    element.closest("figure").hidden = false;
    drawWhenNear(element, () => figure);
  }
}

// --- pages ------------------------------------------------------------------------------------

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
  chooseListed(history.state ?? []);
  follow(version => `/rows?version=${version}`, news => {
    const focused = document.activeElement.value;
    table.tBodies[0].innerHTML = news.html;
    sortRows(table);
    chooseListed([...chosen]);
    boxes().find(box => box.value === focused)?.focus({preventScroll: true});
  });
}

function comparePage(form) {
  const query = () => new URLSearchParams(new FormData(form));

  async function refresh() {
    const words = query();
    history.replaceState(null, "", `/compare?${words}`);
    for (const link of all("[data-export]")) link.href = `${link.dataset.export}?${words}`;
    const answer = await fetch(`/compare/data?${words}`);
    if (answer.ok && `${query()}` === `${words}`) show(await answer.json());
  }

  form.addEventListener("input", refresh);
  form.addEventListener("submit", event => event.preventDefault());
  find("#png").addEventListener("click", () => {
    const chart = find("[data-chart=compare]");
    drawWaiting(chart);
    Plotly.downloadImage(chart, {format: "png", scale: 2, filename: "compare"});
  });
  refresh();
  follow(version => `/compare/data?${query()}&version=${version}`, show);
}

if (find("#runs")) runsPage(find("#runs"));
if (find("#run")) follow(version => `/run/${find("#run").dataset.id}/data?version=${version}`, show);
if (find("#controls")) comparePage(find("#controls"));
