// The report of an artifact, whose document datasheet.py makes. Stands behind common.js.
const { tensors, places, stacks } = sheet;
const COUNT = tensors.name.length;
const SCALE = [[0, "#8f2412"], [0.2, "#d4693a"], [0.42, "#efc889"], [0.62, "#e6e3c1"], [0.8, "#a9d3c1"], [1, "#58ab9d"]]; // dark is bad
const ABOVE = 0.5; // dB above what the method usually keeps, or the median, that have the best colour: a few that lose less shall not make all others look bad
const SPAN = 3; // dB that colours span at least: less is no difference to speak of
const DEEPEST = 20; // and at most
const COMPACT = new Intl.NumberFormat("en", { notation: "compact" });
const state = { words: [], below: Infinity, merge: "mean", column: "sqnr_db", isDown: false, shown: ROWS, open: null };

// ---------------------------------------------------------------------------------------------------------- what it is

function fillCard() {
  const rows = (list) => list.map(([word, text]) => make("div", {}, make("dt", { textContent: word }), make("dd", { textContent: text })));
  $("tiles").append(...sheet.tiles.map(([value, word]) => make("div", {}, make("b", { textContent: value }), make("span", { textContent: word }))));
  $("facts").append(...rows(sheet.facts));
  $("stored").append(...rows(sheet.stored));
  $("forms").append(...sheet.forms.filter((form) => typeof form.block_size === "number").map(drawBlock));
  const usual = sheet.usual ? ` SQNR: ${sheet.usual.words}.` : "";
  $("evidence").textContent = sheet.evidence.words + usual;
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
  const least = state.merge === "least" && tensors.least;
  const values = cell.map((at) => (least && tensors.count[at] > 1 ? (tensors.least[at] ?? badness(at)) : badness(at))).map((bad) => (Number.isFinite(bad) ? bad : range[bad < 0 ? 0 : 1]));
  return state.merge === "least" ? Math.min(...values) : values.reduce((sum, value) => sum + value, 0) / values.length;
}

// What a cell says, in lines.
function wordsOf(cell) {
  const worst = cell.reduce((a, b) => (badness(b) < badness(a) ? b : a));
  const [name, loss] = [tensors.name[worst], lossOf(worst)];
  const merged = tensors.count?.[worst] ?? 1;
  if (merged > 1) return [`${many(merged, "tensor")}: mean ${loss}`, `least ${number(tensors.least[worst], 2)} dB`, name];
  if (cell.length > 1) {
    const known = cell.map((at) => tensors.sqnr_db[at]).filter((value) => value !== null);
    const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
    return [`${cell.length} experts: mean ${number(mean, 2)} dB`, `least ${loss}`, name];
  }
  const more = [`MSE ${brief(tensors.mse[worst])}`, `off by at most ${brief(tensors.max_abs[worst])}`];
  if (tensors.saturated[worst] !== null) more.push(`${share(tensors.saturated[worst])} saturated`);
  return [name, `${loss}, ${tensors.format[worst]}`, more.join(", ")];
}

function colourOf(value) {
  const place = Math.min(Math.max((value - range[0]) / (range[1] - range[0]), 0), 1);
  const above = Math.max(1, SCALE.findIndex(([at]) => at >= place));
  const [[from, dark], [to, light]] = SCALE.slice(above - 1, above + 1);
  const parts = [1, 3, 5].map((at) => {
    const [a, b] = [dark, light].map((colour) => parseInt(colour.slice(at, at + 2), 16));
    return Math.round(a + ((b - a) * (place - from)) / (to - from));
  });
  return { fill: `rgb(${parts.join(", ")})`, ink: 0.3 * parts[0] + 0.6 * parts[1] + 0.1 * parts[2] > 120 ? "#1d1c1a" : "#fff" };
}

function shorten(text, most) {
  return text.length <= most ? text : `…${text.slice(1 - most)}`;
}

// A heat map in `box`: columns are layers; labels are of rows, and of maps that stand below each other the longest has `longest` signs.
function drawMap(box, label, cells, labels, layers, longest, onclick = () => null) {
  const most = document.documentElement.clientWidth < 720 ? 18 : 44;
  const left = 14 + SIGN * Math.min(most, longest);
  const width = left + 8 + Math.min(box.clientWidth - left - 8, layers.length * 128);
  const column = (width - left - 8) / layers.length;
  const height = labels.length > 40 ? Math.max(3, Math.min(14, 900 / labels.length)) : 25;
  const gap = Math.min(column, height) > 9 ? 2 : Math.min(column, height) > 5 ? 1 : 0;
  box.replaceChildren();
  const plot = new Plot(box, label, { x: [0, layers.length], y: [labels.length, 0], width, height: labels.length * height + 30, left });
  cells.forEach((row, down) => row.forEach((cell, across) => {
    if (!cell.length) return;
    const value = valueOf(cell);
    const { fill, ink } = colourOf(value);
    const rect = plot.rect([across, across + 1], [down, down + 1], { fill, class: "cell" }, () => wordsOf(cell), gap);
    rect.onclick = () => onclick(down);
    if (column >= 32 && height >= 20) plot.text(plot.x(across + 0.5), plot.y(down + 0.5) + 4, value.toFixed(1), { fill: ink, class: "figure" });
  }));
  plot.below(layers.map((layer, at) => [at + 0.5, layer]));
  plot.beside(labels.map((name, at) => [at + 0.5, shorten(name, most)]), false);
}

