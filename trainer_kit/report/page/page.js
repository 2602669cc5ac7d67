/* Draws the data of the page. Text of the data reaches the page as text alone: only through textContent and a canvas. */
"use strict";
(() => {
  const began = performance.now();
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const many = runs.length > 1;
  const byId = (id) => document.getElementById(id);

  /** Make an element; children are elements or text. */
  const el = (tag, attributes, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name in made && name !== "list") made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return made;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /* -- numbers as people read them --------------------------------------------------------------------------------- */
  const number = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en-US");
    return size >= 1e5 ? scaled(value, 5) : size !== 0 && size < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  };
  /** 425,900,000 as 425.9 M. */
  const scaled = (value, digits) => {
    const power = Math.min(Math.floor(Math.log10(Math.abs(value)) / 3), 4);
    if (!(Math.abs(value) < 1e15)) return value.toExponential(3).replace("e+", "e");
    return `${Number((value / 1000 ** power).toPrecision(digits))} ${["", "k", "M", "G", "T"][power]}`;
  };
  const duration = (seconds) => {
    if (seconds < 1) return `${Math.max(0, seconds).toFixed(2)} s`;
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
    if (days) return `${days} d ${hours} h`;
    return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
  };
  const moment = (seconds) => new Date(seconds * 1000).toLocaleString("sv-SE");
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value) ?? "");

  /* -- settings: kept while this tab shows the page, also when --watch loads it again ------------------------------ */
  const settings = { x: "steps", smooth: 0, log: false, marks: true, filter: "", off: [] };
  try {
    Object.assign(settings, JSON.parse(sessionStorage.getItem("report") || "{}"));
  } catch { /* a page in a file may have no storage */ }
  const keep = () => {
    try {
      sessionStorage.setItem("report", JSON.stringify(settings));
    } catch { /* as above */ }
  };
  const off = new Set(settings.off);

  /* -- arrays ------------------------------------------------------------------------------------------------------ */
  const bytes = (text) => {
    const raw = atob(text), made = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) made[i] = raw.charCodeAt(i);
    return made.buffer;
  };
  /* What a curve is drawn over: in the list, at the cursor. Samples and tokens only where all runs have counted them. */
  const KINDS = { steps: ["steps", (at) => `step ${number(at)}`], seconds: ["time", duration], samples: ["samples", (at) => `${number(at)} samples`], tokens: ["tokens", (at) => `${number(at)} tokens`] };
  const kinds = Object.keys(KINDS).filter((kind) => runs.every((run) => (run.axes || []).every((axis) => axis[kind])));
  if (!kinds.includes(settings.x)) settings.x = "steps";
  for (const run of runs) {
    for (const axis of run.axes || []) {
      axis.steps = new Float64Array(bytes(axis.steps));
      axis.seconds = new Float32Array(bytes(axis.seconds));
      axis.order = {};
      for (const kind of Object.keys(KINDS)) {
        if (typeof axis[kind] === "string") axis[kind] = new Float64Array(bytes(axis[kind]));
        if (axis[kind]) axis.order[kind] = rising(axis[kind]);
      }
    }
  }
  /** Null where the values rise already, else the order in which they do. */
  function rising(values) {
    for (let i = 1; i < values.length; i++) {
      if (values[i] < values[i - 1]) return Uint32Array.from(values.keys()).sort((a, b) => values[a] - values[b] || a - b);
    }
    return null;
  }
  const sorted = (values, order) => (order ? values.constructor.from(order, (i) => values[i]) : values);
  const xs = (axis) => ((axis.sorted ??= {})[settings.x] ??= sorted(axis[settings.x], axis.order[settings.x]));

  /** The values of a series as they are drawn: null where there is no finite number, or none that a logarithm has. */
  const ys = (series, run, log) => {
    series.numbers ??= new Float32Array(bytes(series.values));
    const values = sorted(series.numbers, run.axes[series.axis].order[settings.x]);
    const lowest = log ? Number.MIN_VALUE : -Infinity;
    if (!series.bad && !log) return values;
    return Array.from(values, (value) => (Number.isFinite(value) && value >= lowest ? value : null));
  };
  /** An exponential mean whose weight counts from the first value on, so that it does not begin at zero. */
  const smoothed = (values, weight) => {
    let sum = 0, total = 0;
    return Array.from(values, (value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  };

  /* -- which curves share a chart ---------------------------------------------------------------------------------- */
  const SPLIT = /^(train|training|val|valid|validation|test)[_/]/i;
  const GROUPS = [
    ["Learning rate and gradients", /^lr\b|^lr[-_/]|learning.?rate|grad|momentum|weight.?decay|loss.?scale|update.?norm/i],
    ["Progress, throughput and time", /^epoch$|per.?sec|throughput|steps per second|[_/]s$|(^|[_/])time|seconds|mfu|goodput|duration|tokens|samples/i],
    ["Memory and devices", /memory|(^|[_/ .])mem|vram|(^|[_/ .])(cpu|gpu|cuda|ram|rss)([_/ .]|$)|utili[sz]ation|temperature|power/i],
  ];
  /** The name of a chart: `loss` for train_loss_step and val_loss; one chart for all parts of the time. */
  const keyOf = (name) => (/(^|[_/])time\/[a-z]+$/.test(name) ? "time: the share of each part" : name.replace(SPLIT, "").replace(/_(step|epoch)$/i, ""));
  const groupOf = (name) => (GROUPS.find(([, pattern]) => pattern.test(name)) || ["Metrics"])[0];
  const charts = new Map();
  runs.forEach((run, at) => {
    for (const series of run.series || []) {
      // Of one run, training and validation stand in one chart; of several, each metric has its own.
      const key = (!many && keyOf(series.name)) || series.name;
      if (!charts.has(key)) charts.set(key, { key, group: groupOf(key), curves: [] });
      charts.get(key).curves.push({ run, at, series });
    }
  });
  const rank = (chart) => (/loss/i.test(chart.key) ? 0 : /acc|f1|auc|bleu|perplexity/i.test(chart.key) ? 1 : 2);
  const ordered = [...charts.values()].sort((a, b) => rank(a) - rank(b));

  /* -- charts ------------------------------------------------------------------------------------------------------ */
  const MARKS = { restart: ["--warn", [6, 4]], exception: ["--bad", []], hang: ["--bad", []], killed: ["--bad", []], warning: ["--warn", null], checkpoint: ["--good", null] };
  const SIGNS = { restart: "┆", exception: "│", hang: "│", killed: "│", warning: "▼", checkpoint: "▲" };
  const sync = uPlot.sync("report");
  let zooming = false;
  const drawn = new Set();

  const color = (chart, curve) => `--s${(many ? curve.at : chart.curves.indexOf(curve)) % 8}`;
  const label = (curve) => (many ? curve.run.name : curve.series.name);

  const drawMarks = (plot) => {
    if (!settings.marks) return;
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 8 * ratio, bbox.width, bbox.height + 8 * ratio);
    ctx.clip();
    for (const [at, run] of runs.entries()) {
      if (off.has(run.name)) continue;
      for (const mark of run.marks || []) {
        if (!MARKS[mark.kind]) continue;
        const [name, pattern] = MARKS[mark.kind];
        const x = Math.round(plot.valToPos({ ...mark, steps: mark.step, seconds: mark.time }[settings.x], "x", true));
        ctx.strokeStyle = ctx.fillStyle = css(many ? `--s${at % 8}` : name);
        ctx.beginPath();
        if (pattern) {
          ctx.lineWidth = ratio;
          ctx.setLineDash(pattern.map((length) => length * ratio));
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        } else {
          const size = 4 * ratio, low = mark.kind === "checkpoint";
          const y = low ? bbox.top + bbox.height : bbox.top;
          ctx.moveTo(x - size, y);
          ctx.lineTo(x + size, y);
          ctx.lineTo(x, y + (low ? -1.6 : 1.6) * size);
          ctx.fill();
        }
      }
    }
    ctx.restore();
  };

  /** The nearest value of a series that has none at the cursor's place, because another run logged there. */
  const nearest = (plot, at, index, x) => {
    const values = plot.data[at], places = plot.data[0];
    if (at === 0 || values[index] !== undefined) return index;
    let left = index, right = index;
    while (left >= 0 && values[left] === undefined) left--;
    while (right < places.length && values[right] === undefined) right++;
    if (left < 0) return right < places.length ? right : null;
    return right >= places.length || x - places[left] <= places[right] - x ? left : right;
  };

  const tables = (chart, curves, log) =>
    curves.flatMap((curve) => {
      const values = ys(curve.series, curve.run, log), x = xs(curve.run.axes[curve.series.axis]);
      return settings.smooth && values.length > 2 ? [[x, values], [x, smoothed(values, settings.smooth)]] : [[x, values]];
    });

  function draw(chart) {
    const past = chart.plot && !chart.stale ? [chart.plot.scales.x.min, chart.plot.scales.x.max] : null;
    chart.plot?.destroy();
    const visible = chart.curves.filter((curve) => !off.has(curve.run.name));
    const positive = visible.some((curve) => curve.series.high > 0);
    const log = settings.log && positive;
    const parts = tables(chart, visible, log);
    const shared = parts.every((part) => part[0] === parts[0][0]);
    const values = !parts.length ? [[]] : shared ? [parts[0][0], ...parts.map((part) => part[1])] : uPlot.join(parts);
    const series = [{}];
    chart.places = new Map(); // not in the series: uPlot copies what stands there
    for (const curve of visible) {
      const smooth = settings.smooth && curve.series.count > 2, few = curve.series.count < 60;
      const line = { stroke: () => css(color(chart, curve)), show: !chart.hidden?.has(label(curve)) };
      const points = { show: few, size: curve.series.count < 15 ? 5 : 3.5, fill: line.stroke };
      if (smooth) series.push({ ...line, width: 1, alpha: 0.3, points: { show: false } });
      chart.places.set(curve, series.length);
      series.push({ ...line, width: 1.6, points: smooth ? { show: false } : points });
    }
    const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { stroke: () => css("--grid"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
    const short = (value) => (value === null ? "" : Math.abs(value) >= 1e5 ? scaled(value, 6) : value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential() : String(Number(value.toPrecision(6))));
    const time = settings.x === "seconds";
    const options = {
      width: chart.box.clientWidth, height: chart.box.clientHeight, legend: { show: false }, series, padding: [8, 16, 0, 0],
      cursor: {
        sync: { key: sync.key, scales: ["x", null] }, dataIdx: nearest, drag: { x: true, y: false },
        y: false, points: { size: 7, width: 2, stroke: (plot, at) => series[at].stroke(), fill: () => css("--card") },
      },
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
      axes: [
        { ...axis, size: 26, values: (plot, splits) => splits.map((value) => (value === null ? "" : time ? duration(value).replace(/\.0+ s/, " s").replace(/(\D) 0 (s|min|h)$/, "$1") : short(value))), space: time ? 80 : 50 },
        { ...axis, size: 54, values: (plot, splits) => splits.map(short) },
      ],
      hooks: {
        draw: [drawMarks],
        setCursor: [(plot) => tell(chart, plot)],
        setScale: [(plot, key) => {
          if (key !== "x" || zooming || !chart.ready) return;
          zooming = true;
          const { min, max } = plot.scales.x;
          for (const other of drawn) if (other !== chart) other.plot.setScale("x", { min, max });
          zooming = false;
        }],
      },
    };
    chart.ready = false;
    chart.plot = new uPlot(options, values, chart.box);
    if (past && past[0] !== null && view) chart.plot.setScale("x", { min: past[0], max: past[1] });
    chart.ready = true;
    chart.stale = false;
    drawn.add(chart);
    tell(chart, chart.plot);
  }
  let view = false;

  /** The legend of a chart: at the cursor, or the last values. */
  function tell(chart, plot) {
    const index = plot.cursor.idx;
    const at = index === null || index === undefined ? null : plot.data[0][index];
    chart.where.textContent = at === null ? "" : KINDS[settings.x][1](at);
    for (const [curve, value] of chart.values) {
      const i = chart.places.get(curve), place = plot.cursor.idxs?.[i];
      const known = at !== null && place !== null && place !== undefined;
      value.textContent = number(known ? plot.data[i][place] : curve.series.last);
    }
  }

  function build(chart) {
    chart.box = el("div", { className: "plot" });
    chart.where = el("span", {});
    chart.values = new Map();
    chart.hidden = new Set();
    const legend = el("div", { className: "legend" });
    for (const curve of chart.curves) {
      const value = el("b", {}, number(curve.series.last)), swatch = el("span", { className: "swatch", style: `color: var(${color(chart, curve)})` });
      chart.values.set(curve, value);
      const facts = `lowest ${number(curve.series.low)} at step ${number(curve.series.lowStep)}, highest ${number(curve.series.high)} at step ${number(curve.series.highStep)}, ${number(curve.series.count)} values`;
      const bad = curve.series.bad ? el("span", { className: "bad" }, `${number(curve.series.bad)} not finite, first at step ${number(curve.series.firstBad)}`) : null;
      legend.append(el("button", {
        type: "button", title: facts,
        onclick: (event) => {
          const name = label(curve), hide = !chart.hidden.has(name);
          chart.hidden[hide ? "add" : "delete"](name);
          event.currentTarget.classList.toggle("off", hide);
          draw(chart);
        },
      }, swatch, label(curve), value, bad));
    }
    chart.card = el("section", { className: "chart" }, el("h3", {}, chart.key, chart.where), chart.box, legend);
    chart.box.addEventListener("dblclick", reset);
    return chart.card;
  }
  function reset() {
    view = false;
    zooming = true;
    for (const chart of drawn) {
      const x = chart.plot.data[0];
      if (x.length) chart.plot.setScale("x", { min: x[0], max: x[x.length - 1] });
    }
    zooming = false;
  }
  const place = byId("charts");
  for (const group of ["Metrics", ...GROUPS.map(([name]) => name)]) {
    const here = ordered.filter((chart) => chart.group === group);
    if (!here.length) continue;
    const title = el("h2", {}, group), grid = el("div", { className: "grid" }, ...here.map(build));
    place.append(title, grid);
    for (const chart of here) chart.parts = { title, grid };
  }
  // Only charts on the screen are drawn: a run may have hundreds.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = entry.target.chart;
      chart.visible = entry.isIntersecting;
      if (chart.visible && (!chart.plot || chart.stale)) draw(chart);
    }
    document.documentElement.dataset.drawn ||= String(Math.round(performance.now() - began));
  }, { rootMargin: "200px" });
  const sized = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const { plot, box } = entry.target.chart;
      if (plot && box.clientWidth && plot.width !== box.clientWidth) plot.setSize({ width: box.clientWidth, height: box.clientHeight });
    }
  });
  for (const chart of ordered) {
    chart.box.chart = chart;
    seen.observe(chart.box);
    sized.observe(chart.box);
  }
  addEventListener("beforeprint", () => { for (const chart of ordered) if (!chart.plot || chart.stale) draw(chart); });
  place.addEventListener("mousedown", () => { view = true; });
  const again = () => {
    keep();
    for (const chart of ordered) {
      if (chart.visible) draw(chart);
      else chart.stale = true;
    }
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((chart) => chart.plot.redraw(false)));

  /* -- toolbar ----------------------------------------------------------------------------------------------------- */
  const narrow = () => {
    const words = settings.filter.toLowerCase();
    for (const chart of ordered) chart.card.hidden = !chart.curves.some((curve) => curve.series.name.toLowerCase().includes(words));
    for (const chart of ordered) {
      const { title, grid } = chart.parts;
      title.hidden = grid.hidden = [...grid.children].every((card) => card.hidden);
    }
  };
  if (ordered.length) {
    const output = el("output", {}, settings.smooth.toFixed(2));
    const smooth = el("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: settings.smooth, id: "smooth",
      oninput: (event) => { settings.smooth = Number(event.target.value); output.textContent = settings.smooth.toFixed(2); again(); },
    });
    const axis = el("select", { id: "axis", ariaLabel: "horizontal axis", onchange: (event) => { settings.x = event.target.value; view = false; for (const chart of ordered) chart.stale = true; again(); } },
      ...kinds.map((kind) => el("option", { value: kind }, KINDS[kind][0])));
    axis.value = settings.x;
    const box = (name, text, title) => el("label", { title }, el("input", { type: "checkbox", id: name, checked: settings[name], onchange: (event) => { settings[name] = event.target.checked; again(); } }), text);
    const filter = el("input", { type: "search", placeholder: "filter curves", value: settings.filter, ariaLabel: "filter curves", oninput: (event) => { settings.filter = event.target.value; keep(); narrow(); } });
    const present = Object.keys(MARKS).filter((kind) => runs.some((run) => (run.marks || []).some((mark) => mark.kind === kind)));
    const signs = el("span", { className: "signs" }, ...present.map((kind) => el("span", many ? {} : { style: `color: var(${MARKS[kind][0]})` }, `${SIGNS[kind]} ${kind}`)));
    byId("tools").append(
      el("label", {}, "x", axis), el("label", {}, "smooth", smooth, output), box("log", "log scale", "a logarithmic vertical axis"),
      box("marks", "marks", "restarts, checkpoints, warnings and the exception in the curves"), signs, filter,
      el("button", { type: "button", onclick: reset, title: "drag over a chart to zoom; a double click shows everything again" }, "reset zoom"),
    );
    narrow();
  }

  /* -- head and sections ------------------------------------------------------------------------------------------- */
  const fact = (name, value) => el("div", {}, el("span", {}, `${name} `), el("b", {}, value));
  const badge = (run) => (run.status ? el("span", { className: `badge ${["finished", "failed", "hung", "killed", "running", "interrupted", "exited"].includes(run.status) ? run.status : ""}` }, run.status) : null);
  const head = byId("head");
  const one = runs[0];
  if (one && !many) {
    head.append(el("h1", {}, one.title), badge(one), el("div", { className: "facts" },
      fact("run", one.name), fact("steps", number(one.step)), fact("time", duration(one.seconds)), fact("began", moment(one.begun)),
      fact("restarts", String((one.marks || []).filter((mark) => mark.kind === "restart").length))));
  } else {
    head.append(el("h1", {}, many ? `${runs.length} runs` : "no run"), el("p", {}));
    const boxes = runs.map((run, at) => el("label", {},
      el("input", { type: "checkbox", checked: !off.has(run.name), onchange: (event) => { off[event.target.checked ? "delete" : "add"](run.name); settings.off = [...off]; again(); } }),
      el("span", { className: "swatch", style: `color: var(--s${at % 8})` }), run.name));
    head.append(el("div", { className: "runs" }, ...boxes));
  }
  const stacks = (run, found) => (found.stacks ? el("p", {}, "stacks of all ranks: ", el("a", { href: encodeURI(`${run.home || "."}/${found.stacks}/`) }, found.stacks)) : null);
  const trace = (found) => (found.text ? el("details", {}, el("summary", { className: "soft" }, found.stacks ? "details" : "traceback"), el("pre", {}, found.text)) : null);
  const failure = (run, found) => el("div", { className: "failure" }, el("b", {}, `${many ? `${run.name}: ` : ""}${found.headline || ""}`), ` at step ${number(found.step)}`, stacks(run, found), trace(found));
  const ended = (run) => (["failed", "hung", "killed"].includes(run.status) ? run.exceptions?.at(-1) : undefined);
  for (const run of runs) if (ended(run)) head.append(failure(run, ended(run)));

  const sections = byId("sections");
  const panel = (title, open, ...content) => sections.append(el("details", { className: "panel", open }, el("summary", {}, title), el("div", {}, ...content)));
  const table = (titles, rows) => el("div", { className: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...titles.map((title, i) => el("th", { className: rows[0] && rows[0][i] instanceof Num ? "number" : "" }, title)))),
    el("tbody", {}, ...rows.map((row) => el("tr", { className: row.className || "" }, ...row.map((cell) => el("td", { className: cell instanceof Num ? "number" : cell instanceof Kind ? "kind" : "" }, cell instanceof Num || cell instanceof Kind ? cell.node : cell instanceof Node ? cell : String(cell))))))));
  class Num { constructor(value) { this.node = typeof value === "number" || value === null || value === undefined ? number(value) : String(value); } }
  class Kind { constructor(name, tint) { this.node = el("span", { style: `color: var(${tint})` }, name); } }

  const configured = (run) => new Map((run.configuration || []).map(([section, name, value, origin]) => [`${section}\u0000${name}`, [section, name, shown(value), origin]]));
  const all = runs.map(configured);
  const keys = [...new Set(all.flatMap((one) => [...one.keys()]))];
  const differing = keys.filter((key) => new Set(all.map((one) => one.get(key)?.[2])).size > 1);
  if (many) {
    const names = [...new Set(runs.flatMap((run) => (run.series || []).map((series) => series.name)))].filter((name) => name !== "epoch");
    panel("Runs", true, table(["run", "status", "steps", "time", "began", ...names.map((name) => `${name} (last)`)],
      runs.map((run) => [run.name, run.status, new Num(run.step), new Num(duration(run.seconds)), moment(run.begun),
        ...names.map((name) => new Num((run.series || []).find((series) => series.name === name)?.last))])));
  }
  const values = runs.flatMap((run) => (run.series || []).map((series) => [
    ...(many ? [run.name] : []), series.name, new Num(series.last), new Num(series.low), new Num(series.lowStep), new Num(series.high), new Num(series.highStep), new Num(series.count)]));
  if (values.length) panel("Values", !many, table([...(many ? ["run"] : []), "metric", "last", "lowest", "at step", "highest", "at step", "values"], values));

  for (const run of runs) {
    if (run.goodput?.length) panel(many ? `Time of ${run.name}` : "Time", !many, table(["part", "time", "share"],
      run.goodput.map(([part, seconds, share]) => [part, new Num(duration(seconds)), new Num(`${(100 * share).toFixed(1)} %`)])));
  }

  const TINT = { restart: "--warn", warning: "--warn", exception: "--bad", hang: "--bad", killed: "--bad", checkpoint: "--good", start: "--accent", end: "--accent" };
  const events = runs.flatMap((run) => (run.marks || []).map((mark) => [
    ...(many ? [run.name] : []), new Kind(mark.kind, TINT[mark.kind] || "--soft"), new Num(mark.step), new Num(duration(mark.time)), mark.text]));
  if (events.length) panel(`Events (${events.length})`, !many && events.length < 40, table([...(many ? ["run"] : []), "event", "step", "after", "what"], events));

  const earlier = runs.flatMap((run) => (run.exceptions || []).filter((found) => found !== ended(run)).map((found) => failure(run, found)));
  if (earlier.length) panel(`Exceptions before a restart (${earlier.length})`, false, ...earlier);

  if (keys.length) {
    const rows = keys.map((key) => {
      const found = all.map((one) => one.get(key)), known = found.find(Boolean);
      const row = many ? [known[0], known[1], ...found.map((each) => each?.[2] ?? "–")] : known;
      row.className = differing.includes(key) ? "differs" : known[3] === "default" ? "default" : "";
      return row;
    });
    const given = rows.filter((row) => row.className !== "default"), rest = rows.filter((row) => row.className === "default");
    const titles = ["of", "name", ...(many ? runs.map((run) => run.name) : ["value", "origin"])];
    const parts = [];
    if (many && differing.length) parts.push(el("p", { className: "soft" }, `bold: ${differing.length} values that differ`));
    if (given.length) parts.push(table(titles, given));
    if (rest.length) parts.push(el("details", {}, el("summary", { className: "soft" }, `${rest.length} defaults`), table(titles, rest)));
    panel("Configuration", !many, ...parts);
  }
  if (one && !many) {
    if (one.explain) panel("What runs (explain)", false, el("pre", {}, one.explain));
    if (one.environment?.length) panel("Environment", false, table(["name", "value"], one.environment.map(([name, value]) => [name, shown(value)])));
  }
  byId("foot").append(
    `written ${moment(data.written)}`, runs.some((run) => run.status === "running") ? "; a run that has not ended is as of then" : "",
    data.refresh ? `; loaded again every ${data.refresh} s` : "", ...runs.map((run) => el("div", {}, run.path || "")));
  if (!ordered.length) {
    place.append(el("p", { className: "soft" }, "No values are logged yet."));
    document.documentElement.dataset.drawn = "0";
  }
})();
