"use strict";
/* The layers as an icicle: each bar is as wide as the bytes that it held. Click or Enter zooms. */
memlog.icicle = (place, packed) => {
  const { make, bytes, whole, onWidth } = memlog;
  const ROW = 27, LEAST = 1.5, LETTER = 6.7;
  const status = document.getElementById("icicle-status");
  const found = document.getElementById("found");
  const search = document.getElementById("find");
  const wholeButton = document.getElementById("whole");
  const nodes = [];
  let depth = 0;

  /** Makes objects of the nested arrays, with each node's offset among the root's bytes. */
  function unpack([name, size, colour, kind, children], above, level, begin) {
    const node = { name, size, colour, kind, above, level, begin, below: [], group: null };
    node.path = above && above.above ? `${above.path} / ${name}` : name;
    nodes.push(node);
    depth = Math.max(depth, level);
    let at = begin;
    for (const child of children) {
      node.below.push(unpack(child, node, level + 1, at));
      at += child[1];
    }
    return node;
  }

  const root = unpack(packed.root, null, 0, 0);
  root.name = root.path = packed.title;
  let zoomed = root, current = root, words = "";

  const share = (node) => `${(100 * node.size / root.size).toFixed(node.size < root.size / 100 ? 2 : 1)} %`;
  const describe = (node) =>
    `${node.path}${node.kind ? ` (${node.kind})` : ""}: ${bytes(node.size)}, ${share(node)} of the peak`;
  const isAbove = (node, other) => { for (let at = other.above; at; at = at.above) if (at === node) return true; return false; };
  const isHit = (node) => words !== "" && `${node.path} ${node.kind}`.toLowerCase().includes(words);

  const svg = make("svg", { svg: true, role: "tree", "aria-label": `Layers of ${packed.title}` });
  place.append(svg);

  function span(node, width) {
    if (node === zoomed || isAbove(node, zoomed)) return [0, width];
    const scale = width / zoomed.size;
    return [(node.begin - zoomed.begin) * scale, node.size * scale];
  }

  function draw(width) {
    const rows = depth + 1;
    svg.setAttribute("viewBox", `0 0 ${width} ${rows * ROW}`);
    svg.setAttribute("height", rows * ROW);
    svg.replaceChildren();
    for (const node of nodes) {
      node.group = null;
      const inside = node === zoomed || isAbove(zoomed, node), above = isAbove(node, zoomed);
      if (!inside && !above) continue;
      const [x, wide] = span(node, width);
      if (wide < LEAST) continue;
      svg.append(drawNode(node, x, wide, above));
    }
    mark();
    settle();
  }

  function drawNode(node, x, wide, above) {
    const y = node.level * ROW, room = Math.floor((wide - 12) / LETTER);
    const size = bytes(node.size), fits = room >= node.name.length + size.length + 1;
    const text = room < 4 ? "" : node.name.length <= room ? node.name : `${node.name.slice(0, room - 1)}…`;
    node.group = make("g", {
      svg: true, role: "treeitem", tabindex: "-1", class: `${node.colour ? "leaf" : "layer"}${above ? " above" : ""}`,
      "aria-level": node.level + 1, "aria-label": describe(node),
      "aria-expanded": node.below.length ? "true" : null, "data-name": node.name,
      onclick: () => { zoom(node.below.length ? node : node.above || root); focus(node); },
      onfocus: () => { current = node; status.textContent = describe(node); },
      onmouseenter: () => { status.textContent = describe(node); },
    },
    make("rect", { svg: true, x, y, width: wide, height: ROW - 1, rx: 3, class: node.colour }),
    text ? make("text", { svg: true, x: x + 7, y: y + 17.5 }, text, fits ? make("tspan", { svg: true, dx: 7 }, size) : null) : null);
    return node.group;
  }

  /** One node can be reached with Tab, the others with the arrow keys. */
  function settle() {
    if (!current.group) current = zoomed;
    for (const node of nodes) if (node.group) node.group.setAttribute("tabindex", node === current ? "0" : "-1");
  }

  function focus(node) {
    if (!node || !node.group) return;
    current = node;
    settle();
    node.group.focus();
  }

  function zoom(node) {
    zoomed = node;
    wholeButton.hidden = node === root;
    draw(place.clientWidth);
  }

  function mark() {
    for (const node of nodes) {
      if (!node.group) continue;
      node.group.classList.toggle("hit", isHit(node) && !node.colour);
      node.group.classList.toggle("faint", words !== "" && !isHit(node));
    }
  }

  /** The outermost nodes that match: a layer inside one is a part of it, and not counted twice. */
  function hits() {
    return nodes.filter((node) => isHit(node) && node.above && !isHit(node.above));
  }

  function look() {
    words = search.value.trim().toLowerCase();
    mark();
    const matching = words === "" ? [] : hits();
    const sum = matching.reduce((total, node) => total + node.size, 0);
    found.textContent = words === "" ? "" : matching.length
      ? `${whole(matching.length)} found: ${bytes(sum)}, ${(100 * sum / root.size).toFixed(1)} % of the peak` : "nothing found";
  }

  function neighbour(node, way) {
    const visible = nodes.filter((other) => other.group && other.level === node.level).sort((a, b) => a.begin - b.begin);
    return visible[visible.indexOf(node) + way];
  }

  const KEYS = {
    ArrowLeft: () => focus(neighbour(current, -1)),
    ArrowRight: () => focus(neighbour(current, 1)),
    ArrowUp: () => focus(current.above),
    ArrowDown: () => focus(current.below.find((node) => node.group)),
    Home: () => focus(root),
    Enter: () => { const at = current; zoom(at.below.length ? at : at.above || root); focus(at); },
    " ": () => KEYS.Enter(),
    Escape: () => { const at = current; zoom(root); focus(at); },
  };
  svg.addEventListener("keydown", (event) => {
    if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  search.addEventListener("input", look);
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    const largest = hits().sort((a, b) => b.size - a.size)[0];
    if (largest) { zoom(largest.below.length ? largest : largest.above || root); focus(largest); }
  });
  wholeButton.addEventListener("click", () => { zoom(root); focus(root); });
  document.getElementById("icicle-controls").hidden = false;
  status.textContent = "Click a layer to zoom in. With the keyboard: Tab, then the arrow keys, Enter and Escape.";
  onWidth(place, draw);
};
