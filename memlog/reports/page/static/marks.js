"use strict";
/* Marks of a run's events on a chart: lines for failures, growth and alerts, a lane of ticks for each other kind. */
memlog.marks = (marks, axis) => {
  const { color, whole } = memlog;
  const LANE = 15;
  const LINES = { growth: ["bad", "growth begins"], alert: ["warn", "alert"], failure: ["bad", "out of memory"] };
  const LANES = { trace: "traced", epoch: "epochs", evaluation: "evaluations", checkpoint: "checkpoints", file: "files", block: "blocks" };
  const lanes = Object.keys(LANES).filter((kind) => marks.some((mark) => mark.kind === kind));

  function text(u, words, x, y, align, fill, outlined = false) {
    const { ctx } = u;
    ctx.font = `${12 * devicePixelRatio}px ${getComputedStyle(document.body).fontFamily}`;
    ctx.textAlign = align;
    ctx.textBaseline = "middle";
    if (outlined) {
      ctx.strokeStyle = color("paper");
      ctx.lineWidth = 5 * devicePixelRatio;
      ctx.lineJoin = "round";
      ctx.strokeText(words, x, y);
    }
    ctx.fillStyle = fill;
    ctx.fillText(words, x, y);
  }

  function drawLanes(u) {
    const { ctx } = u, ratio = devicePixelRatio, { left, top, width } = u.bbox;
    lanes.forEach((kind, number) => {
      const y = top - (lanes.length - number - 0.5) * LANE * ratio - 9 * ratio;
      text(u, LANES[kind], left - 8 * ratio, y, "right", color("soft"));
      ctx.fillStyle = color("line");
      ctx.fillRect(left, y, width, ratio);
      ctx.fillStyle = color(kind === "trace" ? "k2" : "soft");
      for (const mark of marks) {
        if (mark.kind !== kind) continue;
        const x = u.valToPos(mark.at, "x", true);
        if (x >= left - 1 && x <= left + width + 1) ctx.fillRect(x - ratio, y - 4 * ratio, 2 * ratio, 9 * ratio);
      }
    });
  }

  function drawLines(u) {
    const { ctx } = u, ratio = devicePixelRatio, { left, top, width, height } = u.bbox;
    let free = -Infinity;
    for (const mark of marks) {
      if (!(mark.kind in LINES)) continue;
      const x = u.valToPos(mark.at, "x", true);
      if (x < left || x > left + width) continue;
      const [name, words] = LINES[mark.kind];
      ctx.strokeStyle = color(name);
      ctx.lineWidth = 1.5 * ratio;
      ctx.setLineDash(mark.kind === "growth" ? [5 * ratio, 4 * ratio] : []);
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      if (x < free) continue;
      const room = ctx.measureText(words).width + 8 * ratio, right = x + room < left + width;
      text(u, words, x + (right ? 5 : -5) * ratio, top + 9 * ratio, right ? "left" : "right", color(name));
      free = x + room;
    }
    ctx.setLineDash([]);
  }

  function drawLimit(u, limit) {
    const { ctx } = u, ratio = devicePixelRatio, { left, top, width, height } = u.bbox;
    if (limit === null) return;
    const y = u.valToPos(limit, "y", true);
    if (y < top - 1 || y > top + height) return;
    ctx.strokeStyle = color("bad");
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash([6 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(left + width, y);
    ctx.stroke();
    ctx.setLineDash([]);
    text(u, `limit ${memlog.bytes(limit)}`, left + width - 6 * ratio, y + 10 * ratio, "right", color("bad"));
  }

  function drawPeak(u, at, value) {
    const { ctx } = u, ratio = devicePixelRatio, { left, top, width, height } = u.bbox;
    const x = u.valToPos(at, "x", true), y = u.valToPos(value, "y", true);
    if (x < left - 1 || x > left + width + 1 || y < top - 1 || y > top + height) return;
    ctx.beginPath();
    ctx.arc(x, y, 4 * ratio, 0, 2 * Math.PI);
    ctx.fillStyle = color("peak");
    ctx.fill();
    const right = x < left + width / 2, words = `peak ${memlog.bytes(value)}, ${axis} ${whole(at)}`;
    const below = y - top < 42 * ratio;
    text(u, words, x + (right ? 9 : -9) * ratio, y + (below ? 17 : -10) * ratio, right ? "left" : "right", color("ink"), true);
  }

  /** Marks within some pixels of a place on the chart. */
  const near = (u, left) => marks.filter((mark) => Math.abs(u.valToPos(mark.at, "x") - left) <= 5);

  return { height: lanes.length ? lanes.length * LANE + 16 : 10, drawLanes, drawLines, drawLimit, drawPeak, near };
};
