// Draws Keel's figures with Plotly in the colours of the page, light or dark.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");

function themed(figure) {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim();
  const line = style.getPropertyValue("--line").trim();
  const back = style.getPropertyValue("--back").trim();
  const axis = {gridcolor: line, zerolinecolor: line, linecolor: line};
  const layout = {
    uirevision: "keep",  // a viewer's zoom and hidden curves stay when a chart is drawn again
    ...figure.layout,
    font: {family: "system-ui, sans-serif", size: 12, color: text},
    paper_bgcolor: back,
    plot_bgcolor: back,
    hoverlabel: {bgcolor: back, bordercolor: line, font: {color: text}},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: text, activecolor: text},
  };
  for (const name of Object.keys(layout).filter(key => /^[xy]axis/.test(key))) {
    layout[name] = {...axis, ...layout[name]};
  }
  return layout;
}

function draw(element, figure) {
  element.figure = figure;
  const config = {
    responsive: true,
    displaylogo: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
    toImageButtonOptions: {format: "png", scale: 2, filename: element.dataset.chart || "chart"},
  };
  return Plotly.react(element, figure.data, themed(figure), config);
}

// A chart costs a tenth of a second: it is drawn once it comes near the screen, or is printed.
const waiting = new Map();  // element to the function that returns its newest figure
// pages load Plotly's script last, because it is the largest; drawing waits for it
let turn = new Promise(done => addEventListener("DOMContentLoaded", done));
const painted = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
const coming = new IntersectionObserver(entries => {
  for (const {target} of entries.filter(each => each.isIntersecting)) {
    turn = turn.finally(() => drawWaiting(target) && painted());  // painted before the next is drawn
  }
}, {rootMargin: "300px"});

function drawWaiting(element) {
  if (!waiting.has(element)) return false;
  draw(element, waiting.get(element)());
  return waiting.delete(element);
}

function drawWhenNear(element, figure) {
  waiting.set(element, figure);
  coming.unobserve(element);
  coming.observe(element);  // tells at once whether it is near
}

function redrawAll() {
  for (const element of document.querySelectorAll(".chart")) {
    if (element.figure) draw(element, element.figure);
  }
}

function scheme(name) {  // paper is white
  document.documentElement.className = name;
  redrawAll();
}

dark.addEventListener("change", redrawAll);
addEventListener("beforeprint", () => {
  [...waiting.keys()].forEach(drawWaiting);
  scheme("light");
});
addEventListener("afterprint", () => scheme(""));
