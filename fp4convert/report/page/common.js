// What all pages share: they read the document in #data, fill the page with text, and let plotly draw.
// Nothing from the document becomes HTML: elements get textContent, and plotly, which knows some tags, gets plain().
"use strict";

const sheet = JSON.parse(document.getElementById("data").textContent);
const CONFIG = { displayModeBar: false, responsive: false, doubleClick: false };
const ROWS = 25; // of the table, at first and at each asking

const $ = (id) => document.getElementById(id);
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
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

// What a word with stars finds.
const globbed = (word) => new RegExp(word.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*"));

// Does something when nothing happened for a moment.
function soon(what) {
  let waiting = 0;
  return () => { clearTimeout(waiting); waiting = setTimeout(what, 120); };
}

function looks() {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { family: "system-ui, 'DejaVu Sans', sans-serif", size: 12, color: "#777" },
    hoverlabel: { bgcolor: "#1d1c1a", bordercolor: "#1d1c1a", font: { color: "#f5f3ee", size: 12.5 }, align: "left", namelength: -1 },
  };
}

// Drawings have sizes in pixels; a view box lets the print stylesheet fit them to the paper.
function scaleInPrint(box, { width, height }) {
  for (const svg of box.querySelectorAll(".main-svg")) svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  box.style.setProperty("--ratio", `${width} / ${height}`);
  box.style.setProperty("--width", `${width}px`);
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
