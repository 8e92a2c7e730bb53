// The report: tables that sort, and charts.
"use strict";

for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);

for (const chart of document.querySelectorAll("[data-figure]")) {
  const text = () => document.getElementById(chart.dataset.figure).textContent;
  drawWhenNear(chart, () => JSON.parse(text()));
}

const PAGE_WIDTH = 1030;  // pixels of an A4 page across, without its margins
const tables = [...document.querySelectorAll(".wide table")];
addEventListener("beforeprint", () => {
  for (const table of tables) table.style.zoom = Math.min(1, PAGE_WIDTH / table.offsetWidth);
});
addEventListener("afterprint", () => tables.forEach(table => { table.style.zoom = ""; }));
