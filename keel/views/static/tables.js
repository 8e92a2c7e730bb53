// Sorts a table by the column whose heading is clicked: a button in the last row of its head.
"use strict";

function valueOf(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value ?? cell.textContent.trim();
}

function sortRows(table) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const column = heads.findIndex(head => head.hasAttribute("aria-sort"));
  if (column < 0) return;
  const sign = heads[column].getAttribute("aria-sort") === "descending" ? -1 : 1;
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const x = valueOf(a, column), y = valueOf(b, column);
    if (x === "" || y === "") return (x === "") - (y === "");  // what is unknown comes last
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return sign * order;
  });
  table.tBodies[0].append(...rows);
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  for (const head of heads) {
    head.querySelector("button")?.addEventListener("click", () => {
      const next = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", next);
      sortRows(table);
    });
  }
}
