// The report of an artifact, whose document datasheet.py makes. Stands behind common.js.
const { tensors, places, stacks } = sheet;
const COUNT = tensors.name.length;
const SCALE = [[0, "#8f2412"], [0.2, "#d4693a"], [0.42, "#efc889"], [0.62, "#e6e3c1"], [0.8, "#a9d3c1"], [1, "#58ab9d"]]; // dark is bad
const ABOVE = 0.5; // dB above what the method usually keeps, or the median, that have the best colour: a few that lose less shall not make all others look bad
const SPAN = 3; // dB that colours span at least: less is no difference to speak of
const DEEPEST = 20; // and at most
const state = { words: [], below: Infinity, merge: "mean", column: "sqnr_db", isDown: false, shown: ROWS, open: null };

// ---------------------------------------------------------------------------------------------------------- what it is

function fillHead() {
  $("title").textContent = sheet.title;
  $("verdict").append(make("span", { className: `pill ${{ true: "good", false: "error" }[sheet.verdict.is_good] ?? "note"}`, textContent: sheet.verdict.words }));
  $("about").textContent = sheet.about;
  $("tiles").append(...sheet.tiles.map(([value, word]) => make("div", {}, make("b", { textContent: value }), make("span", { textContent: word }))));
  $("facts").append(...sheet.facts.map(([word, text]) => make("div", {}, make("dt", { textContent: word }), make("dd", { textContent: text }))));
  $("forms").append(...sheet.forms.filter((form) => typeof form.block_size === "number").map(drawBlock));
  const usual = sheet.usual ? ` SQNR: ${sheet.usual.words}.` : "";
  $("evidence").textContent = sheet.evidence.words + usual;
  $("producer").textContent = sheet.producer;
}

function drawBlock(form) {
  const cells = make("div", { className: "cells" }, ...Array.from({ length: form.block_size }, () => make("i")));
  const scales = make("div", { className: "scales" }, make("span", { textContent: `${form.scale_dtype} scale` }));
  let formula = "weight = code × block scale";
  if (form.global_scale) {
    scales.append(make("span", { className: "whole", textContent: `${form.global_scale.dtype} global scale` }));
    formula += form.global_scale.stored_as === "divisor" ? " ÷ stored global scale" : " × global scale";
  }
  const told = `${form.format.toUpperCase()}: ${form.block_size} codes of 4 bits (${form.element_dtype}) under one scale.`;
  return make("div", { className: "block" }, cells, scales, make("p", {}, told, make("br"), formula));
}

// ------------------------------------------------------------------------------------------------------------ heat maps

const range = (() => {
  const known = tensors.sqnr_db.filter((value) => value !== null).sort((a, b) => a - b);
  if (!known.length) return [0, 1];
  const usual = sheet.usual?.db ?? known[known.length >> 1];
  const top = Math.round(2 * (usual + ABOVE)) / 2;
  return [Math.max(Math.min(Math.floor(known[0]), top - SPAN), top - DEEPEST), top];
})();

// Sorts tensors, as badness in report/text.py does: without an MSE it was not measurable, without a ratio its source is zero.
function badness(at) {
  if (tensors.mse[at] === 0) return Infinity;
  return tensors.mse[at] === null ? -Infinity : (tensors.sqnr_db[at] ?? -Infinity);
}

function lossOf(at) {
  const bad = badness(at);
  if (bad === Infinity) return "nothing lost";
  if (bad === -Infinity) return tensors.mse[at] === null ? "not measurable" : "no SQNR: its source is zero";
  return `${number(bad, 2)} dB`;
}

function isWanted(at) {
  const name = tensors.name[at].toLowerCase();
  const isBelow = state.below === Infinity || badness(at) < state.below;
  return isBelow && state.words.every((word) => word.test(name));
}

