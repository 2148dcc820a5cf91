// Draws the scene: heads to choose from, one heat map, and all about the token that is chosen in it.
"use strict";
(() => {
  const scene = JSON.parse(document.getElementById("scene").textContent);
  // Queries and keys: the same tokens, if the scene has no others for keys.
  const keys = scene.keys ?? scene.tokens;
  const [n, m] = [scene.tokens.length, keys.length];
  const state = { layer: 0, head: 0, mask: 0, view: "before", range: "largest", query: n - 1, key: null };
  const $ = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  /** An element with attributes, text or children. */
  function el(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  // Colours. Lightness in OKLab is linear in the weight, so that equal steps look equal, and print and colour-blind readers
  // lose nothing; the hue only helps. Nothing is as dark as a dark page's cells of weight 0, or as light as a light page's.
  function rgb(lightness, chroma, hue) {
    const [a, b] = [chroma * Math.cos((hue * Math.PI) / 180), chroma * Math.sin((hue * Math.PI) / 180)];
    const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
    const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
    const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
    return [
      4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
      -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
      -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
    ].map((x) => Math.min(1, Math.max(0, x)));
  }
  const byte = (x) => Math.round(255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055));
  /** From 0 to 1. */
  function heat(t) {
    const x = Math.min(1, Math.max(0, t));
    const light = dark.matches ? 0.27 + 0.68 * x : 0.96 - 0.66 * x;
    const end = dark.matches ? x : 1 - x; // 1 where it is light
    return rgb(light, 0.03 + 0.4 * x * (1 - x) * 1.1, 275 - 170 * end);
  }
  /** From -1 to 1. */
  function signed(t) {
    const x = Math.min(1, Math.abs(t));
    return rgb(dark.matches ? 0.3 + 0.5 * x : 0.95 - 0.5 * x, 0.13 * x, t < 0 ? 50 : 255);
  }
  const css = (colour) => `rgb(${colour.map(byte).join(" ")})`;
  /** Black or white, whichever can be read on it. */
  function ink([r, g, b]) {
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
  }
  function paint(node, colour) {
    node.style.background = css(colour);
    node.style.color = ink(colour);
  }

  // What is shown.
  const head = () => scene.layers[state.layer].heads[state.head];
  const shown = (of = head()) => of.views[state.mask];
  const weights = (of = head()) => shown(of)[state.view];
  const largest = (rows) => rows.reduce((m, row) => row.reduce((m, w) => (w === null ? m : Math.max(m, w)), m), 0);
  const top = (of = head()) => (state.range === "one" ? 1 : largest(weights(of)) || 1);
  const percent = (w) => `${(100 * w).toFixed(1)} %`;
  const name = (token) => `“${scene.tokens[token]}”`;
  const keyName = (key) => `“${keys[key]}”`;

  function controls() {
    const set = (title, key, choices) => {
      if (choices.length < 2) return;
      const group = el("fieldset", {}, el("legend", {}, title));
      for (const [value, text] of choices) {
        const input = el("input", { type: "radio", name: key, value });
        input.checked = String(state[key]) === String(value);
        input.addEventListener("change", () => {
          state[key] = typeof state[key] === "number" ? Number(value) : value;
          draw();
        });
        group.append(el("label", {}, input, el("span", {}, text)));
      }
      $("controls").append(group);
    };
    if (scene.layers.length > 1) {
      const select = el("select", { id: "layer" });
      scene.layers.forEach((layer, i) => select.append(el("option", { value: i }, layer.name)));
      select.addEventListener("change", () => {
        state.layer = Number(select.value);
        state.head = Math.min(state.head, scene.layers[state.layer].heads.length - 1);
        draw();
      });
      $("controls").append(el("label", { class: "soft" }, "Layer ", select));
    }
    set("Mask", "mask", scene.masks.map((mask, i) => [i, mask]));
    const drop = scene.dropout;
    if (drop) set("Weights", "view", [["before", "before dropout"], ["after", `after (p = ${drop.p}, seed ${drop.seed})`]]);
    set("Strongest colour", "range", [["largest", "largest weight"], ["one", "1"]]);
    $("controls").addEventListener("submit", (event) => event.preventDefault());
  }

  /** A small picture of every head of the layer. */
  function heads() {
    const all = scene.layers[state.layer].heads;
    const buttons = all.length < 2 ? [] : all.map((of, i) => {
      const canvas = el("canvas", { width: m, height: n, "aria-hidden": "true" });
      const context = canvas.getContext("2d");
      const picture = context.createImageData(m, n);
      const max = top(of);
      weights(of).flat().forEach((w, at) => {
        if (w !== null) picture.data.set([...heat(w / max).map(byte), 255], 4 * at);
      });
      context.putImageData(picture, 0, 0);
      const button = el("button", { type: "button", "aria-pressed": i === state.head }, canvas, `head ${i + 1}`);
      button.addEventListener("click", () => {
        state.head = i;
        document.querySelectorAll("#heads button").forEach((b, j) => b.setAttribute("aria-pressed", j === i));
        map();
        token();
      });
      return button;
    });
    $("heads").replaceChildren(...buttons);
  }

  function map() {
    const table = $("map");
    const room = Math.min(680, document.body.clientWidth - 130); // beside the names of the rows
    const side = Math.max(9, Math.min(56, Math.floor(room / m)));
    const numbers = side >= 34;
    table.style.setProperty("--cell", `${side}px`);
    table.classList.toggle("tight", m > 10 || keys.some((token) => token.length > 8));
    const layer = scene.layers[state.layer];
    const where = [
      ...(scene.layers.length > 1 ? [layer.name] : []),
      ...(layer.heads.length > 1 ? [`Head ${state.head + 1}`] : []),
      `Weights ${state.view === "after" ? "after dropout" : "after softmax"}`,
    ];
    $("map-title").textContent = where.join(" · ");
    const max = top();
    const before = shown().before;
    const columns = keys.map((token, key) => el("th", { scope: "col", "data-key": key, title: token }, token));
    const rows = weights().map((row, query) => {
      const label = el("th", { scope: "row", tabindex: -1, "data-query": query, "data-key": -1, title: scene.tokens[query] }, scene.tokens[query]);
      const cells = row.map((w, key) => {
        const cell = el("td", { role: "gridcell", tabindex: -1, "data-query": query, "data-key": key });
        if (w === null) {
          cell.className = "hidden";
          cell.textContent = "-";
          cell.title = `${name(query)} does not see ${keyName(key)}`;
        } else {
          paint(cell, heat(w / max));
          if (numbers) cell.textContent = w.toFixed(2);
          cell.title = `${name(query)} to ${keyName(key)}: ${w.toFixed(4)}`;
          if (state.view === "after" && w === 0 && before[query][key] !== 0) cell.classList.add("dropped");
        }
        return cell;
      });
      return el("tr", { role: "row" }, label, ...cells);
    });
    table.replaceChildren(el("thead", {}, el("tr", { role: "row" }, el("td"), ...columns)), el("tbody", {}, ...rows));
    legend(max);
    mark();
  }

  function legend(max) {
    const ramp = el("i", { "aria-hidden": "true" });
    const stops = Array.from({ length: 17 }, (_, i) => css(heat(i / 16)));
    ramp.style.background = `linear-gradient(to right, ${stops.join(",")})`;
    const parts = [el("span", {}, "0"), ramp, el("span", {}, max.toFixed(max < 0.1 ? 3 : 2))];
    if (weights().some((row) => row.includes(null))) parts.push(el("b", {}, "-"), el("span", {}, "not seen"));
    if (state.view === "after") parts.push(el("span", {}, `framed: dropped; the others are multiplied by ${(1 / (1 - scene.dropout.p)).toFixed(2)}`));
    $("legend").replaceChildren(...parts);
  }

  /** Shows which row and cell are chosen, and says so. */
  function mark() {
    document.querySelectorAll("#map .on, #map .key").forEach((node) => node.classList.remove("on", "key"));
    document.querySelectorAll("#map [tabindex='0']").forEach((node) => node.setAttribute("tabindex", -1));
    const row = document.querySelectorAll("#map tbody tr")[state.query];
    if (!row) return;
    row.classList.add("on");
    const at = state.key === null ? row.firstChild : row.children[state.key + 1];
    at.setAttribute("tabindex", 0);
    if (state.key === null) {
      $("status").textContent = "";
      return;
    }
    at.classList.add("key");
    document.querySelectorAll("#map thead th")[state.key].classList.add("on");
    const w = weights()[state.query][state.key];
    const [query, key] = [name(state.query), keyName(state.key)];
    const what = w === null ? `does not see ${key}` : `gives ${percent(w)} of its attention to ${key}`;
    $("status").textContent = `${query} ${state.view === "after" && w !== null ? `keeps ${percent(w)} for ${key} after dropout` : what}.`;
  }

  function token() {
    const { q, k, v } = head();
    const { scores, before, out } = shown();
    const after = state.view === "after" ? shown().after : null;
    const at = state.query;
    $("token-title").textContent = `Token ${at + 1}: ${name(at)}`;
    const seen = before[at].filter((w) => w !== null);
    // The exponential of the entropy: how many keys an equal share would reach.
    const spread = Math.exp(-seen.reduce((sum, w) => sum + (w > 0 ? w * Math.log(w) : 0), 0));
    $("spread").textContent = seen.length
      ? `Sees ${seen.length} of ${m} keys; it spreads its attention as if it looked at ${spread.toFixed(1)} of them equally (entropy).`
      : "Sees no key: its output is 0.";
    const titles = ["key", "score", "weight", ...(after ? ["after dropout"] : []), ""];
    const header = titles.map((title, i) => el("th", i ? { scope: "col", class: "num" } : { scope: "col" }, title));
    const max = largest([before[at], ...(after ? [after[at]] : [])]) || 1;
    const rows = before[at].map((w, key) => {
      const number = (x) => el("td", {}, x === null ? "-" : x.toFixed(4));
      const bar = el("td", { class: "bar" });
      const length = weights()[at][key];
      if (length !== null) {
        const fill = el("i");
        fill.style.width = `${(100 * length) / max}%`;
        fill.style.background = css(heat(length / top()));
        bar.append(fill);
      }
      const cells = [number(scores[at][key]), number(w), ...(after ? [number(after[at][key])] : []), bar];
      const row = el("tr", { "data-key": key }, el("th", { scope: "row", title: keys[key] }, keys[key]), ...cells);
      row.classList.toggle("hidden", w === null);
      row.classList.toggle("key", key === state.key);
      return row;
    });
    $("row").replaceChildren(el("thead", {}, el("tr", {}, ...header)), el("tbody", {}, ...rows));
    // A token has a key of its own where queries and keys are the same tokens; else those of the chosen key are shown.
    const own = scene.keys ? state.key : at;
    const parts = [["Q", "what it looks for", q, at]];
    if (own !== null) {
      const [found, handed] = scene.keys
        ? [`what ${keyName(own)} is found by`, `what ${keyName(own)} hands over`]
        : ["what it is found by", "what it hands over"];
      parts.push(["K", found, k, own], ["V", handed, v, own]);
    }
    parts.push(["Output", "the weighted mean of the values it sees", out, at]);
    $("vectors").replaceChildren(...parts.map((part) => vector(...part)));
  }

  function vector(symbol, meaning, rows, at) {
    const max = rows.flat().reduce((m, x) => Math.max(m, Math.abs(x)), 0) || 1;
    const long = rows[at].length > 8;
    const cells = rows[at].map((x, i) => {
      const cell = el("span", { title: `${symbol}[${i}] = ${x}` }, long ? "" : x.toFixed(4));
      paint(cell, signed(x / max));
      return cell;
    });
    const text = long ? rows[at].map((x) => x.toFixed(3)).join(", ") : "";
    const strip = el("div", { class: long ? "vector long" : "vector", id: `vector-${symbol}` }, ...cells);
    if (long) {
      strip.setAttribute("role", "img");
      strip.setAttribute("aria-label", `${symbol}: ${text}`);
    }
    return el("div", {}, el("h3", {}, el("b", {}, symbol), ` ${meaning}`), strip);
  }

  /** Chooses a row, and a key in it or none. */
  function choose(query, key, focus) {
    state.query = Math.min(n - 1, Math.max(0, query));
    state.key = key < 0 ? null : Math.min(m - 1, key);
    mark();
    token();
    if (focus) document.querySelector("#map [tabindex='0']").focus();
  }

  function draw() {
    // Where a weight is 1, both ranges are the same.
    const range = document.querySelector("[name=range]")?.closest("fieldset");
    if (range) range.hidden = largest(weights()) > 0.995;
    heads();
    map();
    token();
  }

  document.title = `Attention: ${scene.title}`;
  $("title").textContent = scene.title;
  $("note").textContent = scene.note;
  $("map").addEventListener("click", (event) => {
    const at = event.target.closest("[data-query]");
    if (at) choose(Number(at.dataset.query), Number(at.dataset.key), true);
  });
  $("map").addEventListener("keydown", (event) => {
    const key = state.key ?? -1;
    const to = {
      ArrowUp: [state.query - 1, key], ArrowDown: [state.query + 1, key],
      ArrowLeft: [state.query, Math.max(-1, key - 1)], ArrowRight: [state.query, key + 1],
      Home: [state.query, -1], End: [state.query, m - 1], PageUp: [0, key], PageDown: [n - 1, key],
    }[event.key];
    if (!to || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    choose(...to, true);
  });
  dark.addEventListener("change", draw);
  addEventListener("resize", map);
  controls();
  draw();
})();
