// What all pages share: they read the document in #data, fill the page with text, and draw (draw.js).
// Nothing from the document becomes HTML: elements get text.
"use strict";

const sheet = JSON.parse(document.getElementById("data").textContent);
const ROWS = 25; // of the table, at first and at each asking

const $ = (id) => document.getElementById(id);
const number = (value, digits) => (value === null ? "-" : value.toFixed(digits));
function brief(value) {
  if (value === null) return "-";
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2).replace("-", "−") : Number(value.toPrecision(3)).toString();
}

const share = (value) => (value === null ? "-" : `${(100 * value).toFixed(2)} %`);
const many = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function make(tag, about = {}, ...children) {
  const element = Object.assign(document.createElement(tag), about);
  element.append(...children);
  return element;
}

// Patterns for the words of the search field; a star stands for anything.
function searched() {
  const pattern = (word) => new RegExp(word.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*"));
  return $("search").value.toLowerCase().split(/\s+/).filter(Boolean).map(pattern);
}

// Does something when nothing happened for a moment.
function soon(what) {
  let waiting = 0;
  return () => { clearTimeout(waiting); waiting = setTimeout(what, 120); };
}

// Our own words, in which backticks set off code.
function coded(text) {
  return text.split("`").map((part, at) => (at % 2 ? make("code", { textContent: part }) : part));
}

function buildFindings() {
  const byCode = new Map();
  for (const finding of sheet.findings) {
    const key = `${finding.level} ${finding.code}`;
    byCode.set(key, [...(byCode.get(key) || []), finding]);
  }
  const rank = ["error", "warning", "note"];
  const kinds = [...byCode.values()].sort((a, b) => rank.indexOf(a[0].level) - rank.indexOf(b[0].level));
  if (!kinds.length) return $("found").append(make("p", { textContent: "None: nothing was found that should be otherwise." }));
  $("found").append(...kinds.map((kind) => {
    const [{ level, code, meaning, remedy }] = kind;
    const named = (tensor) => (tensor ? [make("span", { className: "mono", textContent: tensor }), ": "] : []);
    const told = kind.slice(0, ROWS).map(({ lead, tensor, detail }) => make("li", {}, lead, ...named(tensor), detail));
    if (kind.length > ROWS) told.push(make("li", { textContent: `and ${kind.length - ROWS} more` }));
    const head = make("div", {}, make("span", { className: `pill ${level}`, textContent: level }), make("span", { className: "code", textContent: code }));
    const parts = [head, make("p", { className: "why" }, ...coded(meaning)), make("ul", {}, ...told)];
    return make("div", { className: "finding" }, ...parts, make("p", {}, make("b", { textContent: "What to do: " }), ...coded(remedy)));
  }));
  $("card").after($("findings")); // what is wrong is read first
}

function fillHead() {
  const { is_good, words } = sheet.verdict;
  $("title").textContent = sheet.title;
  $("verdict").textContent = words;
  $("verdict").className = { true: "good", false: "error" }[is_good] ?? "note";
  $("about").textContent = sheet.about;
  $("producer").textContent = sheet.producer;
}

// The rows that are wanted, sorted as `state` says, in a table with a button that shows more of them.
// columns  {key, head: nodes, value: of a row, cell: its text, className, last: of rows that stand last}
function fillTable(table, columns, wanted, count, what) {
  const sorted = columns.find(({ key }) => key === state.column);
  const sign = state.isDown ? -1 : 1;
  const last = sorted.last ?? ((row) => (sorted.value(row) === null ? 1 : 0));
  wanted.sort((a, b) => {
    const [x, y] = [sorted.value(a), sorted.value(b)];
    return last(a) - last(b) || sign * (x < y ? -1 : x > y ? 1 : 0);
  });
  const again = () => fillTable(table, columns, wanted, count, what);
  const heads = columns.map(({ key, head }) => {
    const onclick = () => { state.isDown = state.column === key && !state.isDown; state.column = key; again(); table.querySelector("[aria-sort] button").focus(); };
    const cell = make("th", { scope: "col" }, make("button", { type: "button", onclick }, ...head()));
    if (state.column === key) cell.setAttribute("aria-sort", state.isDown ? "descending" : "ascending");
    return cell;
  });
  table.tHead.replaceChildren(make("tr", {}, ...heads));
  const cellOf = (row) => ({ cell, className }) => make("td", { textContent: cell(row), className: className?.(row) ?? "" });
  table.tBodies[0].replaceChildren(...wanted.slice(0, state.shown).map((row) => make("tr", {}, ...columns.map(cellOf(row)))));
  $("more").onclick = () => { state.shown += 4 * ROWS; again(); };
  $("more").hidden = wanted.length <= state.shown;
  $("more").textContent = `Show more of ${wanted.length.toLocaleString("en")}`;
  $("matches").textContent = wanted.length === count ? many(count, what) : `${wanted.length.toLocaleString("en")} of ${many(count, what)}`;
}

// Filters when somebody types, and draws again when the window has another width.
function listen(filter, redraw) {
  $("tools").addEventListener("input", soon(filter));
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  let width = document.documentElement.clientWidth;
  addEventListener("resize", soon(() => {
    if (width === (width = document.documentElement.clientWidth) || matchMedia("print").matches) return;
    redraw();
  }));
}
