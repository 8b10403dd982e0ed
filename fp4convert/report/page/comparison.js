// Artifacts beside each other, whose document comparison_page.py makes. Stands behind common.js.
const { artifacts, layers, metrics } = sheet;
const COLOURS = ["#0e7c72", "#c2552b", "#5566cf", "#a87b12", "#a23b72", "#2f7fae", "#5f7f1c", "#7a5546"];
const SHAPES = ["circle", "square", "diamond", "triangle-up", "x"]; // of the artifacts beyond the colours
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const colour = (at) => COLOURS[at % COLOURS.length];
const other = (list, at) => list[Math.floor(at / COLOURS.length) % list.length];
const state = { words: [], metric: metrics[0].key, column: "name", isDown: false, shown: ROWS };

// A value of a layer as its metric tells it.
function told(value, metric) {
  if (value === null) return "-";
  if (metric.kind === "text") return value;
  return metric.kind === "share" ? `${(100 * value).toFixed(3)} %` : value.toFixed(metric.digits);
}

const letterOf = (at) => {
  const mark = make("span", { className: "letter", textContent: artifacts[at].letter });
  mark.style.background = colour(at);
  return mark;
};

function fillHead() {
  $("title").textContent = sheet.title;
  $("verdict").append(make("span", { className: `pill ${sheet.verdict.is_good === false ? "error" : "note"}`, textContent: sheet.verdict.words }));
  $("about").textContent = sheet.about;
  $("fairness").textContent = sheet.fairness;
  $("producer").textContent = sheet.producer;
  const heads = artifacts.map(({ name }, at) => make("th", { scope: "col" }, letterOf(at), name));
  $("glance").tHead.append(make("tr", {}, make("th"), ...heads));
  $("glance").tBodies[0].append(...sheet.rows.map(([word, cells, best]) => {
    const cell = (textContent, at) => make("td", { textContent, className: best.includes(at) ? "best" : "" });
    return make("tr", {}, make("td", { textContent: word }), ...cells.map(cell));
  }));
}

// ---------------------------------------------------------------------------------------------------------------- charts

const AXIS = { fixedrange: true, zeroline: false, ticks: "", tickfont: { size: 11 } };

function drawSizes() {
  const box = $("sizes").firstElementChild;
  const { key, word, kind } = sheet.against;
  const known = artifacts.map((one, at) => [one, at]).filter(([one]) => one.bits !== null && one[key] !== null);
  const traces = known.map(([one, at]) => ({
    type: "scatter", mode: "markers+text", x: [one.bits], y: [one[key]], text: [one.letter], textposition: "middle center",
    marker: { size: 21, color: colour(at), symbol: other(SHAPES, at) }, textfont: { size: 12, color: "#fff" },
    hovertemplate: `${plain(one.name)}<br>%{x:.3f} bits per weight<br>${word} %{y:${kind === "share" ? ".3%" : ".4g"}}<extra></extra>`,
  }));
  const layout = {
    width: box.clientWidth, height: 300, margin: { l: 74, r: 14, t: 16, b: 46 }, ...looks(), dragmode: false,
    xaxis: { ...AXIS, title: { text: "bits per weight", font: { size: 12 }, standoff: 12 } },
    yaxis: { ...AXIS, title: { text: word, font: { size: 12 }, standoff: 12 }, rangemode: "tozero", tickformat: kind === "share" ? ".1%" : ".3g" },
  };
  Plotly.react(box, traces, layout, CONFIG);
  scaleInPrint(box, layout);
}

function drawDepth(box, chart) {
  const traces = artifacts.map((one, at) => ({
    type: "scatter", mode: chart.layers.length > 40 ? "lines" : "lines+markers", x: chart.layers, y: chart.values[at], connectgaps: false,
    line: { color: colour(at), width: 1.8, dash: other(DASHES, at) }, marker: { size: 5, color: colour(at), symbol: other(SHAPES, at) },
    hovertemplate: `${one.letter}: %{y:${chart.kind === "share" ? ".3%" : ".3g"}}<extra></extra>`,
  }));
  const layout = {
    width: box.clientWidth, height: 190, margin: { l: 50, r: 6, t: 8, b: 26 }, ...looks(), dragmode: false, hovermode: "x unified",
    xaxis: { ...AXIS, type: "category", nticks: 8, showgrid: false, tickangle: 0 },
    yaxis: { ...AXIS, nticks: 5, rangemode: "tozero", tickformat: chart.kind === "share" ? ".1%" : ".2g" },
  };
  Plotly.react(box, traces, layout, CONFIG);
  scaleInPrint(box, layout);
}

