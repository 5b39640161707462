"use strict";
const read = (id) => document.getElementById(id).textContent;
const main = document.getElementById("main");
const state = { tables: {} };  // what readers chose, kept when newer data come
const data = JSON.parse(read("data"));
let drawings = [];

function make(tag, given = {}, ...children) {
  const element = Object.assign(document.createElement(tag), given);
  element.append(...children.filter((child) => child !== null));
  return element;
}
const escaped = (text) => text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);
const cut = (text, most) => (text.length > most ? text.slice(0, most - 1) + "\u2026" : text);

// -- charts --

function theme(width) {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: of("--line"), zerolinecolor: of("--line"), automargin: true };
  return {
    width, paper_bgcolor: of("--paper"), plot_bgcolor: of("--paper"),
    font: { color: of("--ink"), family: "system-ui, sans-serif", size: 12.5 },
    margin: { l: 46, r: 10, t: 8, b: 42 }, hovermode: "closest", uirevision: "kept",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemwidth: 30 },
    hoverlabel: { bgcolor: of("--ground"), font: { color: of("--ink") } },
    xaxis: { ...axis }, yaxis: { ...axis }, muted: of("--muted"), ink: of("--ink"),
  };
}

function plot(traces, layout, element, bare) {
  const buttons = ["sendChartToCloud", "lasso2d", "select2d", "autoScale2d"];
  const config = { displaylogo: false, plotlyServerURL: "", modeBarButtonsToRemove: buttons };
  Plotly.react(element, traces, layout, bare ? { ...config, displayModeBar: false } : config);
}

const ticks = [-4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => Number(`${digit}e${power}`)));
const labelled = { type: "log", tickvals: ticks, ticktext: ticks.map(String) };

function titled(axis) {
  return typeof axis.title === "string" ? { ...axis, title: { text: axis.title } } : axis;
}

function drawPanel(panel, element) {
  const layout = theme(element.clientWidth);
  const { xaxis = {}, yaxis = {}, ...others } = panel.layout;
  Object.assign(layout, others, { showlegend: others.showlegend ?? panel.traces.length > 1 });
  layout.xaxis = { ...layout.xaxis, ...titled(xaxis) };
  layout.yaxis = { ...layout.yaxis, ...titled(yaxis) };
  if (layout.xaxis.type === "category") layout.xaxis.tickangle = -60;
  let traces = panel.traces;
  if (panel.x) {
    const axis = chosenAxis();
    traces = traces.map((trace) => ({ ...trace, x: panel.x[axis.key] }));
    layout.xaxis.title = { text: axis.label };
    layout.uirevision = axis.key;
  }
  plot(traces, layout, element, true);
}

const isLog = () => state.log ?? chosenAxis().log;
const chosenAxis = () => data.curves.axes.find((axis) => axis.key === state.axis) ?? data.curves.axes[0];