// The tensors that are wanted, as rows of cells, each a list: of a stack, or (module given) of the experts in one of its modules.
function cellsOf(stack, module = -1) {
  const { layers, modules } = stacks[stack];
  const numbers = module < 0 ? null : expertsOf(stack, module);
  const rowOf = numbers && new Map(numbers.map((expert, row) => [expert, row]));
  const cells = Array.from({ length: numbers ? numbers.length : modules.length }, () => layers.map(() => []));
  for (let at = 0; at < COUNT; at++) {
    const [s, layer, m, expert] = places.slice(4 * at, 4 * at + 4);
    if (s !== stack || (numbers && (m !== module || expert < 0)) || !isWanted(at)) continue;
    cells[numbers ? rowOf.get(expert) : m][layer].push(at);
  }
  return cells;
}

function expertsOf(stack, module) {
  const found = new Set();
  for (let at = 0; at < COUNT; at++)
    if (places[4 * at] === stack && places[4 * at + 2] === module && places[4 * at + 3] >= 0) found.add(places[4 * at + 3]);
  return [...found].sort((a, b) => a - b);
}

// One number for a cell: nothing lost counts as the best, what has no ratio as the worst.
function valueOf(cell) {
  if (!cell.length) return null;
  const values = cell.map(badness).map((bad) => (Number.isFinite(bad) ? bad : range[bad < 0 ? 0 : 1]));
  return state.merge === "least" ? Math.min(...values) : values.reduce((sum, value) => sum + value, 0) / values.length;
}

function wordsOf(cell) {
  if (!cell.length) return "";
  const worst = cell.reduce((a, b) => (badness(b) < badness(a) ? b : a));
  const name = plain(tensors.name[worst]);
  const loss = lossOf(worst);
  if (cell.length > 1) {
    const known = cell.map((at) => tensors.sqnr_db[at]).filter((value) => value !== null);
    const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
    return `${cell.length} experts: mean ${number(mean, 2)} dB<br>least ${loss}<br>${name}`;
  }
  const more = [`MSE ${brief(tensors.mse[worst])}`, `off by at most ${brief(tensors.max_abs[worst])}`];
  if (tensors.saturated[worst] !== null) more.push(`${share(tensors.saturated[worst])} saturated`);
  return `${name}<br><b>${loss}</b> ${plain(tensors.format[worst])}<br>${more.join(", ")}`;
}

function shorten(text, most) {
  return text.length <= most ? text : `…${text.slice(1 - most)}`;
}

// A heat map in `box`: columns are layers; labels are of rows, and of maps that stand below each other the longest has `longest` signs.
function drawMap(box, cells, labels, layers, longest) {
  const isNarrow = document.documentElement.clientWidth < 720;
  const most = isNarrow ? 18 : 44;
  const names = labels.map((label) => shorten(label, most));
  const left = 14 + 6.9 * Math.min(most, longest);
  const room = box.clientWidth - left - 8;
  const width = left + 8 + Math.min(room, layers.length * 128);
  const column = (width - left - 8) / layers.length;
  const height = labels.length > 40 ? Math.max(3, Math.min(14, 900 / labels.length)) : 25;
  const gap = Math.min(column, height) > 9 ? 2 : Math.min(column, height) > 5 ? 1 : 0;
  const label = Math.max(30, 8 * Math.max(...layers.map((layer) => layer.length)));
  const stepX = Math.max(1, Math.ceil((layers.length * label) / (width - left)));
  const stepY = Math.max(1, Math.ceil(13 / height));
  const everyX = layers.map((_, at) => at).filter((at) => at % stepX === 0);
  const everyY = labels.map((_, at) => at).filter((at) => at % stepY === 0);
  const trace = {
    type: "heatmap", z: cells.map((row) => row.map(valueOf)), text: cells.map((row) => row.map(wordsOf)), hovertemplate: "%{text}<extra></extra>",
    hoverongaps: false, zmin: range[0], zmax: range[1], zauto: false, colorscale: SCALE, showscale: false, xgap: gap, ygap: gap,
    ...(column >= 38 && height >= 20 ? { texttemplate: "%{z:.1f}", textfont: { size: 11.5 } } : {}),
  };
  const axis = { showgrid: false, zeroline: false, fixedrange: true, ticks: "" };
  const layout = {
    width, height: labels.length * height + 34, margin: { l: left, r: 8, t: 6, b: 28 }, ...looks(), dragmode: false,
    xaxis: { ...axis, tickvals: everyX, ticktext: everyX.map((at) => plain(layers[at])), tickangle: 0, range: [-0.5, layers.length - 0.5] },
    yaxis: { ...axis, tickvals: everyY, ticktext: everyY.map((at) => plain(names[at])), range: [labels.length - 0.5, -0.5] },
  };
  Plotly.react(box, [trace], layout, CONFIG);
  scaleInPrint(box, layout);
}

