"use strict";
const read = (id) => document.getElementById(id).textContent;
const { curves, panels, costs } = JSON.parse(read("data"));
const drawings = [];
const redraw = () => drawings.forEach((draw) => draw());

// What the reader has chosen.
const chosen = { axis: null, logarithmic: null, hidden: new Set() };

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Plotly reads some markup in texts.
function escaped(text) {
  return text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);
}

const shortened = (text, most) => (text.length > most ? text.slice(0, most - 1) + "\u2026" : text);

// -- charts --

function theme(width) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
  return {
    width, paper_bgcolor: colour("--paper"), plot_bgcolor: colour("--paper"),
    font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12.5 },
    margin: { l: 46, r: 10, t: 8, b: 42 }, hovermode: "closest", uirevision: "kept",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemwidth: 30 },
    hoverlabel: { bgcolor: colour("--ground"), font: { color: colour("--ink") } },
    xaxis: { ...axis }, yaxis: { ...axis }, muted: colour("--muted"), ink: colour("--ink"),
  };
}

function plot(traces, layout, element, displayModeBar = false) {
  const config = {
    displaylogo: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["sendChartToCloud", "lasso2d", "select2d", "autoScale2d"],
  };
  Plotly.react(element, traces, layout, displayModeBar ? config : { ...config, displayModeBar });
}

const chosenAxis = () => curves.axes.find((axis) => axis.key === chosen.axis) ?? curves.axes[0];
const isLogarithmic = () => chosen.logarithmic ?? chosenAxis().log;

function drawPanel(panel, element) {
  const axis = chosenAxis();
  const layout = theme(element.clientWidth);
  layout.showlegend = panel.traces.length > 1;
  layout.uirevision = axis.key;
  layout.xaxis.title = { text: axis.label };
  Object.assign(layout.yaxis, panel.yaxis);
  plot(panel.traces.map((trace) => ({ ...trace, x: panel.x[axis.key] })), layout, element);
}

// Plotly's own ticks of a logarithmic axis have no labels between the powers of ten.
const powers = [-4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6];
const ticks = powers.flatMap((power) => [1, 2, 5].map((digit) => Number(`${digit}e${power}`)));
const logarithmicAxis = { type: "log", tickvals: ticks, ticktext: ticks.map(String) };

function drawCurves(metric, element) {
  const axis = chosenAxis();
  const curveOf = (line) => line.curves[metric.key][axis.key];
  const values = curves.lines.flatMap((line) => curveOf(line).y);
  const percent = metric.percent && Math.max(...values) <= 1 && Math.min(...values) >= 0;
  const traces = [];
  for (const line of curves.lines.filter(({ label }) => !chosen.hidden.has(label))) {
    let { x, y, low, high } = curveOf(line);
    if (isLogarithmic()) {
      // A logarithmic axis has no place for 0.
      const first = Math.max(0, x.findIndex((value) => value > 0));
      [x, y, low, high] = [x, y, low, high].map((list) => list?.slice(first));
    }
    if (low) {
      const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      traces.push({ ...edge, y: low });
      traces.push({ ...edge, y: high, fill: "tonexty", fillcolor: line.colour + "33" });
    }
    const format = percent ? ".1%" : ".4g";
    traces.push({
      x, y, mode: x.length < 3 ? "markers" : "lines",
      line: { color: line.colour, width: 2.2 }, marker: { color: line.colour },
      hovertemplate: `${escaped(line.label)}<br>%{y:${format}} at %{x:.4g}<extra></extra>`,
    });
  }
  const layout = theme(element.clientWidth);
  layout.showlegend = false;
  layout.uirevision = metric.key + axis.key;
  layout.margin.t = 34;  // for the buttons
  layout.xaxis.title = { text: axis.label };
  layout.yaxis.title = { text: escaped(metric.label) };
  if (isLogarithmic()) Object.assign(layout.xaxis, logarithmicAxis);
  if (percent) layout.yaxis.tickformat = ".4~p";
  if (metric.target !== null) addTarget(layout, metric.target, percent);
  const caption = element.parentNode.querySelector(".caption");
  caption.hidden = !traces.some((trace) => trace.fill);
  plot(traces, layout, element, true);
}

function addTarget(layout, target, percent) {
  const text = `target ${percent ? (100 * target).toFixed(1) + " %" : target.toPrecision(4)}`;
  const line = { color: layout.muted, width: 1.5, dash: "dot" };
  layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target, line }];
  layout.annotations = [{
    text, xref: "paper", x: 0.005, xanchor: "left", y: target, yanchor: "bottom",
    showarrow: false, font: { color: layout.muted },
  }];
}