function drawCurves(metric, element) {
  const axis = chosenAxis();
  const lines = data.curves.lines.filter((line) => !state.hidden?.has(line.label));
  const all = data.curves.lines.flatMap((line) => line.curves[metric.key][axis.key].y);
  const percent = metric.percent && Math.max(...all) <= 1 && Math.min(...all) >= 0;
  const traces = [];
  const shown = (line) => {
    const curve = line.curves[metric.key][axis.key];
    const first = isLog() ? Math.max(0, curve.x.findIndex((x) => x > 0)) : 0;  // which has no 0
    return Object.fromEntries(Object.entries(curve).map(([key, list]) => [key, list.slice(first)]));
  };
  for (const line of lines) {
    const curve = shown(line);
    if (curve.low) {
      const edge = { x: curve.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      traces.push({ ...edge, y: curve.low });
      traces.push({ ...edge, y: curve.high, fill: "tonexty", fillcolor: line.colour + "33" });
    }
    traces.push({
      x: curve.x, y: curve.y, mode: curve.x.length < 3 ? "markers" : "lines",
      line: { color: line.colour, width: 2.2 }, marker: { color: line.colour },
      hovertemplate: `${escaped(line.label)}<br>%{y${percent ? ":.1%" : ":.4g"}} at %{x:.4g}<extra></extra>`,
    });
  }
  const layout = { ...theme(element.clientWidth), showlegend: false, uirevision: metric.key + axis.key };
  layout.xaxis.title = { text: axis.label };
  layout.margin.t = 34;  // the buttons' place
  if (isLog()) Object.assign(layout.xaxis, labelled);
  layout.yaxis.title = { text: escaped(metric.label) };
  if (percent) layout.yaxis.tickformat = ".4~p";
  if (metric.target !== null) {
    const ends = { xref: "paper", x0: 0, x1: 1, y0: metric.target, y1: metric.target };
    layout.shapes = [{ type: "line", ...ends, line: { color: layout.muted, width: 1.5, dash: "dot" } }];
    const text = `target ${percent ? (100 * metric.target).toFixed(1) + " %" : metric.target.toPrecision(4)}`;
    const place = { xref: "paper", x: 0.005, xanchor: "left", y: metric.target, yanchor: "bottom", showarrow: false };
    layout.annotations = [{ text, ...place, font: { color: layout.muted } }];
  }
  const band = element.parentNode.querySelector(".caption");
  if (band) band.hidden = !traces.some((trace) => trace.fill);
  plot(traces, layout, element);
}

function drawCosts(element) {
  const { values, label } = data.costs;
  const lines = data.curves.lines;
  const mean = (list) => (list.length ? list.reduce((a, b) => a + b, 0) / list.length : 0);
  const layout = { ...theme(element.clientWidth), showlegend: false };
  const most = element.clientWidth < 500 ? 16 : 28;
  const ticks = { tickvals: lines.map((_, n) => n), ticktext: lines.map((line) => escaped(cut(line.label, most))) };
  layout.yaxis = { ...layout.yaxis, autorange: "reversed", ...ticks };
  layout.xaxis.title = { text: label };
  layout.height = 80 + 40 * lines.length;
  element.style.height = `${layout.height}px`;
  const bars = {
    type: "bar", orientation: "h", y: lines.map((_, n) => n), x: values.map(mean), width: 0.6,
    marker: { color: lines.map((line) => line.colour) }, customdata: lines.map((line) => escaped(line.label)),
    text: values.map((list) => (list.length ? "" : "never")), textposition: "outside",
    hovertemplate: "%{customdata}<br>%{x:.4g}<extra></extra>",
  };
  const dots = { type: "scatter", mode: "markers", x: [], y: [], hoverinfo: "x", marker: { color: layout.ink, size: 7 } };
  values.forEach((list, place) => {
    if (list.length > 1) list.forEach((cost) => { dots.x.push(cost); dots.y.push(place); });
  });
  plot([bars, dots], layout, element, true);
}

// -- parts of the page --

function chart(title, draw, { controls = [], caption = "", tall = false } = {}) {
  const element = make("div", { className: tall ? "plot tall" : "plot", role: "img", ariaLabel: `${title}; the tables have the figures` });
  drawings.push(() => draw(element));
  const text = caption ? make("p", { className: "caption" }, caption) : null;
  return make("section", { className: "card" }, make("h2", {}, title), ...controls, element, text);
}

function choice(label, options, chosen, change) {
  const select = make("select");
  const groups = {};
  for (const { key, label: text, section = "" } of options) {
    const parent = section === "" ? select : groups[section] ??= select.appendChild(make("optgroup", { label: section }));
    parent.append(make("option", { value: key, selected: key === chosen }, text));
  }
  select.addEventListener("change", () => change(select.value));
  return make("label", {}, `${label} `, select);
}

function curveCard(name, title, first, withLines) {
  const { metrics, axes, lines } = data.curves;
  const chosen = () => metrics.find((metric) => metric.key === state[name]) ?? first;
  const redraw = () => drawings.forEach((draw) => draw());
  const pickers = [choice("show", metrics, chosen().key, (key) => { state[name] = key; redraw(); })];
  const controls = [make("div", { className: "controls" }, ...pickers)];
  if (withLines) {
    const log = make("input", { type: "checkbox", checked: isLog() });
    const against = (key) => { state.axis = key; log.checked = isLog(); redraw(); };
    pickers.push(choice("against", axes, chosenAxis().key, against));
    log.addEventListener("change", () => { state.log = log.checked; redraw(); });
    controls[0].append(pickers[1], make("label", {}, log, " logarithmic"));
    if (lines.length > 1) controls.push(make("div", { className: "controls" }, ...lines.map((line) => toggle(line, redraw))));
  }
  const draw = (element) => drawCurves(chosen(), element);
  return chart(title, draw, { controls, caption: "Line and band: mean and range over seeds or nodes.", tall: withLines });
}

function toggle(line, redraw) {
  state.hidden ??= new Set();
  const box = make("input", { type: "checkbox", checked: !state.hidden.has(line.label) });
  box.addEventListener("change", () => { state.hidden[box.checked ? "delete" : "add"](line.label); redraw(); });
  const chip = make("span", { className: "chip" });
  chip.style.background = line.colour;
  return make("label", {}, box, " ", chip, line.label);
}

function table({ title, head, rows, caption, folded }) {
  const chosen = state.tables[title] ??= { filter: "", place: -1, up: true };
  const body = make("tbody");
  const cells = head.map((text, place) => {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      chosen.up = chosen.place === place ? !chosen.up : true;
      chosen.place = place;
      fill();
    });
    return make("th", { scope: "col" }, button);
  });
  const compare = ([a, x], [b, y]) => {
    if (x !== null && y !== null) return x - y;
    if (x !== null || y !== null) return x === null ? 1 : -1;
    return a.localeCompare(b, undefined, { numeric: true });
  };
  function fill() {
    const wanted = chosen.filter.toLowerCase();
    const shown = rows.filter((row) => row.some(([text]) => text.toLowerCase().includes(wanted)));
    if (chosen.place >= 0) shown.sort((a, b) => (chosen.up ? 1 : -1) * compare(a[chosen.place], b[chosen.place]));
    body.replaceChildren(...shown.map((row) => make("tr", {}, ...row.map(([text, value]) => make("td", { className: value === null ? "" : "number" }, text)))));
    cells.forEach((cell, place) => {
      if (place === chosen.place) cell.setAttribute("aria-sort", chosen.up ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
  }
  fill();
  const filter = make("input", { type: "search", value: chosen.filter, ariaLabel: `filter ${title}` });
  filter.addEventListener("input", () => { chosen.filter = filter.value; fill(); });
  const search = rows.length > 5 ? make("label", {}, "filter ", filter) : null;
  const scroll = make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: title }, make("table", {}, make("thead", {}, make("tr", {}, ...cells)), body));
  const text = caption ? make("p", { className: "caption" }, caption) : null;
  if (!folded) return make("section", { className: "card" }, make("div", { className: "head" }, make("h2", {}, title), search), scroll, text);
  const details = make("details", { className: "card", open: Boolean(chosen.open) }, make("summary", {}, title), search, scroll, text);
  details.addEventListener("toggle", () => { chosen.open = details.open; });
  return details;
}

