// The report: tables that sort, and charts that are drawn when they come into view or are printed.
"use strict";

for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);

function drawFigure(element) {
  if (element.figure) return;
  draw(element, JSON.parse(document.getElementById(element.dataset.figure).textContent));
}

const charts = [...document.querySelectorAll("[data-figure]")];
const coming = new IntersectionObserver(entries => {
  for (const entry of entries.filter(each => each.isIntersecting)) drawFigure(entry.target);
}, {rootMargin: "600px"});
for (const chart of charts) coming.observe(chart);

const PAGE_WIDTH = 1030;  // pixels of an A4 page across, without its margins
const tables = [...document.querySelectorAll(".wide table")];
addEventListener("beforeprint", () => {
  charts.forEach(drawFigure);
  for (const table of tables) table.style.zoom = Math.min(1, PAGE_WIDTH / table.offsetWidth);
});
addEventListener("afterprint", () => tables.forEach(table => { table.style.zoom = ""; }));
