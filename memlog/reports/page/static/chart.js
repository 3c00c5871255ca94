"use strict";
/* Memory over steps, with uPlot: drag to zoom, double-click for the whole run. */
(() => {
  const { data, bytes, tick, whole, make, color, onWidth, onTheme } = memlog;
  const HEIGHT = 340;
  const PALETTE = ["k0", "k3", "k6", "k1", "k2", "k7", "k4", "k5"];
  const isNumbered = (curve) => /^(rank|run) /.test(curve.label);

  const colorOf = (curve, number) => color(isNumbered(curve) ? PALETTE[number % 8] : curve.kind);

  /** True if a line has one value only, which is drawn as a point. */
  const isSingle = (curve) => curve.high.filter((size) => size !== null).length === 1;

  /** Distance of the ticks of a scale of bytes: 1, 2, 4, … units. */
  const apart = (span) => 2 ** Math.ceil(Math.log2(Math.max(span, 4096) / 5));

  function range(chart, mode, low, high) {
    if (mode === "limit" && chart.limit !== null) return [0, Math.max(high, chart.limit) * 1.04];
    if (mode === "zero" || low < 0.5 * high) low = 0;
    if (mode === "fit" && chart.limit !== null && high >= 0.5 * chart.limit) high = Math.max(high, chart.limit * 1.02);
    const step = apart(high - low);
    return [Math.floor(low / step) * step, Math.ceil((high + (high - low) * 0.02) / step) * step];
  }

  /** The chart's columns, with one or two series for each line. */
  function columns(chart) {
    const values = [chart.x], series = [{}], bands = [];
    for (const [number, curve] of chart.curves.entries()) {
      const stroke = colorOf(curve, number), width = curve.kind === "level" ? 2 : 1.3;
      const sparse = curve.kind === "tree" || isNumbered(curve);
      const one = { stroke, width, spanGaps: sparse, points: { show: chart.x.length < 40 || isSingle(curve) } };
      values.push(curve.high);
      series.push({ ...one, fill: curve.kind === "level" && !curve.low && !isNumbered(curve) ? `${stroke}1c` : undefined });
      if (curve.low) {
        values.push(curve.low);
        series.push({ ...one, width: 1, points: { show: false } });
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}40` });
      }
    }
    return { values, series, bands };
  }

  class Live {
    constructor(figure, chart) {
      this.chart = chart;
      this.plot = figure.querySelector(".plot");
      this.marks = memlog.marks(chart.id === "ranks" ? [] : data.marks, data.axis);
      this.peak = chart.peak;
      this.mode = "fit";
      this.tip = make("div", { class: "tip", hidden: true });
      const words = this.plot.querySelector("title").textContent;
      this.box = make("div", {
        class: "live", tabindex: "0", role: "group", "aria-roledescription": "chart",
        "aria-label": `${words}. Arrow keys move along the line, plus and minus zoom, Escape shows the whole run.`,
        onkeydown: (event) => this.key(event),
        onblur: () => { this.tip.hidden = true; },
      });
      this.spoken = make("span", { class: "skip", "aria-live": "polite" });
      this.plot.classList.add("has-live");
      this.plot.append(this.box, this.tip, this.spoken);
      this.plot.before(this.tools());
      onWidth(this.plot, () => this.draw());
      onTheme(() => this.draw());
    }

    tools() {
      const modes = [["fit", "Fit"], ["zero", "From 0"], ...(this.chart.limit === null ? [] : [["limit", "To the limit"]])];
      this.choices = modes.map(([mode, words]) =>
        make("button", { type: "button", "aria-pressed": String(mode === this.mode), onclick: () => this.scale(mode), "data-mode": mode }, words));
      this.reset = make("button", { type: "button", class: "reset", hidden: true, onclick: () => this.zoom(null) }, "Whole run");
      const button = (words, factor, name) => make("button", { type: "button", "aria-label": name, title: name, onclick: () => this.by(factor) }, words);
      return make("div", { class: "tools" },
        make("span", { class: "choice", role: "group", "aria-label": "Scale" }, ...this.choices),
        make("span", { class: "choice", role: "group", "aria-label": "Zoom" }, button("+", 0.5, "Zoom in"), button("\u2212", 2, "Zoom out")),
        this.reset, make("span", { class: "note" }, "Drag to zoom"));
    }

    get whole() { const { x, width } = this.chart; return [x[0], Math.max(x[x.length - 1] + width - 1, x[0] + 1)]; }

    /** Room at the right edge for half of the last step's number. */
    edge() { return Math.max(12, 6 + 4 * whole(this.whole[1]).length); }

    draw() {
      const width = this.plot.clientWidth, kept = this.shown;
      if (this.u) this.u.destroy();
      this.u = null;
      const { values, series, bands } = columns(this.chart), soft = color("soft"), line = color("line");
      const font = `12px ${getComputedStyle(document.body).fontFamily}`;
      this.u = new uPlot({
        width, height: HEIGHT, series, bands, legend: { show: false },
        padding: [this.marks.height, this.edge(), 0, 0],
        cursor: { drag: { x: true, y: false }, points: { size: 7 }, y: false },
        scales: {
          x: { time: false, range: (u, low, high) => (this.u ? [low, high] : this.whole) },
          y: { range: (u, low, high) => (low === null ? [0, 1] : range(this.chart, this.mode, low, high)) },
        },
        axes: [
          { stroke: soft, font, grid: { show: false }, ticks: { show: false }, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7],
            values: (u, splits) => splits.map((at) => whole(at)) },
          { stroke: soft, font, size: 82, ticks: { show: false }, grid: { stroke: line, width: 1 },
            splits: (u, axis, low, high) => { const step = apart(high - low), found = []; for (let at = Math.ceil(low / step) * step; at <= high * 1.0001; at += step) found.push(at); return found; },
            values: (u, splits) => splits.map((size) => tick(size)) },
        ],
        hooks: {
          draw: [(u) => {
            this.marks.drawLanes(u);
            this.marks.drawLimit(u, this.chart.limit);
            this.marks.drawLines(u);
            if (this.peak) this.marks.drawPeak(u, ...this.peak);
          }],
          setCursor: [(u) => this.point(u)],
          setScale: [(u, key) => { if (key === "x") this.zoomed(u); }],
        },
      }, values, this.box);
      this.zoom(kept);
    }

    zoomed(u) {
      const { min, max } = u.scales.x, [first, last] = this.whole;
      this.shown = min <= first && max >= last ? null : [min, max];
      this.reset.hidden = this.shown === null;
      this.box.dataset.shown = `${Math.round(min)}-${Math.round(max)}`;
    }

    zoom(span) {
      const [min, max] = span || this.whole;
      this.u.setScale("x", { min, max });
    }

    by(factor) {
      const [first, last] = this.whole, { min, max } = this.u.scales.x;
      const at = this.u.cursor.idx === null || this.u.cursor.idx === undefined ? (min + max) / 2 : this.chart.x[this.u.cursor.idx];
      const span = Math.min(Math.max((max - min) * factor, 4 * this.chart.width), last - first);
      const low = Math.min(Math.max(at - span / 2, first), last - span);
      this.zoom([low, low + span]);
    }

    scale(mode) {
      this.mode = mode;
      for (const choice of this.choices) choice.setAttribute("aria-pressed", String(choice.dataset.mode === mode));
      this.u.redraw(true, true);
      this.zoom(this.shown);
    }

    key(event) {
      const move = (by) => {
        const last = this.chart.x.length - 1, now = this.u.cursor.idx;
        const at = Math.min(Math.max((now ?? (by > 0 ? -1 : last + 1)) + by, 0), last);
        const left = this.u.valToPos(this.chart.x[at], "x");
        this.u.setCursor({ left, top: 40 });
        this.spoken.textContent = this.tip.innerText.replaceAll("\n", ", ");
      };
      const keys = {
        ArrowLeft: () => move(event.shiftKey ? -10 : -1), ArrowRight: () => move(event.shiftKey ? 10 : 1),
        "+": () => this.by(0.5), "=": () => this.by(0.5), "-": () => this.by(2), "0": () => this.zoom(null), Escape: () => this.zoom(null),
      };
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    }

    point(u) {
      const { idx, left } = u.cursor;
      if (idx === null || idx === undefined || left < 0) { this.tip.hidden = true; return; }
      const { x, width, curves } = this.chart;
      const at = width > 1 ? `${data.axis}s ${whole(x[idx])} to ${whole(x[idx] + width - 1)}` : `${data.axis} ${whole(x[idx])}`;
      const rows = curves.filter((curve) => curve.high[idx] !== null).map((curve) => {
        const low = curve.low && curve.low[idx] !== curve.high[idx] ? `${bytes(curve.low[idx])} to ` : "";
        return make("div", {}, `${curve.label} `, make("b", {}, low + bytes(curve.high[idx])));
      });
      const marks = this.marks.near(u, left).slice(0, 6).map((mark) => make("div", { class: "mark" }, `${whole(mark.at)}: ${mark.text.replaceAll("`", "")}`));
      this.tip.replaceChildren(make("strong", {}, at), ...rows, ...marks);
      this.tip.hidden = false;
      const plot = u.over.offsetLeft, room = this.plot.clientWidth;
      const place = plot + left + 16 + this.tip.offsetWidth > room ? plot + left - this.tip.offsetWidth - 16 : plot + left + 16;
      this.tip.style.left = `${Math.max(place, 0)}px`;
      this.tip.style.top = `${this.marks.height + 18}px`;
    }
  }

  memlog.charts = (container) => {
    const figures = data.charts.map((chart) => document.getElementById(`figure-${chart.id}`));
    data.charts.forEach((chart, at) => new Live(figures[at], chart));
    if (figures.length < 2) return;
    const show = (chosen) => {
      figures.forEach((figure, at) => { figure.hidden = at !== chosen; });
      tabs.forEach((tab, at) => { tab.setAttribute("aria-pressed", String(at === chosen)); });
    };
    const tabs = data.charts.map((chart, at) => make("button", { type: "button", onclick: () => show(at) }, chart.title));
    container.before(make("div", { class: "tools" }, make("span", { class: "choice", role: "group", "aria-label": "Memory" }, ...tabs)));
    show(0);
  };
})();
