"use strict";
/* Tools that the page's parts share: the data, sizes as text, elements, colours. */
const memlog = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

  /** A size as text, as memlog prints it: "1.5 GiB", "512 B". */
  function bytes(size, digits = 1) {
    if (size === null || size === undefined) return "unknown";
    let scaled = size, unit = 0;
    while (Math.abs(scaled) >= 1024 && unit < UNITS.length - 1) { scaled /= 1024; unit += 1; }
    return `${unit === 0 ? Math.round(scaled) : scaled.toFixed(digits)} ${UNITS[unit]}`;
  }

  /** A tick's size, exactly: ticks are halves and quarters of a unit. */
  const tick = (size) => { const [number, unit] = bytes(size, 3).split(" "); return `${Number(number)} ${unit}`; };

  const whole = (number) => Number(number).toLocaleString("en-US");

  /** An element with properties, attributes and children; text is never read as HTML. */
  function make(name, options = {}, ...children) {
    const { svg = false, ...attributes } = options;
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  /** A colour of the style sheet, as it is now: light or dark. */
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /** Calls a function when an element's width has changed, at most once a frame. */
  function onWidth(element, draw) {
    let last = 0, waiting = false;
    new ResizeObserver(() => {
      const width = element.clientWidth;
      if (waiting || width === last || width === 0) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; last = element.clientWidth; draw(last); });
    }).observe(element);
  }

  const onTheme = (draw) => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  return { data, bytes, tick, whole, make, color, onWidth, onTheme };
})();