function buildMaps() {
  if (!COUNT) return ($("tools").hidden = true);
  $("legend").hidden = false;
  const [low, bar, high] = $("legend").children;
  [low.textContent, high.textContent] = [`${range[0]}`, `${range[1]} and more`];
  bar.style.background = `linear-gradient(90deg, ${SCALE.map(([at, colour]) => `${colour} ${100 * at}%`).join(", ")})`;
  for (let at = 3; at < places.length; at += 4) if (places[at] >= 0) $("merging").hidden = false;
  const longest = stacks.flatMap((stack) => stack.modules).reduce((most, module) => Math.max(most, module.length), 4);
  stacks.forEach((stack, at) => {
    const counts = stack.name ? `${many(stack.layers.length, "layer")}, ${many(stack.modules.length, "module")} in each` : "";
    const box = make("div", { className: "map" });
    const heading = make("h3", { textContent: stack.name || "outside of layers" }, make("small", { textContent: counts }));
    $("maps").append(heading, box);
    const mixed = stack.modules.map((_, module) => module).filter((module) => expertsOf(at, module).length > 1);
    if (mixed.length) {
      const open = (module) => make("button", { type: "button", textContent: stack.modules[module], onclick: () => openExperts(at, module) });
      $("maps").append(make("div", { className: "looks" }, "Look into ", ...mixed.map(open)));
    }
    stack.draw = () => drawMap(box, cellsOf(at), stack.modules, stack.layers, longest);
    stack.draw();
    box.on("plotly_click", ({ points }) => mixed.includes(points[0].y) && openExperts(at, points[0].y));
  });
}

function openExperts(stack, module) {
  state.open = [stack, module];
  const { modules, layers } = stacks[stack];
  const experts = expertsOf(stack, module);
  const close = make("button", { type: "button", textContent: "Close", onclick: () => { state.open = null; $("experts").hidden = true; } });
  const counts = make("small", { textContent: `${many(experts.length, "expert")} down, layers across` });
  const box = make("div", { className: "map" });
  $("experts").hidden = false;
  $("experts").replaceChildren(make("h3", { textContent: modules[module] }, counts, close), box);
  drawMap(box, cellsOf(stack, module), experts.map(String), layers, 4);
}

// ---------------------------------------------------------------------------------------------------------- worst tensors

function buildWorst() {
  if (!sheet.worst.length) return;
  $("worst").hidden = false;
  const key = (className, text) => make("span", {}, make("i", { className: `key ${className}` }), text);
  const hasValues = sheet.worst.some((one) => one.values);
  if (hasValues) $("keys").append("How often values occur (logarithmic): ", key("line", "original"), " ", key("", "quantized"), " ");
  $("keys").append("How often each code is used: ", key("full", "the largest, where weights saturate"));
  if (!hasValues) $("keys").append(" (histograms of values need the source: verify --source)");
  sheet.worst.forEach((one, rank) => {
    const at = one.tensor;
    const stats = make("p");
    const told = { SQNR: `${number(tensors.sqnr_db[at], 2)} dB`, MSE: brief(tensors.mse[at]) };
    Object.assign(told, { "largest error": brief(tensors.max_abs[at]), cosine: number(tensors.cosine[at], 5) });
    for (const [word, value] of Object.entries(told)) stats.append(make("span", {}, `${word} `, make("b", { textContent: value })));
    const box = make("div", { className: "map" });
    $("cards").append(make("article", {}, make("h3", { textContent: `${rank + 1}.\u00a0${tensors.name[at]}` }), stats, box));
    if (one.values && one.values.share < 1) stats.append(make("span", { textContent: `histogram of ${share(one.values.share)} of its rows` }));
    one.draw = () => drawTensor(box, one);
  });
  sheet.worst.forEach((one) => one.draw());
}