function buildMaps() {
  if (!COUNT) return ($("tools").hidden = true);
  $("legend").hidden = false;
  const [low, bar, high] = $("legend").children;
  [low.textContent, high.textContent] = [`${range[0]}`, `${range[1]} and more`];
  bar.style.background = `linear-gradient(90deg, ${SCALE.map(([at, colour]) => `${colour} ${100 * at}%`).join(", ")})`;
  for (let at = 3; at < places.length; at += 4) if (places[at] >= 0) $("merging").hidden = false;
  if (tensors.count) $("merging").hidden = false;
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
    if (mixed.length) box.classList.add("mixed");
    const look = (module) => mixed.includes(module) && openExperts(at, module);
    stack.draw = () => drawMap(box, `SQNR: ${heading.textContent}`, cellsOf(at), stack.modules, stack.layers, longest, look);
    stack.draw();
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
  drawMap(box, `SQNR of experts: ${modules[module]}`, cellsOf(stack, module), experts.map(String), layers, 4);
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

function drawTensor(box, { tensor, values, codes }) {
  box.replaceChildren();
  if (values) drawValues(box, tensors.name[tensor], values);
  if (codes) drawCodes(box, tensors.name[tensor], codes);
}

function drawValues(box, name, { limit, source, artifact }) {
  const power = (count) => Math.log10(Math.max(count, 0.5)); // a logarithm has no zero
  const top = power(Math.max(...source, ...artifact, 10));
  const ends = [-limit, limit];
  const plot = new Plot(box, `values of ${name}`, { x: ends, y: [-0.3, top + 0.15], height: 150 });
  const every = Math.max(1, Math.ceil(top / 4));
  const powers = Array.from({ length: Math.floor(top / every) + 1 }, (_, at) => at * every);
  plot.beside(powers.map((at) => [at, COMPACT.format(10 ** at)]));
  plot.steps(ends, artifact.map(power), { class: "area" }, -0.3);
  plot.steps(ends, source.map(power), { class: "outline" });
  plot.below(ticksOf(ends, box.clientWidth / 60));
  const middle = (at) => brief(-limit + ((at + 0.5) * 2 * limit) / source.length);
  plot.columns(source.length, ends, (at) => [`about ${middle(at)}`, `original ${many(source[at], "value")}`, `quantized ${many(artifact[at], "value")}`]);
}

const CODES = [15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7]; // by value; bit 3 is the sign
function drawCodes(box, name, codes) {
  const total = codes.reduce((sum, count) => sum + count, 0) || 1;
  const label = (code) => `${code < 8 ? "" : "−"}${sheet.magnitudes[code % 8]}`;
  const shares = CODES.map((code) => (100 * codes[code]) / total);
  const most = Math.max(...shares);
  const plot = new Plot(box, `codes of ${name}`, { x: [-0.6, 15.6], y: [0, most * 1.06], height: 118 });
  plot.beside(ticksOf([0, most], 3, 1, " %"));
  shares.forEach((value, at) => {
    const words = () => [`code ${CODES[at]}, ${label(CODES[at])}`, `${value.toFixed(2)} % of the codes`];
    plot.rect([at - 0.42, at + 0.42], [0, value], { class: at % 15 ? "bar" : "bar full" }, words);
  });
  plot.below(CODES.map((code, at) => [at, label(code)]).filter(([, text]) => box.clientWidth > 420 || !/[.]|−0/.test(text)));
}

// ------------------------------------------------------------------------------------------------------------- the table

const COLUMNS = [ // key, heading, and how a value is told
  ["name", "tensor", String], ["format", "format", String], ["sqnr_db", "SQNR dB", (v) => number(v, 2)], ["mse", "MSE", brief],
  ["max_abs", "largest error", brief], ["cosine", "cosine", (v) => number(v, 5)], ["saturated", "saturated", share], ["zero", "zero", share],
].map(([key, word, told]) => ({ key, head: () => [word], value: (at) => tensors[key][at], cell: (at) => told(tensors[key][at]) }));
const SQNR = COLUMNS.find(({ key }) => key === "sqnr_db"); // bad first, unknown last
SQNR.last = (at) => (tensors.sqnr_db[at] === null ? (badness(at) < 0 ? -1 : 1) : 0);

function showTensors() {
  $("list").hidden = !COUNT;
  if (!COUNT) return;
  const wanted = [];
  for (let at = 0; at < COUNT; at++) if (isWanted(at)) wanted.push(at);
  fillTable($("tensors"), COLUMNS, wanted, COUNT, tensors.count ? "row" : "tensor");
}

function redraw() {
  stacks.forEach((stack) => stack.draw());
  if (state.open) openExperts(...state.open);
}

function filter() {
  state.words = searched();
  state.below = $("below").value === "" ? Infinity : Number($("below").value);
  state.merge = $("merge").value;
  state.shown = ROWS;
  redraw();
  showTensors();
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
fillCard();
buildAnswers();
buildGroups();
buildFindings();
buildMaps();
showTensors();
listen(filter, () => { redraw(); sheet.worst.forEach((one) => one.draw()); });
requestAnimationFrame(() => setTimeout(() => { buildWorst(); document.body.dataset.state = "drawn"; }));
