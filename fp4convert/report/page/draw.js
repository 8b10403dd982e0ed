// Draws charts as SVG: axes, cells, bars, steps, lines and dots, in pixels of their box.
// They are drawn again when the window changes; a view box lets paper scale them.
// A mark with `words` shows them beside the pointer, as text.

const SPACE = "http://www.w3.org/2000/svg";
const SIGN = 6.7; // px: the usual width of a sign of a label
const LINE = 14; // px: the height of a label with its gap
const OUTLINES = { // of dots, around 0 0, one px in size
  circle: "M-.5 0a.5 .5 0 1 0 1 0a.5 .5 0 1 0 -1 0z",
  square: "M-.45 -.45h.9v.9h-.9z",
  diamond: "M0 -.6L.6 0L0 .6L-.6 0z",
  triangle: "M0 -.6L.6 .45H-.6z",
  pentagon: "M0 -.55L.55 -.1L.35 .5H-.35L-.55 -.1z",
};

function shape(tag, about = {}, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [key, value] of Object.entries(about)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Values for an axis, 1, 2 or 5 times a power of ten apart, with their texts.
function ticksOf([low, high], most, factor = 1, unit = "") {
  const least = (factor * (high - low)) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= 0.999 * least);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  const last = Math.floor((factor * high) / step + 1e-9);
  for (let at = Math.ceil((factor * low) / step - 1e-9); at <= last; at++) {
    const value = at * step;
    const text = digits > 4 && at ? value.toExponential(1) : value.toFixed(at ? digits : 0);
    ticks.push([value / factor, `${text}${unit}`.replace("-", "−")]);
  }
  return ticks;
}

class Plot {
  // sizes  x and y, the values at the ends of the axes (left and right, bottom and top); pixels
  constructor(box, label, sizes) {
    const { x, y, width = box.clientWidth, height, left = 46, top = 8, bottom = 22 } = sizes;
    const right = 8;
    this.inside = { left, right: width - right, top, bottom: height - bottom };
    const place = (value, [from, to]) => (value - from) / (to - from);
    this.x = (value) => left + place(value, x) * (width - right - left);
    this.y = (value) => height - bottom - place(value, y) * (height - bottom - top);
    const viewBox = `0 0 ${width} ${height}`;
    this.svg = shape("svg", { viewBox, width, height, role: "img", "aria-label": label });
    box.append(this.svg);
  }

  // Appends a mark; words: a function that returns the lines to show beside the pointer.
  mark(tag, about, words, ...children) {
    const element = shape(tag, about, ...children);
    if (words) element.words = words;
    this.svg.append(element);
    return element;
  }

  text(x, y, text, about = {}) {
    return this.mark("text", { x, y, "text-anchor": "middle", ...about }, null, text);
  }

  // Labels below the plot that leave room for each other; ticks: [value, text].
  below(ticks) {
    let free = -Infinity;
    for (const [value, text] of ticks) {
      const half = (SIGN * text.length) / 2;
      const middle = Math.min(this.x(value), this.inside.right + 8 - half);
      if (middle - half < free) continue;
      free = middle + half + SIGN;
      this.text(middle, this.inside.bottom + 15, text);
    }
  }

  // Labels left of the plot that leave room for each other, with lines across where asked for.
  beside(ticks, hasLines = true) {
    let free = null;
    for (const [value, text] of ticks) {
      const y = this.y(value);
      if (free !== null && Math.abs(y - free) < LINE - 1) continue;
      free = y;
      const { left, right } = this.inside;
      if (hasLines) this.mark("path", { d: `M${left} ${y}H${right}`, class: "across" });
      this.text(left - 7, y + 4, text, { "text-anchor": "end" });
    }
  }

  // The title of an axis: below in the middle, or above the left end.
  titles(below, above) {
    const { left, right, bottom, top } = this.inside;
    this.text((left + right) / 2, bottom + 34, below);
    this.text(4, top - 12, above, { "text-anchor": "start" });
  }

  // A rectangle between two values of both axes.
  rect([x0, x1], [y0, y1], about, words, gap = 0) {
    const [left, right] = [this.x(x0), this.x(x1)].sort((a, b) => a - b);
    const [top, bottom] = [this.y(y0), this.y(y1)].sort((a, b) => a - b);
    const [width, height] = [Math.max(right - left - gap, 0.5), Math.max(bottom - top - gap, 0)];
    const place = { x: left + gap / 2, y: top + gap / 2, width, height };
    return this.mark("rect", { ...place, ...about }, words);
  }

  // A step of each value, equally wide; filled down to `floor` where it is given.
  steps([low, high], values, about, floor = null) {
    const wide = (high - low) / values.length;
    let d = `M${this.x(low)} ${this.y(values[0])}`;
    values.forEach((value, at) => {
      d += `V${this.y(value).toFixed(1)}H${this.x(low + (at + 1) * wide).toFixed(1)}`;
    });
    if (floor !== null) d += `V${this.y(floor)}H${this.x(low)}z`;
    return this.mark("path", { d, ...about });
  }

  // A line through values at 0, 1, 2 ..., with gaps where one is null.
  line(values, about) {
    let [d, isOn] = ["", false];
    values.forEach((value, at) => {
      const [x, y] = [this.x(at).toFixed(1), this.y(value).toFixed(1)];
      if (value !== null) d += `${isOn ? "L" : "M"}${x} ${y}`;
      isOn = value !== null;
    });
    return this.mark("path", { d, fill: "none", "stroke-linejoin": "round", ...about });
  }

  dot(x, y, size, outline, about, words) {
    const transform = `translate(${this.x(x)} ${this.y(y)}) scale(${size})`;
    return this.mark("path", { d: OUTLINES[outline], transform, ...about }, words);
  }

  // Transparent columns, equally wide between two values, which show words.
  columns(count, [low, high], wordsOf) {
    const { top, bottom } = this.inside;
    const width = (this.x(high) - this.x(low)) / count;
    for (let at = 0; at < count; at++) {
      const place = { x: this.x(low) + at * width, y: top, width, height: bottom - top };
      this.mark("rect", { ...place, class: "column" }, () => wordsOf(at));
    }
  }
}

// Shows the words of the mark that is under the pointer, beside it.
const tip = make("div", { id: "tip", hidden: true });
document.body.append(tip);
let pointer = null; // where a mouse is
function showWords({ target, clientX, clientY, pointerType }) {
  pointer = pointerType === "mouse" ? { clientX, clientY, pointerType } : null;
  tip.hidden = !target?.words;
  if (tip.hidden) return;
  tip.replaceChildren(...target.words().map((textContent) => make("div", { textContent })));
  const { offsetWidth: width, offsetHeight: height } = tip;
  const isRight = clientX + 14 + width < innerWidth;
  tip.style.left = `${Math.max(6, isRight ? clientX + 14 : clientX - width - 14)}px`;
  const isBelow = clientY + 16 + height < innerHeight;
  tip.style.top = `${isBelow ? clientY + 16 : Math.max(6, clientY - height - 12)}px`;
}
addEventListener("pointermove", showWords);
addEventListener("pointerdown", showWords);
addEventListener("scroll", () => {
  if (!pointer) return (tip.hidden = true);
  const target = document.elementFromPoint(pointer.clientX, pointer.clientY);
  return showWords({ ...pointer, target });
});