function drawTensor(box, { values, codes }) {
  const traces = [];
  const size = { width: box.clientWidth, height: (values ? 150 : 0) + (codes ? 130 : 0) + 8, margin: { l: 44, r: 6, t: 8, b: 26 } };
  const layout = { ...size, ...looks(), bargap: 0.16, dragmode: false };
  const axis = { fixedrange: true, zeroline: false, ticks: "" };
  if (values) {
    const step = (2 * values.limit) / values.source.length;
    const x = values.source.map((_, at) => -values.limit + (at + 0.5) * step);
    const counts = (list) => list.map((count) => Math.max(count, 0.5)); // a logarithm has no zero
    const common = { type: "scatter", mode: "lines", x, yaxis: "y2", xaxis: "x2", line: { shape: "hvh", width: 1.5 } };
    const told = { hovertemplate: "%{x:.3g}: %{customdata:,}<extra></extra>" };
    traces.push({ ...common, ...told, y: counts(values.artifact), customdata: values.artifact, fill: "tozeroy", line: { ...common.line, width: 0 } });
    traces.push({ ...common, ...told, y: counts(values.source), customdata: values.source });
    const top = Math.log10(Math.max(...values.source, ...values.artifact, 10));
    layout.xaxis2 = { ...axis, anchor: "y2", range: [-values.limit, values.limit], nticks: 7, showgrid: false };
    const powers = { type: "log", range: [-0.3, top + 0.15], dtick: Math.max(1, Math.ceil(top / 3)), exponentformat: "power" };
    layout.yaxis2 = { ...axis, ...powers, tickfont: { size: 10.5 }, anchor: "x2", domain: codes ? [0.57, 1] : [0, 1] };
  }
  if (codes) {
    const total = codes.reduce((sum, count) => sum + count, 0) || 1;
    const order = [15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7]; // bit 3 is the sign
    const label = (code) => `${code < 8 ? "" : "−"}${sheet.magnitudes[code % 8]}`;
    const shares = { x: order.map((_, at) => at), y: order.map((code) => (100 * codes[code]) / total) };
    const words = { text: order.map((code) => `code ${code}, ${label(code)}`), hovertemplate: "%{text}: %{y:.2f} %<extra></extra>" };
    traces.push({ type: "bar", ...shares, ...words, textposition: "none" });
    const told = order.map((_, at) => at).filter((at) => box.clientWidth > 420 || !/[.]|−0/.test(label(order[at])));
    layout.xaxis = { ...axis, tickvals: told, ticktext: told.map((at) => label(order[at])), tickangle: 0, tickfont: { size: 10.5 }, range: [-0.6, 15.6] };
    layout.yaxis = { ...axis, tickfont: { size: 10.5 }, ticksuffix: " %", nticks: 4, domain: values ? [0, 0.36] : [0, 1] };
  }
  Plotly.react(box, traces, layout, CONFIG);
  scaleInPrint(box, layout);
}

// ------------------------------------------------------------------------------------------------------------- the table

const COLUMNS = [ // key, heading, and how a value is told
  ["name", "tensor", String], ["format", "format", String], ["sqnr_db", "SQNR dB", (v) => number(v, 2)], ["mse", "MSE", brief],
  ["max_abs", "largest error", brief], ["cosine", "cosine", (v) => number(v, 5)], ["saturated", "saturated", share], ["zero", "zero", share],
];

function buildTable() {
  if (!COUNT) return;
  $("list").hidden = false;
  const heads = COLUMNS.map(([key, word]) => {
    const sort = () => { state.isDown = state.column === key && !state.isDown; state.column = key; fillTable(); };
    return make("th", { scope: "col" }, make("button", { type: "button", textContent: word, onclick: sort }));
  });
  $("tensors").tHead.append(make("tr", {}, ...heads));
  $("more").onclick = () => { state.shown += 4 * ROWS; fillTable(); };
  fillTable();
}

