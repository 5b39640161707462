"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const config = { displaylogo: false, plotlyServerURL: "", modeBarButtonsToRemove: ["sendChartToCloud", "lasso2d", "select2d"] };

function theme(id) {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: of("--line"), zerolinecolor: of("--line"), automargin: true };
  return {
    width: find(id).clientWidth, paper_bgcolor: of("--paper"), plot_bgcolor: of("--paper"),
    font: { color: of("--ink"), family: "system-ui, sans-serif", size: 13 },
    margin: { l: 48, r: 12, t: 28, b: 44 }, showlegend: false, hovermode: "closest",
    hoverlabel: { bgcolor: of("--ground"), font: { color: of("--ink") } },
    xaxis: { ...axis }, yaxis: { ...axis }, muted: of("--muted"),
  };
}

function drawCurves() {
  const metric = data.metrics.find((item) => item.key === find("metric").value);
  const axis = data.axes.find((item) => item.key === find("axis").value);
  const boxes = [...document.querySelectorAll("#shown input")];
  const values = data.groups.flatMap((group) => group.curves[metric.key][axis.key].y);
  const percent = metric.percent && Math.max(...values) <= 1 && Math.min(...values) >= 0;
  const traces = [];
  data.groups.forEach((group, number) => {
    if (!boxes[number].checked) return;
    const curve = group.curves[metric.key][axis.key];
    if (curve.low) {
      const edge = { x: curve.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      traces.push({ ...edge, y: curve.low });
      traces.push({ ...edge, y: curve.high, fill: "tonexty", fillcolor: group.colour + "33" });
    }
    traces.push({
      x: curve.x, y: curve.y, name: group.label, mode: "lines",
      line: { color: group.colour, width: 2.2, dash: group.dash },
      hovertemplate: `${group.label}<br>%{y${percent ? ":.1%" : ":.4g"}} at %{x:.4g}<extra></extra>`,
    });
  });
  const layout = theme("curves");
  layout.xaxis.title = { text: axis.label };
  layout.xaxis.type = find("log").checked ? "log" : "linear";
  layout.yaxis.title = { text: metric.label };
  if (percent) layout.yaxis.tickformat = ".4~p";
  if (metric.target !== null) {
    layout.shapes = [{
      type: "line", xref: "paper", x0: 0, x1: 1, y0: metric.target, y1: metric.target,
      line: { color: layout.muted, width: 1.5, dash: "dot" },
    }];
  }
  Plotly.react("curves", traces, layout, config);
}

function drawCosts() {
  const labels = data.groups.map((group) => group.label);
  const mean = (list) => (list.length ? list.reduce((a, b) => a + b, 0) / list.length : 0);
  const layout = theme("costs");
  const short = (text) => (text.length > 28 ? text.slice(0, 27) + "\u2026" : text);
  layout.yaxis = { ...layout.yaxis, autorange: "reversed", tickvals: labels.map((_, n) => n), ticktext: labels.map(short) };
  layout.xaxis.title = { text: data.clock.label + (data.clock.round ? "" : " (s)") };
  layout.height = 90 + 42 * labels.length;
  const bars = {
    type: "bar", orientation: "h", y: labels.map((_, n) => n), x: data.groups.map((group) => mean(group.cost)),
    marker: { color: data.groups.map((group) => group.colour) }, customdata: labels,
    text: data.groups.map((group) => (group.cost.length ? "" : "never")), textposition: "outside",
    hovertemplate: "%{customdata}<br>%{x:.4g}<extra></extra>",
  };
  const dots = { type: "scatter", mode: "markers", x: [], y: [], hoverinfo: "x", marker: { color: layout.font.color, size: 7 } };
  data.groups.forEach((group, number) => {
    if (group.cost.length > 1) group.cost.forEach((cost) => { dots.x.push(cost); dots.y.push(number); });
  });
  Plotly.react("costs", [bars, dots], layout, { ...config, displayModeBar: false });
}

function sort(button) {
  const header = button.parentNode;
  const place = [...header.parentNode.children].indexOf(header);
  const up = header.getAttribute("aria-sort") !== "ascending";
  [...header.parentNode.children].forEach((cell) => cell.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  const body = header.closest("table").tBodies[0];
  const compare = (left, right) => {
    const [a, b] = [left, right].map((row) => row.children[place]);
    const [x, y] = [a, b].map((cell) => cell.dataset.value);
    if (x !== undefined && y !== undefined) return x - y;
    if (x !== undefined || y !== undefined) return x === undefined ? 1 : -1;
    return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
  };
  const rows = [...body.rows].sort((a, b) => (up ? compare(a, b) : compare(b, a)));
  body.append(...rows);
}

document.querySelectorAll("table.sorted th button").forEach((button) => button.addEventListener("click", () => sort(button)));
document.querySelectorAll("input.filter").forEach((input) => input.addEventListener("input", () => {
  const wanted = input.value.toLowerCase();
  for (const row of input.closest("section").querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(wanted);
}));
const draw = () => { drawCurves(); drawCosts(); };
["metric", "axis", "log", "shown"].forEach((id) => find(id).addEventListener("change", drawCurves));
dark.addEventListener("change", draw);
addEventListener("resize", draw);
draw();
