"use strict";
const read = (id) => document.getElementById(id).textContent;
const { curves, costs } = JSON.parse(read("data"));
const drawings = [];
const redraw = () => drawings.forEach((draw) => draw());

// What the reader has chosen.
const chosen = { metric: curves?.metrics[0], axis: curves?.axes[0], logarithmic: curves?.axes[0]?.log };

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
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
    margin: { l: 46, r: 10, t: 34, b: 42 }, hovermode: "closest", uirevision: "kept",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemwidth: 30 },
    hoverlabel: { bgcolor: colour("--ground"), font: { color: colour("--ink") } },
    xaxis: { ...axis }, yaxis: { ...axis }, muted: colour("--muted"), ink: colour("--ink"),
  };
}

function plot(traces, layout, element) {
  const buttons = ["sendChartToCloud", "lasso2d", "select2d", "autoScale2d"];
  const config = { displaylogo: false, plotlyServerURL: "", modeBarButtonsToRemove: buttons };
  Plotly.react(element, traces, layout, config);
}

// Plotly's own ticks of a logarithmic axis have no labels between the powers of ten.
const powers = [-4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6];
const ticks = powers.flatMap((power) => [1, 2, 5].map((digit) => Number(`${digit}e${power}`)));
const logarithmicAxis = { type: "log", tickvals: ticks, ticktext: ticks.map(String) };

function drawCurves(element) {
  const { metric, axis, logarithmic } = chosen;
  const curveOf = (line) => line.curves[metric.key][axis.key];
  const values = curves.lines.flatMap((line) => curveOf(line).y);
  const percent = metric.percent && Math.max(...values) <= 1 && Math.min(...values) >= 0;
  const most = element.clientWidth < 500 ? 24 : 60;
  const traces = [];
  for (const line of curves.lines) {
    let { x, y, low, high } = curveOf(line);
    if (logarithmic) {
      // A logarithmic axis has no place for 0.
      const first = Math.max(0, x.findIndex((value) => value > 0));
      [x, y, low, high] = [x, y, low, high].map((list) => list?.slice(first));
    }
    // A click in the legend hides a curve together with its band.
    const group = { x, legendgroup: line.label };
    if (low) {
      const edge = { ...group, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      traces.push({ ...edge, y: low });
      traces.push({ ...edge, y: high, fill: "tonexty", fillcolor: line.colour + "33" });
    }
    const format = percent ? ".1%" : ".4g";
    traces.push({
      ...group, y, name: escaped(shortened(line.label, most)), mode: x.length < 3 ? "markers" : "lines",
      line: { color: line.colour, width: 2.2 }, marker: { color: line.colour },
      hovertemplate: `${escaped(line.label)}<br>%{y:${format}} at %{x:.4g}<extra></extra>`,
    });
  }
  const layout = theme(element.clientWidth);
  layout.showlegend = curves.lines.length > 1;
  layout.uirevision = metric.key + axis.key;
  layout.xaxis.title = { text: axis.label };
  layout.yaxis.title = { text: escaped(metric.label) };
  if (logarithmic) Object.assign(layout.xaxis, logarithmicAxis);
  if (percent) layout.yaxis.tickformat = ".4~p";
  if (metric.target !== null) addTarget(layout, metric.target, percent);
  plot(traces, layout, element);
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
  layout.height = 100 + 40 * lines.length;
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

function addChart(title, draw, caption, ...controls) {
  const ariaLabel = `${title}; the tables have the figures`;
  const element = make("div", { className: "plot", role: "img", ariaLabel });
  drawings.push(() => draw(element));
  const text = make("p", { className: "caption" }, caption);
  const card = make("section", { className: "card" }, make("h2", {}, title), ...controls, element, text);
  document.getElementById("charts").append(card);
}

function choice(label, options, change) {
  const select = make("select");
  const groups = {};
  for (const { key, label: text, section = "" } of options) {
    if (section) groups[section] ??= select.appendChild(make("optgroup", { label: section }));
    (groups[section] ?? select).append(make("option", { value: key }, text));
  }
  select.addEventListener("change", () => {
    change(options.find(({ key }) => key === select.value));
    redraw();
  });
  return make("label", {}, `${label} `, select);
}

function addCurves() {
  const box = make("input", { type: "checkbox", checked: chosen.logarithmic });
  box.addEventListener("change", () => { chosen.logarithmic = box.checked; redraw(); });
  const metrics = choice("show", curves.metrics, (metric) => { chosen.metric = metric; });
  const axes = choice("against", curves.axes, (axis) => {
    chosen.axis = axis;
    box.checked = chosen.logarithmic = axis.log;
  });
  metrics.querySelector("select").value = chosen.metric.key;
  const controls = make("div", { className: "controls" }, metrics, axes, make("label", {}, box, " logarithmic"));
  addChart("Progress", drawCurves, "A band is the range over seeds or nodes.", controls);
}

// -- start --

async function unpack(id) {
  const bytes = Uint8Array.from(atob(read(id)), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(make("script", { textContent: await new Response(stream).text() }));
}

unpack("plotly").then(() => {
  if (curves?.metrics.length) addCurves();
  if (costs) addChart(costs.title, drawCosts, "The mean over the seeds that reach it. Dots are seeds.");
  redraw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", redraw);
  document.body.dataset.ready = "yes";
});