function drawCosts(element) {
  const { lines } = curves;
  const places = lines.map((_, place) => place);
  const layout = theme(element.clientWidth);
  const most = element.clientWidth < 500 ? 16 : 28;
  layout.showlegend = false;
  const axis = curves.axes.find(({ key }) => key === costs.axis) ?? { label: "rounds", scale: 1 };
  const values = costs.values.map((list) => list.map((cost) => cost / axis.scale));
  layout.xaxis.title = { text: axis.label };
  layout.yaxis.autorange = "reversed";
  layout.yaxis.tickvals = places;
  layout.yaxis.ticktext = lines.map(({ label }) => escaped(shortened(label, most)));
  layout.height = 80 + 40 * lines.length;
  element.style.height = `${layout.height}px`;
  const mean = (list) => list.reduce((sum, cost) => sum + cost, 0) / (list.length || 1);
  const bars = {
    type: "bar", orientation: "h", y: places, x: values.map(mean), width: 0.6,
    marker: { color: lines.map(({ colour }) => colour) },
    text: values.map((list) => (list.length ? "" : "never")), textposition: "outside",
    customdata: lines.map(({ label }) => escaped(label)),
    hovertemplate: "%{customdata}<br>%{x:.4g}<extra></extra>",
  };
  const seeds = values.map((list) => (list.length > 1 ? list : []));
  const dots = {
    type: "scatter", mode: "markers", hoverinfo: "x", marker: { color: layout.ink, size: 7 },
    x: seeds.flat(), y: seeds.flatMap((list, place) => list.map(() => place)),
  };
  plot([bars, dots], layout, element);
}

// -- parts of the page --

function chart(title, draw, { controls = [], caption = "", tall = false } = {}) {
  const ariaLabel = `${title}; the tables have the figures`;
  const element = make("div", { className: tall ? "plot tall" : "plot", role: "img", ariaLabel });
  drawings.push(() => draw(element));
  const text = caption ? make("p", { className: "caption" }, caption) : null;
  return make("section", { className: "card" }, make("h2", {}, title), ...controls, element, text);
}

function choice(label, options, change) {
  const select = make("select");
  const groups = {};
  for (const { key, label: text, section = "" } of options) {
    if (section) groups[section] ??= select.appendChild(make("optgroup", { label: section }));
    (groups[section] ?? select).append(make("option", { value: key }, text));
  }
  select.addEventListener("change", () => { change(select.value); redraw(); });
  return make("label", {}, `${label} `, select);
}

function checkbox(checked, change, ...text) {
  const box = make("input", { type: "checkbox", checked });
  box.addEventListener("change", () => { change(box.checked); redraw(); });
  return make("label", {}, box, " ", ...text);
}

function curveChart(title, { withAxes }) {
  // The second chart begins with the second metric and follows the first one's axis.
  let metric = curves.metrics[withAxes ? 0 : 1];
  const metricChoice = choice("show", curves.metrics, (key) => {
    metric = curves.metrics.find((other) => other.key === key);
  });
  metricChoice.querySelector("select").value = metric.key;
  const controls = [make("div", { className: "controls" }, metricChoice)];
  if (withAxes) {
    const logarithmic = checkbox(isLogarithmic(), (on) => { chosen.logarithmic = on; }, "logarithmic");
    const axisChoice = choice("against", curves.axes, (key) => {
      chosen.axis = key;
      logarithmic.querySelector("input").checked = isLogarithmic();
    });
    controls[0].append(axisChoice, logarithmic);
    if (curves.lines.length > 1) controls.push(make("div", { className: "controls" }, ...curves.lines.map(lineSwitch)));
  }
  const caption = "Line and band: mean and range over seeds or nodes.";
  return chart(title, (element) => drawCurves(metric, element), { controls, caption, tall: withAxes });
}

function lineSwitch({ label, colour }) {
  const chip = make("span", { className: "chip" });
  chip.style.background = colour;
  const change = (on) => { chosen.hidden[on ? "delete" : "add"](label); };
  return checkbox(true, change, chip, label);
}

function addCharts() {
  const charts = document.getElementById("charts");
  const numMetrics = curves?.metrics.length ?? 0;
  const pair = make("div", { className: "pair" });
  const hasSeeds = costs?.values.some((list) => list.length > 1);
  if (numMetrics > 0) charts.append(curveChart("Progress", { withAxes: true }));
  if (costs) charts.append(chart(costs.title, drawCosts, { caption: hasSeeds ? "Mean over the seeds that reach it. Dots are seeds." : "" }));
  if (numMetrics > 1) pair.append(curveChart("Another figure", { withAxes: false }));
  for (const panel of panels ?? []) pair.append(chart(panel.title, (element) => drawPanel(panel, element), panel));
  charts.append(pair);
}

// -- tables --

function compareCells(a, b) {
  const [x, y] = [a, b].map((cell) => cell.dataset.value);
  if (x !== undefined && y !== undefined) return x - y;
  if (x !== undefined || y !== undefined) return x === undefined ? 1 : -1;
  return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
}

function makeSortable(table) {
  const [body] = table.tBodies;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => {
    const button = make("button", { type: "button" }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.ariaSort = sign === 1 ? "ascending" : "descending";
      body.append(...[...body.rows].sort((a, b) => sign * compareCells(a.cells[place], b.cells[place])));
    });
  });
}

function makeFilterable(table) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length <= 5) return;
  const scroll = table.parentNode;
  const filter = make("input", { type: "search", ariaLabel: `filter ${scroll.ariaLabel}` });
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    const matches = (cell) => cell.textContent.toLowerCase().includes(wanted);
    for (const row of rows) row.hidden = ![...row.cells].some(matches);
  });
  scroll.before(make("label", { className: "filter" }, "filter ", filter));
}

// -- start --

async function unpack(id) {
  const bytes = Uint8Array.from(atob(read(id)), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(make("script", { textContent: await new Response(stream).text() }));
}

for (const table of document.querySelectorAll("table")) {
  makeSortable(table);
  makeFilterable(table);
}
unpack("plotly").then(() => {
  addCharts();
  redraw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", redraw);
  document.body.dataset.ready = "yes";
});
