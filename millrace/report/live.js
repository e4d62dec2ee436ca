// The live page: a table of runs, and the curves of those that are chosen, kept up to date.
//
// The page asks for /api/runs once a second while it is visible, and for the new points of
// the chosen runs that have changed. Text from runs is only ever set as text.
"use strict";
(() => {
  const { html, color } = Charts;
  const POLL_MILLISECONDS = 1000, RUNNING_SECONDS = 90, FIRST_CHOSEN = 6, MOST_ADDED = 8;
  const runs = new Map();    // number -> description
  const chosen = new Map();  // number -> {color, offset, restarts, curves, seen}
  const shown = new Map();   // metric -> chart
  const drawn = new Map();   // number -> row of the table
  const sort = { key: "changed", up: false };
  let version = 0, now = 0, metrics = [], isFirst = true, isPressed = false;

  const byId = id => document.getElementById(id);
  const body = byId("runs").tBodies[0];
  const loss = run => run.metrics.train_loss ?? run.metrics.loss;
  const number = value => value == null ? "" : Charts.formatNumber(value);

  // Columns: title, value to sort by, text, class, the direction of the first click.
  const COLUMNS = [
    { key: "name", title: "run", value: run => run.name, up: true },
    { key: "status", title: "status", value: status, up: true },
    { key: "best", title: "best", value: run => run.best?.value },
    { key: "last", title: "last", value: run => run.metrics[run.best?.metric],
      text: run => number(run.metrics[run.best?.metric]) },
    { key: "loss", title: "train loss", value: loss, text: run => number(loss(run)), up: true },
    { key: "epoch", title: "epoch", value: run => run.epoch,
      text: run => run.epoch == null ? "" : String(+run.epoch.toPrecision(4)) },
    { key: "speed", title: "samples/s", value: run => run.speed,
      text: run => run.speed ? number(run.speed) : "" },
    { key: "seconds", title: "time", value: run => run.seconds,
      text: run => run.seconds ? Charts.formatDuration(run.seconds) : "" },
    { key: "changed", title: "changed", value: run => run.changed,
      text: run => run.changed ? ago(now - run.changed) : "" },
  ];

  function isRunning(run) {
    const isRecent = now - run.changed < RUNNING_SECONDS;
    return run.class === "unfinished" && (run.locked || isRecent);
  }

  function status(run) {
    return isRunning(run) ? "running" : run.status;
  }

  function ago(seconds) {
    if (seconds < 5) return "now";
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
      if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
    }
    return `${Math.floor(seconds)} s ago`;
  }

  // ---- Table ----

  function visibleRuns() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const column = COLUMNS.find(each => each.key === sort.key);
    const found = [...runs.values()].filter(run => {
      const text = `${run.name} ${run.command} ${status(run)}`.toLowerCase();
      return words.every(word => text.includes(word));
    });
    const sign = sort.up ? 1 : -1;
    return found.sort((a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      if (x == null || y == null) return (x == null) - (y == null);  // empty ones last
      const order = typeof x === "string"
        ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return sign * order || a.id - b.id;
    });
  }

  function buildHead() {
    const all = html("input", {
      type: "checkbox", id: "all", "aria-label": "Compare all shown runs",
      onchange: () => {
        for (const run of visibleRuns()) {
          if (!all.checked) chosen.delete(run.id);
          else if (!chosen.has(run.id)) choose(run.id);
        }
        changeChoice();
      },
    });
    const cells = COLUMNS.map(column => html("th", {
      class: `in-${column.key}`, scope: "col", "data-key": column.key,
    }, html("button", {
      type: "button", onclick: () => {
        sort.up = sort.key === column.key ? !sort.up : Boolean(column.up);
        sort.key = column.key;
        drawTable();
      },
    }, column.title, html("span", { class: "arrow" }))));
    byId("runs").tHead.append(html("tr", {}, html("th", {}, all), ...cells));
  }

  function drawHead(visible) {
    byId("all").checked = visible.length > 0 && visible.every(run => chosen.has(run.id));
    for (const cell of byId("runs").tHead.querySelectorAll("[data-key]")) {
      const order = sort.up ? "ascending" : "descending";
      cell.setAttribute("aria-sort", cell.dataset.key === sort.key ? order : "none");
      cell.querySelector(".arrow").textContent =
        cell.dataset.key === sort.key ? sort.up ? "▲" : "▼" : "";
    }
  }

  function drawTable() {
    const visible = visibleRuns();
    drawHead(visible);
    // Rows that stay the same are kept, so that focus and selected text are.
    const rows = visible.map(run => {
      const row = drawRow(run), before = drawn.get(run.id);
      if (before?.outerHTML === row.outerHTML) return before;
      const isFocused = before?.contains(document.activeElement);
      drawn.set(run.id, row);
      before?.replaceWith(row);
      if (isFocused) row.querySelector("input").focus();
      return row;
    });
    if (rows.length !== body.rows.length || rows.some((row, n) => row !== body.rows[n])) {
      body.replaceChildren(...rows);
    }
    for (const run of visible) {
      drawn.get(run.id).querySelector("input").checked = chosen.has(run.id);
    }
    const of = visible.length < runs.size ? ` of ${runs.size}` : "";
    byId("count").textContent = runs.size
      ? `${visible.length}${of} runs, ${chosen.size} compared` : "No runs yet.";
  }

  function drawRow(run) {
    const box = html("input", {
      type: "checkbox", "data-run": run.id, "aria-label": `Compare ${run.name}`,
      onchange: () => {
        if (!chosen.delete(run.id)) choose(run.id);
        changeChoice();
      },
    });
    const entry = chosen.get(run.id);
    const dot = html("i", {
      class: "dot", style: entry ? `background: ${color(entry.color)}` : "",
    });
    const cells = COLUMNS.slice(3).map(
      column => html("td", { class: `in-${column.key}` }, column.text(run)));
    const badge = isRunning(run) ? "running" : run.class;
    return html("tr", { "data-run": run.id },
      html("td", {}, html("label", {}, box, dot)),
      html("td", { class: "name" },
        html("a", { href: `/runs/${run.id}` }, run.name), html("small", {}, run.command)),
      html("td", { class: `status-cell ${badge}` }, status(run)),
      html("td", { class: "in-best" }, run.best ? number(run.best.value) : "",
        html("small", { title: run.best?.place ?? "" }, (run.best?.title ?? "") +
          (run.best?.epoch == null ? "" : `, epoch ${+run.best.epoch.toPrecision(4)}`) +
          (run.best?.place.startsWith("not saved") ? ", not saved" : ""))),
      ...cells);
  }

  // ---- Curves ----

  function choose(id) {
    const used = new Set([...chosen.values()].map(entry => entry.color));
    let free = 0;
    while (used.has(free)) free++;
    chosen.set(id, { color: free, offset: 0, restarts: 0, curves: new Map(), seen: -1 });
  }

  async function changeChoice() {
    drawTable();
    await readCurves();
    drawCharts();
  }

  async function ask(address) {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error(answer.statusText);
    return answer.json();
  }

  /** Read the new points of chosen runs; return whether there are any. */
  async function readCurves() {
    let isNew = false;
    for (const [id, entry] of chosen) {
      const run = runs.get(id);
      if (!run || entry.seen === run.seen) continue;
      const { offset, restarts } = entry;
      const found = await ask(`/api/curves?run=${id}&offset=${offset}&restarts=${restarts}`);
      if (found.start === 0) entry.curves.clear();
      Object.assign(entry, { offset: found.offset, restarts: found.restarts });
      entry.seen = run.seen;
      for (const curve of found.curves) append(entry.curves, curve);
      isNew = true;
    }
    return isNew;
  }

  function append(curves, added) {
    const curve = curves.get(added.name);
    if (!curve) return curves.set(added.name, added);
    for (const [axis, values] of Object.entries(added.x)) curve.x[axis].push(...values);
    curve.y.push(...added.y);
    return curves;
  }

  function seriesOf(metric) {
    // What was measured once, before any update, is in the table.
    const isCurve = curve => curve?.x.update.at(-1) > 0;
    return [...chosen]
      .filter(([id, entry]) => runs.has(id) && isCurve(entry.curves.get(metric)))
      .map(([id, entry]) => ({
        ...entry.curves.get(metric), name: runs.get(id).name, color: entry.color,
      })).sort((a, b) => a.color - b.color);
  }

  function drawCharts() {
    for (const [metric, title, isImportant] of metrics) {
      const series = seriesOf(metric), chart = shown.get(metric);
      const data = {
        title, x: "epoch", fromZero: false, linked: true, bands: [], level: null, series,
      };
      if (chart) {
        chart.figure.hidden = !series.length;
        chart.setData(data);
      } else if (series.length) {
        const figure = html("figure", {}, html("figcaption", {}, title));
        byId(isImportant ? "first" : "more").append(figure);
        shown.set(metric, Charts.add(figure, data));
      }
    }
    const more = [...byId("more").children].filter(figure => !figure.hidden).length;
    byId("more").parentElement.hidden = !more;
    byId("more").previousElementSibling.textContent = `${more} more`;
    Charts.setLegend([...chosen].filter(([id]) => runs.has(id))
      .map(([id, entry]) => ({ name: runs.get(id).name, color: entry.color })));
  }

  // ---- Polling ----

  async function poll() {
    const answer = await ask(`/api/runs?since=${version}`);
    ({ version, now } = answer);
    metrics = answer.charts;
    const all = new Set(answer.all);
    for (const id of runs.keys()) {
      if (!all.has(id)) {
        runs.delete(id);
        chosen.delete(id);
      }
    }
    // The most recent runs are compared at first, and those that start later as well.
    const added = answer.runs.filter(run => !runs.has(run.id));
    added.sort((a, b) => b.changed - a.changed);
    for (const run of answer.runs) runs.set(run.id, { ...run, seen: version });
    // Others, such as samples of a model, have no curves.
    const trained = added.filter(run => isRunning(run) || run.epoch > 0);
    for (const run of trained.slice(0, FIRST_CHOSEN)) {
      if (isFirst || chosen.size < MOST_ADDED) choose(run.id);
    }
    isFirst = false;
    if (!isPressed) drawTable();  // a row must not change between press and release
    if (await readCurves()) drawCharts();
  }

  async function follow() {
    const state = byId("state");
    for (;;) {
      try {
        if (!document.hidden) {
          await poll();
          state.textContent = "live";
          state.className = "running";
        }
      } catch (error) {
        // A server that was ended: its last figures stay, and it may come back.
        state.textContent = error instanceof TypeError
          ? "the server has ended; the figures stay as they are" : String(error);
        state.className = "failed";
      }
      await new Promise(done => setTimeout(done, POLL_MILLISECONDS));
    }
  }

  for (const kind of ["pointerdown", "pointerup", "pointercancel"]) {
    addEventListener(kind, () => { isPressed = kind === "pointerdown"; }, true);
  }
  byId("filter").addEventListener("input", drawTable);
  buildHead();
  byId("charts").append(Charts.buildToolbar(), html("div", { id: "first", class: "figures" }),
    html("details", {}, html("summary", {}), html("div", { id: "more", class: "figures" })));
  Charts.view.x = "epoch";
  Charts.redraw();
  follow();
})();