function fillTable() {
  const wanted = [];
  for (let at = 0; at < COUNT; at++) if (isWanted(at)) wanted.push(at);
  const values = tensors[state.column];
  const sign = state.isDown ? -1 : 1;
  const last = (at) => (values[at] === null ? (state.column === "sqnr_db" && badness(at) < 0 ? -1 : 1) : 0); // bad first, unknown last
  wanted.sort((a, b) => last(a) - last(b) || sign * (values[a] < values[b] ? -1 : values[a] > values[b] ? 1 : 0));
  const rows = wanted.slice(0, state.shown).map((at) => make("tr", {}, ...COLUMNS.map(([key, , told]) => make("td", { textContent: told(tensors[key][at]) }))));
  $("tensors").tBodies[0].replaceChildren(...rows);
  [...$("tensors").tHead.rows[0].cells].forEach((cell, at) => {
    if (COLUMNS[at][0] === state.column) cell.setAttribute("aria-sort", state.isDown ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
  $("more").hidden = wanted.length <= state.shown;
  $("more").textContent = `Show more of ${wanted.length.toLocaleString("en")}`;
  $("matches").textContent = wanted.length === COUNT ? many(COUNT, "tensor") : `${wanted.length.toLocaleString("en")} of ${many(COUNT, "tensor")}`;
}

function redraw() {
  stacks.forEach((stack) => stack.draw());
  if (state.open) openExperts(...state.open);
}

function listen() {
  const filter = () => {
    state.words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean).map(globbed);
    state.below = $("below").value === "" ? Infinity : Number($("below").value);
    state.merge = $("merge").value;
    state.shown = ROWS;
    redraw();
    if (COUNT) fillTable();
  };
  $("tools").addEventListener("input", soon(filter));
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  let width = document.documentElement.clientWidth;
  addEventListener("resize", soon(() => {
    if (width === (width = document.documentElement.clientWidth) || matchMedia("print").matches) return;
    redraw();
    sheet.worst.forEach((one) => one.draw());
  }));
}

// -------------------------------------------------------------------------------------------------- groups and findings

function buildGroups() {
  const { rows, differing, hidden, has_scales } = sheet.groups;
  const none = `${has_scales ? "No scale group of several members was found" : "This format has no global scales: there is nothing to agree on"}.`;
  if (!rows.length) return $("agreement").append(make("p", { textContent: none }));
  const line = ({ modules, groups, agree }) => {
    const [className, textContent] = agree === groups ? ["pill good", "all agree"] : ["pill error", `${groups - agree} differ`];
    const word = make("span", { className, textContent });
    return make("tr", {}, make("td", { textContent: modules }), make("td", { textContent: groups.toLocaleString("en") }), make("td", {}, word));
  };
  const head = make("tr", {}, ...["modules", "groups", "one global scale"].map((word) => make("th", { textContent: word })));
  $("agreement").append(make("div", { className: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows.map(line)))));
  for (const members of differing) {
    const textContent = members.map(([member, scale]) => `${member} ${scale}`).join(", ");
    $("agreement").append(make("p", { className: "mono", textContent }));
  }
  if (hidden) $("agreement").append(make("p", { textContent: `and ${many(hidden, "group")} more` }));
}

function buildAnswers() {
  if (!sheet.answers) return;
  const { rows, layers } = sheet.answers;
  $("answers").hidden = false;
  $("figures").append(...rows.map(([word, text]) => make("div", {}, make("dt", { textContent: word }), make("dd", { textContent: text }))));
  $("layers").hidden = !layers.length;
  $("layers").tBodies[0].append(...layers.map((cells) => make("tr", {}, ...cells.map((text) => make("td", { textContent: text })))));
  $("card").after($("answers"));
}

fillHead();
buildAnswers();
buildGroups();
buildFindings();
buildMaps();
buildTable();
listen();
requestAnimationFrame(() => setTimeout(() => { buildWorst(); document.body.dataset.state = "drawn"; }));