function fact({ label, value, note }) {
  const lines = Object.entries({ label, value, note }).map(([key, text]) => make("p", { className: key }, text));
  return make("div", { className: "card" }, ...lines);
}

function show() {
  drawings = [];
  const parts = [];
  document.getElementById("sentences").replaceChildren(...(data.sentences ?? []).map((text) => make("p", { className: "verdict" }, text)));
  if (data.facts) parts.push(make("div", { className: "facts" }, ...data.facts.map(fact)));
  if (data.notes?.length) parts.push(make("div", { className: "card warning" }, ...data.notes.map((text) => make("p", {}, text))));
  const metrics = data.curves?.metrics ?? [];
  if (metrics.length) parts.push(curveCard("metric", "Progress", metrics[0], true));
  if (data.costs) parts.push(chart(data.costs.title, drawCosts, { caption: "Mean over the seeds that reach it; dots are seeds." }));
  const panels = (data.panels ?? []).map((panel) => chart(panel.title, (element) => drawPanel(panel, element), panel));
  if (metrics.length > 1) panels.unshift(curveCard("second", "Another figure", metrics[1], false));
  if (panels.length) parts.push(make("div", { className: panels.length > 1 ? "pair" : "" }, ...panels));
  parts.push(...data.tables.map(table));
  main.replaceChildren(...parts);
  drawings.forEach((draw) => draw());
}

// -- start --

async function unpack(id) {
  const bytes = Uint8Array.from(atob(read(id)), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(make("script", { textContent: await new Response(stream).text() }));
}

unpack("plotly").then(() => {
  const redraw = () => drawings.forEach((draw) => draw());
  show();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", redraw);
  document.body.dataset.ready = "yes";
});
