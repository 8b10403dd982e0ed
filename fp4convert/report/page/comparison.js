// Artifacts beside each other, whose document comparison_page.py makes. Stands behind common.js.
const { artifacts, layers, metrics } = sheet;
const COLOURS = ["#0e7c72", "#c2552b", "#5566cf", "#a87b12", "#a23b72", "#2f7fae", "#5f7f1c", "#7a5546"];
const SHAPES = Object.keys(OUTLINES); // of the artifacts beyond the colours
const DASHES = ["none", "6 3", "2 3", "7 3 2 3", "11 4"];
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

function fillCard() {
  $("fairness").textContent = sheet.fairness;
  const heads = artifacts.map(({ name }, at) => make("th", { scope: "col" }, letterOf(at), name));
  $("glance").tHead.append(make("tr", {}, make("th"), ...heads));
  $("glance").tBodies[0].append(...sheet.rows.map(([word, cells, best]) => {
    const cell = (textContent, at) => make("td", { textContent, className: best.includes(at) ? "best" : "" });
    return make("tr", {}, make("td", { textContent: word }), ...cells.map(cell));
  }));
}

// ---------------------------------------------------------------------------------------------------------------- charts

// From zero to a little above the largest value.
const upTo = (values) => [0, 1.08 * (Math.max(...values.filter((value) => value !== null)) || 1)];
const kinds = { share: [100, " %"], number: [1, ""] }; // of values: factor and unit
const telling = (kind) => (value) => (kind === "share" && value !== null ? `${(100 * value).toFixed(3)} %` : brief(value));

function drawSizes() {
  const box = $("sizes").firstElementChild;
  const { key, word, kind } = sheet.against;
  const known = artifacts.map((one, at) => [one, at]).filter(([one]) => one.bits !== null && one[key] !== null);
  const bits = known.map(([one]) => one.bits);
  const wide = Math.max(0.5, 0.1 * (Math.max(...bits) - Math.min(...bits)));
  const x = [Math.min(...bits) - wide, Math.max(...bits) + wide];
  const y = upTo(known.map(([one]) => one[key]));
  box.replaceChildren();
  const plot = new Plot(box, `bits per weight and ${word}`, { x, y, height: 310, top: 30, bottom: 42, left: 60 });
  plot.titles("bits per weight", word);
  plot.beside(ticksOf(y, 6, ...kinds[kind]));
  plot.below(ticksOf(x, box.clientWidth / 90));
  for (const [one, at] of known) {
    const words = () => [one.name, `${one.bits.toFixed(3)} bits per weight`, `${word} ${telling(kind)(one[key])}`];
    plot.dot(one.bits, one[key], 23, other(SHAPES, at), { fill: colour(at) }, words);
    plot.text(plot.x(one.bits), plot.y(one[key]) + 4, one.letter, { class: "letters" });
  }
}

function drawDepth(box, { title, layers: names, values, kind }) {
  const [x, y] = [[-0.5, names.length - 0.5], upTo(values.flat())];
  box.replaceChildren();
  const plot = new Plot(box, title, { x, y, height: 190, left: 58 });
  plot.beside(ticksOf(y, 4, ...kinds[kind]));
  plot.below(names.map((name, at) => [at, name]));
  values.forEach((row, at) => {
    plot.line(row, { stroke: colour(at), "stroke-width": 1.8, "stroke-dasharray": other(DASHES, at) });
    const isAlone = (place) => (row[place - 1] ?? null) === null && (row[place + 1] ?? null) === null;
    row.forEach((value, place) => {
      if (value !== null && (names.length <= 40 || isAlone(place))) plot.dot(place, value, 6, other(SHAPES, at), { fill: colour(at) });
    });
  });
  const tell = telling(kind);
  plot.columns(names.length, x, (at) => [`layer ${names[at]}`, ...artifacts.map((one, side) => `${one.letter}: ${tell(values[side][at])}`)]);
}

function buildCharts() {
  $("trade").hidden = new Set(artifacts.map(({ bits }) => brief(bits))).size < 2;
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
  if (!$("trade").hidden) drawSizes();
  sheet.charts.forEach((chart) => drawDepth(chart.box, chart));
}

// ------------------------------------------------------------------------------------------------------------- the table

function showLayers() {
  const metric = metrics.find(({ key }) => key === state.metric);
  const wanted = layers.name.map((_, at) => at).filter((at) => state.words.every((word) => word.test(layers.name[at].toLowerCase())));
  const value = (key) => (row) => layers[key][row];
  const lead = [
    { key: "name", head: () => ["linear layer"], value: value("name"), cell: value("name") },
    { key: "weights", head: () => ["weights"], value: value("weights"), cell: (row) => layers.weights[row].toLocaleString("en") },
  ];
  const columns = artifacts.map((_, at) => ({
    key: at, head: () => [letterOf(at)], value: (row) => layers[metric.key][at][row], cell: (row) => told(layers[metric.key][at][row], metric),
    className: (row) => (bestOf(row, metric).includes(at) ? "best" : ""),
  }));
  fillTable($("layers"), [...lead, ...columns], wanted, layers.name.length, "layer");
}

// The artifacts that are best in a row, where not all are; one that lost nothing has no SQNR, and is not worse for that.
function bestOf(row, metric) {
  if (!sheet.is_ranked || metric.kind === "text") return [];
  if (metric.key === "output_error") return layers.best[row].length === artifacts.length ? [] : layers.best[row];
  const values = artifacts.map((_, at) => layers[metric.key][at][row]);
  const known = values.filter((value) => value !== null);
  if (known.length < values.length) return [];
  const best = metric.is_most ? Math.max(...known) : Math.min(...known);
  const found = values.map((value, at) => (value === best ? at : -1)).filter((at) => at >= 0);
  return found.length === artifacts.length ? [] : found;
}

function filter() {
  state.words = searched();
  state.metric = $("metric").value;
  state.shown = ROWS;
  showLayers();
}

fillHead();
fillCard();
buildFindings();
$("metric").append(...metrics.map(({ key, word }) => make("option", { value: key, textContent: word })));
showLayers();
listen(filter, redraw);
requestAnimationFrame(() => setTimeout(() => { buildCharts(); document.body.dataset.state = "drawn"; }));
