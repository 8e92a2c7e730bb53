// Draws Keel's figures with Plotly in the colours of the page, light or dark.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");

function themed(figure) {
  const style = getComputedStyle(document.documentElement);
  const [text, line, back] = ["--text", "--line", "--back"].map(name => style.getPropertyValue(name).trim());
  const axis = {gridcolor: line, zerolinecolor: line, linecolor: line};
  return {
    uirevision: "keep",  // a viewer's zoom and hidden curves stay when a chart is drawn again
    ...figure.layout,
    xaxis: {...axis, ...figure.layout.xaxis},
    yaxis: {...axis, ...figure.layout.yaxis},
    font: {family: "system-ui, sans-serif", size: 12, color: text},
    paper_bgcolor: back,
    plot_bgcolor: back,
    hoverlabel: {bgcolor: back, bordercolor: line, font: {color: text}},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: text, activecolor: text},
  };
}

function draw(element, figure) {
  element.figure = figure;
  return Plotly.react(element, figure.data, themed(figure), {
    responsive: true,
    displaylogo: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
    toImageButtonOptions: {format: "png", scale: 2, filename: element.dataset.chart || "chart"},
  });
}

// A chart costs a tenth of a second: it is drawn once it comes near the screen, or is printed.
const waiting = new Map();  // element to the function that returns its newest figure
const coming = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) if (isIntersecting) drawWaiting(target);
}, {rootMargin: "300px"});

function drawWaiting(element) {
  if (waiting.has(element)) draw(element, waiting.get(element)());
  waiting.delete(element);
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