function buildCharts() {
  $("axes").textContent = `Down and to the left is better: fewer bits and less ${sheet.against.word}.`;
  if (sheet.charts.length) {
    $("depths").hidden = false;
    $("depth").textContent = sheet.depth;
    $("keys").append(...artifacts.map((one, at) => make("span", {}, letterOf(at), one.name)));
    $("charts").append(...sheet.charts.map((chart) => {
      chart.box = make("div", { className: "chart" });
      return make("article", {}, make("h3", { textContent: chart.title }), chart.box);
    }));
  }
  redraw();
}

function redraw() {
  drawSizes();
  sheet.charts.forEach((chart) => drawDepth(chart.box, chart));
}

// ------------------------------------------------------------------------------------------------------------- the table

const metricShown = () => metrics.find(({ key }) => key === state.metric);

// What a column is sorted by: a name, a number of weights, or the metric of an artifact.
function keyOf(column) {
  if (column === "name" || column === "weights") return (at) => layers[column][at];
  return (at) => layers[state.metric][column][at];
}

function fillTable() {
  const metric = metricShown();
  const heads = [["name", "linear layer"], ["weights", "weights"], ...artifacts.map((_, at) => [at, null])];
  $("layers").tHead.replaceChildren(make("tr", {}, ...heads.map(([column, word]) => {
    const onclick = () => { state.isDown = state.column === column && !state.isDown; state.column = column; fillTable(); };
    const button = make("button", { type: "button", onclick }, ...(word ? [word] : [letterOf(column)]));
    const head = make("th", { scope: "col" }, button);
    if (state.column === column) head.setAttribute("aria-sort", state.isDown ? "descending" : "ascending");
    return head;
  })));
  const wanted = layers.name.map((_, at) => at).filter((at) => state.words.every((word) => word.test(layers.name[at].toLowerCase())));
  const valueOf = keyOf(state.column);
  const sign = state.isDown ? -1 : 1;
  const missing = (value) => (value === null ? 1 : 0); // unknown last
  wanted.sort((a, b) => {
    const [x, y] = [valueOf(a), valueOf(b)];
    return missing(x) - missing(y) || sign * (x < y ? -1 : x > y ? 1 : 0);
  });
  const cellOf = (row) => (_, at) => {
    const best = metric.kind === "text" ? [] : bestOf(row, metric);
    return make("td", { textContent: told(layers[metric.key][at][row], metric), className: best.includes(at) ? "best" : "" });
  };
  $("layers").tBodies[0].replaceChildren(...wanted.slice(0, state.shown).map((row) => {
    const lead = [make("td", { textContent: layers.name[row] }), make("td", { textContent: layers.weights[row].toLocaleString("en") })];
    return make("tr", {}, ...lead, ...artifacts.map(cellOf(row)));
  }));
  $("more").hidden = wanted.length <= state.shown;
  $("more").textContent = `Show more of ${wanted.length.toLocaleString("en")}`;
  const all = many(layers.name.length, "layer");
  $("matches").textContent = wanted.length === layers.name.length ? all : `${wanted.length.toLocaleString("en")} of ${all}`;
}

// The artifacts that are best in a row, where not all are; one that lost nothing has no SQNR, and is not worse for that.
function bestOf(row, metric) {
  if (!sheet.is_ranked) return [];
  if (metric.key === "output_error") return layers.best[row].length === artifacts.length ? [] : layers.best[row];
  const values = artifacts.map((_, at) => layers[metric.key][at][row]);
  const known = values.filter((value) => value !== null);
  if (known.length < values.length) return [];
  const best = metric.is_most ? Math.max(...known) : Math.min(...known);
  const found = values.map((value, at) => (value === best ? at : -1)).filter((at) => at >= 0);
  return found.length === artifacts.length ? [] : found;
}

function listen() {
  $("metric").append(...metrics.map(({ key, word }) => make("option", { value: key, textContent: word })));
  $("more").onclick = () => { state.shown += 4 * ROWS; fillTable(); };
  $("tools").addEventListener("input", soon(() => {
    state.words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean).map(globbed);
    state.metric = $("metric").value;
    state.shown = ROWS;
    fillTable();
  }));
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  let width = document.documentElement.clientWidth;
  addEventListener("resize", soon(() => {
    if (width === (width = document.documentElement.clientWidth) || matchMedia("print").matches) return;
    redraw();
  }));
}

fillHead();
buildFindings();
listen();
fillTable();
requestAnimationFrame(() => setTimeout(() => { buildCharts(); document.body.dataset.state = "drawn"; }));
