// Interactive charts: crosshair with values, zoom, smoothing, log scale, hiding of curves.
//
// A figure with a chart contains a static SVG and, in <script class="chart-data">, its data:
//   {title, x, fromZero, linked, bands: [[start, end, name]], level: [name, y] | null,
//    series: [{name, color, x: {epoch: [...], update: [...], seconds: [...]}, y: [...]}]}
// All text reaches the page as text nodes or attributes, never as HTML. Colors are the CSS
// variables of the page, so that light and dark need nothing here.
"use strict";
const Charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const AXES = ["epoch", "update", "seconds"];
  const AXIS_TITLES = { epoch: "Epoch", update: "Update", seconds: "Time" };
  const LOG_RATIO = 100, TOP = 10, RIGHT = 14, BOTTOM = 38, LINE_HEIGHT = 15;
  const numColors = +getComputedStyle(document.documentElement)
    .getPropertyValue("--num-colors") || 8;

  // What all charts of a page share.
  const view = { x: "", smoothing: 0, zoom: {}, hidden: new Set(), cursor: null };
  const charts = [];
  const toolbar = { element: null, reset: null, legend: null, axes: null };

  // ---- Elements ----

  function html(tag, attributes = {}, ...children) {
    return fill(document.createElement(tag), attributes, children);
  }

  function svg(tag, attributes = {}, ...children) {
    return fill(document.createElementNS(SVG, tag), attributes, children);
  }

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  const color = number => `var(--c${number % numColors})`;
  const dashes = number => Math.floor(number / numColors) % 2 ? "5 3" : null;

  // ---- Numbers: the same results as millrace/numbers.py ----

  /** Format like "%.{digits}g" in Python. */
  function general(value, digits) {
    if (!Number.isFinite(value)) return String(value);
    if (value === 0) return "0";
    const [mantissa, power] = value.toExponential(digits - 1).split("e");
    const exponent = Number(power);
    const trim = text => text.includes(".") ? text.replace(/\.?0+$/, "") : text;
    if (exponent < -4 || exponent >= digits) {
      const size = String(Math.abs(exponent)).padStart(2, "0");
      return `${trim(mantissa)}e${exponent < 0 ? "-" : "+"}${size}`;
    }
    return trim(value.toFixed(Math.max(0, digits - 1 - exponent)));
  }

  function formatNumber(value) {
    const size = Math.abs(value);
    if (size >= 1e3 && size < 1e9) return Math.round(value).toLocaleString("en-US");
    return general(value, 4);
  }

  function formatTick(value) {
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-3)) return general(value, 3);
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
      if (size >= unit) return general(value / unit, 6) + letter;
    }
    return size >= 1e4 ? `${general(value / 1e3, 6)}k` : general(value, 6);
  }

  function formatTicks(values) {
    const inThousands = values.some(value => Math.abs(value) >= 1e4 && Math.abs(value) < 1e6);
    return values.map(value => {
      const size = Math.abs(value);
      const isSmall = inThousands && size >= 1e3 && size < 1e4;
      return isSmall ? `${general(value / 1e3, 6)}k` : formatTick(value);
    });
  }

  function formatDuration(seconds) {
    if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
    if (seconds < 100) return `${seconds.toFixed(1)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 100) return `${(seconds / 60).toFixed(1)} minutes`;
    return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  }

  function formatPosition(axis, value) {
    if (axis === "seconds") return formatDuration(value);
    return `${axis} ${axis === "update" ? formatNumber(value) : general(value, 4)}`;
  }

  function linearTicks(low, high, atMost = 5) {
    if (!(high > low)) return [low];
    const rough = (high - low) / Math.max(1, atMost - 1);
    const size = 10 ** Math.floor(Math.log10(rough));
    const factor = [1, 2, 2.5, 5, 10].find(f => size * f >= rough * (1 - 1e-9));
    const step = size * factor, ticks = [];
    const last = Math.floor(high / step + 1e-9);
    for (let n = Math.ceil(low / step - 1e-9); n <= last; n++) ticks.push(n * step);
    return ticks;
  }

  function logTicks(low, high) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const step = Math.max(1, Math.ceil((last - first) / 5));
    const factors = last - first <= 2 ? [1, 2, 5] : [1], ticks = [];
    for (let power = first; power <= last; power += step) {
      for (const factor of factors) ticks.push(factor * 10 ** power);
    }
    return ticks.filter(tick => tick >= low * 0.999 && tick <= high * 1.001);
  }

  // ---- Curves ----

  /** Average exponentially, as TensorBoard does: the start is not biased toward 0. */
  function smooth(values, weight) {
    let sum = 0, scale = 0;
    return values.map(value => {
      sum = weight * sum + (1 - weight) * value;
      scale = weight * scale + (1 - weight);
      return sum / scale;
    });
  }

  /** Return the indices of the lowest and highest value of each part, and of the last. */
  function selectPoints(values, most) {
    if (values.length <= most) return values.map((_, n) => n);
    const size = Math.ceil(2 * values.length / most), kept = [];
    for (let start = 0; start < values.length; start += size) {
      let low = start, high = start;
      for (let n = start; n < Math.min(start + size, values.length); n++) {
        if (values[n] < values[low]) low = n;
        if (values[n] > values[high]) high = n;
      }
      kept.push(Math.min(low, high));
      if (low !== high) kept.push(Math.max(low, high));
    }
    if (kept.at(-1) !== values.length - 1) kept.push(values.length - 1);
    return kept;
  }

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
  }

  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return low <= high ? [low, high] : null;
  }

  /** Leave out a steep start that would flatten the rest: see select_heights in Python. */
  function selectHeights(points) {
    const heights = points.map(p => p[1]), range = extent(points.map(p => p[0]));
    if (!range) return heights;
    const settled = range[0] + 0.05 * (range[1] - range[0]);
    const later = points.filter(p => p[0] >= settled).map(p => p[1]);
    const [low, high] = extent(heights), isLog = low > 0 && high / low >= LOG_RATIO;
    const spread = ([a, b]) => isLog ? Math.log(b / a) : b - a;
    if (later.length < 20 || !(spread(extent(later)) > 0)) return heights;
    return spread([low, high]) > 12 * spread(extent(later)) ? later : heights;
  }

  // ---- One chart ----

  class Chart {
    constructor(figure, data) {
      this.figure = figure;
      this.hidden = data.linked ? view.hidden : new Set();
      this.log = null;  // null: logarithmic if the values differ by much
      this.id = `clip${charts.length}`;
      this.logButton = html("button", {
        type: "button", class: "tool", title: "Logarithmic y axis",
        onclick: () => { this.log = !this.isLog; this.draw(); },
      }, "log");
      this.wideButton = html("button", {
        type: "button", class: "tool", title: "Full width", "aria-label": "Full width",
        "aria-pressed": "false", onclick: () => this.widen(),
      }, "⤢");
      this.caption = figure.querySelector("figcaption");
      this.caption?.append(
        html("span", { class: "tools" }, this.logButton, this.wideButton));
      this.tip = html("div", { class: "tip", role: "status" });
      this.plot = html("div", {
        class: "plot", tabindex: "0", role: "application", "aria-label":
          `${data.title}: arrow keys read values, + and - zoom, Escape resets`,
      });
      this.legend = html("div", { class: "legend" });
      figure.querySelector("svg.chart")?.remove();
      figure.append(this.legend, this.plot);
      figure.classList.add("interactive");
      this.listen();
      this.setData(data);
      new ResizeObserver(() => this.draw()).observe(this.plot);
    }

    setData(data) {
      this.data = data;
      this.drawLegend();
      this.draw();
    }

    widen() {
      const isWide = this.figure.classList.toggle("wide");
      this.wideButton.setAttribute("aria-pressed", isWide);
    }

    get axis() {
      const isKnown = this.data.series.some(curve => curve.x[view.x]?.length);
      return isKnown ? view.x : this.data.x;
    }

    /** The visible curves that have values on the axis. */
    get shown() {
      const axis = this.axis;
      return this.data.series
        .filter(curve => !this.hidden.has(curve.name) && curve.x[axis]?.length);
    }

    /** The first and last x of every curve. */
    get ends() {
      const axis = this.axis;
      return this.shown.flatMap(({ x }) => [x[axis][0], x[axis].at(-1)]);
    }

    /** Whether both have the same range of x, so that they can be read together. */
    isAlignedWith(other) {
      return this.axis === other.axis && this.data.bands.length === 0;
    }

    visible() {
      const axis = this.axis;
      return this.shown
        .map(curve => {
          const ys = view.smoothing ? smooth(curve.y, view.smoothing) : curve.y;
          return { ...curve, xs: curve.x[axis], ys, raw: curve.y };
        });
    }

    drawLegend() {
      if (this.data.linked || this.data.series.length < 2) return;
      this.legend.replaceChildren(...legendButtons(this.data.series, this.hidden, () => {
        this.drawLegend();
        redraw();
      }));
    }

    /** Choose the ranges of both axes. */
    scale(curves, width, height) {
      const { data, axis } = this, zoom = view.zoom[axis];
      const bands = axis === data.x ? data.bands : [];
      const all = bands.length ? [...this.ends, ...bands.flatMap(b => b.slice(0, 2))]
        : charts.filter(chart => chart.isAlignedWith(this)).flatMap(chart => chart.ends);
      const [x0, x1] = zoom ?? extent(all.length ? all : this.ends) ?? [0, 1];
      const points = [];
      for (const { xs, ys, raw } of curves) {
        for (let n = 0; n < xs.length; n++) {
          if (xs[n] >= x0 && xs[n] <= x1) points.push([xs[n], ys[n]], [xs[n], raw[n]]);
        }
      }
      const isWhole = !zoom && !data.fromZero;
      let heights = isWhole ? selectHeights(points) : points.map(p => p[1]);
      this.isCut = heights.length < points.length;
      const highest = list => list.reduce((a, b) => Math.max(a, b), -Infinity);
      this.isCutBelow = highest(points.map(p => p[1])) <= highest(heights);
      if (data.level && curves.length) heights.push(data.level[1]);
      if (data.fromZero) heights.push(0);
      let [low, high] = extent(heights) ?? [0, 1];
      const positive = heights.filter(y => y > 0);
      const canLog = positive.length > 0;
      this.isLog = canLog && (this.log ?? (low > 0 && high / low >= LOG_RATIO));
      this.logButton.disabled = !canLog;
      this.logButton.setAttribute("aria-pressed", this.isLog);
      let ticks, place;
      if (this.isLog) {
        const [a, b] = extent(positive).map(Math.log10);
        const room = Math.max(0.06, 0.04 * (b - a));
        low = a - room, high = b + room;
        ticks = logTicks(10 ** low, 10 ** high);
        if (ticks.length < 2) ticks = linearTicks(10 ** low, 10 ** high, 4);
        place = y => y > 0 ? Math.log10(y) : -Infinity;
      } else {
        const room = 0.06 * (high - low) || Math.abs(low) * 0.1 || 1;
        // The name of the level is above its line.
        low = low === 0 && high > 0 ? 0 : low - room, high += (data.level ? 2 : 1) * room;
        ticks = linearTicks(low, high, Math.max(3, Math.round(height / 50)));
        if (points.length && ticks.length > 9) ticks = linearTicks(low, high, 5);
        place = y => y;
      }
      const labels = formatTicks(ticks);
      const left = Math.max(34, 12 + 7 * Math.max(...labels.map(text => text.length)));
      const span = x1 > x0 ? x1 - x0 : 1, bottom = height - BOTTOM;
      this.box = { left, right: width - RIGHT, top: TOP, bottom, x0, x1, span };
      const box = this.box;
      return {
        yTicks: ticks.map((tick, n) => [tick, labels[n]]),
        x: x => box.left + (x1 > x0 ? (x - x0) / span : 0.5) * (box.right - box.left),
        y: y => {
          const share = (place(y) - low) / (high - low);
          return Math.max(-1e4, Math.min(1e4, bottom - share * (bottom - TOP)));
        },
      };
    }

    draw() {
      const width = this.plot.clientWidth;
      if (!width) return;  // folded away
      const height = Math.round(Math.max(210, Math.min(340, 0.56 * width)));
      const curves = this.visible(), scale = this.scale(curves, width, height);
      const box = this.box, clip = `url(#${this.id})`;
      const size = { width: box.right - box.left + 4, height: box.bottom - box.top + 4 };
      const shapes = svg("g", { "clip-path": clip }, ...this.drawBands(scale));
      for (const curve of curves) shapes.append(...this.drawCurve(curve, scale));
      this.cursor = svg("g", { class: "cursor" });
      const drawing = svg("svg", {
        class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
        "aria-label": this.data.title,
      },
      svg("defs", {}, svg("clipPath", { id: this.id },
        svg("rect", { x: box.left - 2, y: box.top - 2, ...size }))),
      ...this.drawAxes(scale, height), shapes, this.cursor);
      if (this.isCut) {
        // Where the curves are not: those that have risen are at the top.
        const y = this.isCutBelow ? box.bottom - 8 : box.top + 6;
        drawing.append(text(box.right, y, "steep start cut off", "end"));
      }
      this.curves = curves;
      this.toScreen = scale;
      this.plot.replaceChildren(drawing, this.tip);
      this.drawCursor();
    }

    drawAxes(scale, height) {
      const { left, right, bottom, x0, x1 } = this.box, shapes = [];
      for (const [tick, label] of scale.yTicks) {
        const y = scale.y(tick);
        if (y < TOP - 4 || y > bottom + 1) continue;
        shapes.push(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
        shapes.push(text(left - 6, y, label, "end", "y-tick"));
      }
      let name = this.axis, unit = 1;
      if (name === "seconds" && x1 > 7200) [name, unit] = ["hours", 3600];
      else if (name === "seconds" && x1 > 300) [name, unit] = ["minutes", 60];
      const most = Math.max(3, Math.floor((right - left) / 50));
      const ticks = x1 > x0 ? linearTicks(x0 / unit, x1 / unit, most) : [x0 / unit];
      const labels = formatTicks(ticks.map(tick => +tick.toPrecision(12)));
      for (const [n, tick] of ticks.entries()) {
        const x = scale.x(tick * unit), label = labels[n];
        shapes.push(svg("line",
          { class: "grid", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
        const isLast = x > right - 3.5 * label.length;
        shapes.push(text(isLast ? right + RIGHT - 2 : x, bottom + LINE_HEIGHT, label,
          isLast ? "end" : "middle", "x-tick"));
      }
      shapes.push(text((left + right) / 2, height - 7, name, "middle", "x-name"));
      return shapes;
    }

    drawBands(scale) {
      const { data, box } = this, shapes = [], named = new Set();
      // The name of the level is on the right.
      const free = box.right - (data.level ? 7 * data.level[0].length : 0);
      if (this.axis === data.x) {
        for (const [start, end, name] of data.bands) {
          const x = scale.x(start), width = Math.max(1, scale.x(end) - x);
          shapes.push(svg("rect", {
            class: "band", x, y: box.top, width, height: box.bottom - box.top,
          }, svg("title", {}, `${name}: ${formatDuration(end - start)}`)));
          const half = 3.5 * name.length, middle = x + width / 2;
          if (width > 2 * half && middle + half < free && !named.has(name)) {
            shapes.push(text(middle, box.top + 9, name, "middle"));
            named.add(name);
          }
        }
      }
      if (data.level) {
        const y = scale.y(data.level[1]);
        shapes.push(svg("line", {
          class: "level", x1: box.left, x2: box.right, y1: y, y2: y,
        }), text(box.right - 2, y - 9, data.level[0], "end"));
      }
      return shapes;
    }

    drawCurve(curve, scale) {
      const { xs } = curve, { left, right, top, bottom, x0, x1 } = this.box;
      let first = 0, last = xs.length - 1;
      while (first < last && xs[first + 1] < x0) first++;
      while (last > first && xs[last - 1] > x1) last--;
      const clamp = y => Math.max(top, Math.min(bottom, y));
      const path = values => {
        const part = values.slice(first, last + 1);
        const steps = selectPoints(part, 2 * (right - left)).map(n => {
          const y = scale.y(part[n]);
          return `${scale.x(xs[first + n]).toFixed(1)} ${
            (this.isCut || this.isLog ? clamp(y) : y).toFixed(1)}`;
        });
        return `M${steps.join("L")}`;
      };
      const style = {
        class: "curve", stroke: color(curve.color),
        "stroke-dasharray": dashes(curve.color), "data-name": curve.name,
      };
      const shapes = [svg("path", { ...style, d: path(curve.ys) })];
      if (view.smoothing) {
        shapes.unshift(svg("path", { ...style, class: "raw", d: path(curve.raw) }));
      }
      if (last - first < 40 && !this.data.fromZero) {
        for (let n = first; n <= last; n++) {
          shapes.push(svg("circle", {
            cx: scale.x(xs[n]), cy: clamp(scale.y(curve.ys[n])), r: 2.4,
            fill: color(curve.color),
          }));
        }
      }
      return shapes;
    }

    // ---- Crosshair ----

    drawCursor() {
      const { cursor, box } = this;
      if (!cursor) return;
      cursor.replaceChildren();
      const x = view.cursor?.x;
      const isShown = view.cursor?.axis === this.axis && this.curves.length > 0 &&
        x >= box.x0 && x <= box.x1;
      this.tip.classList.toggle("shown", isShown);
      if (!isShown) return;
      const place = this.toScreen.x(x), { top, bottom } = box;
      cursor.append(svg("line", { x1: place, x2: place, y1: top, y2: bottom }));
      const rows = [], reach = 0.02 * box.span;
      let closest = null;
      for (const curve of this.curves) {
        const n = nearest(curve.xs, x), isNear =
          x >= curve.xs[0] - reach && x <= curve.xs.at(-1) + reach;
        if (!isNear) continue;
        const distance = Math.abs(curve.xs[n] - x);
        if (!closest || distance < closest.distance) closest = { curve, n, distance };
        const y = Math.max(top, Math.min(bottom, this.toScreen.y(curve.ys[n])));
        cursor.append(svg("circle", {
          cx: this.toScreen.x(curve.xs[n]), cy: y, r: 4, fill: color(curve.color),
        }));
        rows.push({ curve, value: curve.ys[n], raw: curve.raw[n] });
      }
      this.fillTip(rows, closest, place);
    }

    fillTip(rows, closest, place) {
      const where = closest ? AXES.filter(axis => closest.curve.x[axis]).map(
        axis => formatPosition(axis, closest.curve.x[axis][closest.n])) : [];
      const lines = rows.sort((a, b) => b.value - a.value).map(row => html("div", {},
        html("i", { style: `background: ${color(row.curve.color)}` }),
        html("span", {}, row.curve.name), html("b", {}, formatNumber(row.value)),
        ...(view.smoothing ? [html("small", {}, formatNumber(row.raw))] : [])));
      this.tip.replaceChildren(html("p", {}, where.join(" · ")), ...lines);
      const { offsetWidth: width, offsetHeight: height } = this.tip, { box } = this;
      const isLeft = place + width + 14 > box.right;
      this.tip.style.left = `${Math.max(0, isLeft ? place - width - 12 : place + 12)}px`;
      // Away from the curves: above low ones, below high ones.
      const sum = rows.reduce((all, row) => all + this.toScreen.y(row.value), 0);
      const isLow = sum / (rows.length || 1) > (box.top + box.bottom) / 2;
      this.tip.style.top = `${isLow ? box.top : Math.max(box.top, box.bottom - height - 6)}px`;
    }

    // ---- Mouse, touch and keys ----

    listen() {
      const { plot } = this;
      let start = null, band = null;
      const locate = event => {
        const { left, right, x0, span } = this.box;
        const x = event.clientX - plot.getBoundingClientRect().left;
        const inside = Math.max(left, Math.min(right, x));
        return { px: inside, x: x0 + (inside - left) / (right - left) * span };
      };
      const end = () => {
        band?.remove();
        start = band = null;
      };
      plot.addEventListener("pointerdown", event => {
        if (event.button !== 0 || event.pointerType === "touch") return;
        event.preventDefault();
        plot.focus({ preventScroll: true });
        plot.setPointerCapture(event.pointerId);
        start = locate(event);
      });
      plot.addEventListener("pointermove", event => {
        const here = locate(event);
        setCursor({ axis: this.axis, x: here.x });
        if (!start || Math.abs(here.px - start.px) < 4) return;
        band ??= svg("rect", { class: "zoom" });
        this.cursor.before(band);
        fill(band, {
          x: Math.min(start.px, here.px), width: Math.abs(here.px - start.px),
          y: this.box.top, height: this.box.bottom - this.box.top,
        }, []);
      });
      plot.addEventListener("pointerup", event => {
        const here = locate(event);
        if (start && Math.abs(here.px - start.px) >= 4) {
          setZoom(this.axis, [start.x, here.x].sort((a, b) => a - b));
        }
        end();
      });
      plot.addEventListener("pointercancel", end);
      plot.addEventListener("pointerleave", () => setCursor(null));
      plot.addEventListener("blur", () => setCursor(null));
      plot.addEventListener("dblclick", () => setZoom(this.axis, null));
      plot.addEventListener("keydown", event => this.press(event));
    }

    press(event) {
      const { axis, box, curves } = this;
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
      const middle = view.cursor?.axis === axis ? view.cursor.x : (box.x0 + box.x1) / 2;
      if (event.key === "Escape") setZoom(axis, null);
      else if (factor) {
        const room = (box.x1 - box.x0) * factor / 2;
        const all = extent(curves.flatMap(c => [c.xs[0], c.xs.at(-1)])) ?? [0, 1];
        const next = [Math.max(all[0], middle - room), Math.min(all[1], middle + room)];
        setZoom(axis, next[0] <= all[0] && next[1] >= all[1] ? null : next);
      } else if (step && curves.length) {
        const xs = curves.reduce((a, b) => a.xs.length >= b.xs.length ? a : b).xs;
        const n = nearest(xs, middle) + (view.cursor ? step : 0);
        setCursor({ axis, x: xs[Math.max(0, Math.min(xs.length - 1, n))] });
      } else return;
      event.preventDefault();
    }
  }

  function text(x, y, content, anchor, name = null) {
    return svg("text", { x, y, "text-anchor": anchor, dy: "0.36em", class: name }, content);
  }

  function legendButtons(series, hidden, onchange) {
    const names = series.map(curve => curve.name);
    return series.map(curve => html("button", {
      type: "button", "aria-pressed": !hidden.has(curve.name),
      title: "Click to hide or show; Shift and click to show only this",
      onclick: event => {
        const isOnly = names.every(name => hidden.has(name) === (name !== curve.name));
        if (event.shiftKey) {
          for (const name of names) {
            if (isOnly || name === curve.name) hidden.delete(name); else hidden.add(name);
          }
        } else if (!hidden.delete(curve.name)) hidden.add(curve.name);
        onchange();
      },
    }, html("i", { style: `background: ${color(curve.color)}` }), curve.name));
  }

  // ---- All charts ----

  function setCursor(cursor) {
    view.cursor = cursor;
    for (const chart of charts) chart.drawCursor();
  }

  function setZoom(axis, range) {
    if (range) view.zoom[axis] = range; else delete view.zoom[axis];
    redraw();
  }

  function redraw() {
    if (toolbar.element) {
      toolbar.reset.hidden = !Object.keys(view.zoom).length;
      for (const button of toolbar.axes.children) {
        button.setAttribute("aria-pressed", button.value === view.x);
      }
    }
    for (const chart of charts) chart.draw();
  }

  function buildToolbar() {
    const axes = AXES.map(axis => html("button", {
      type: "button", value: axis, onclick: () => { view.x = axis; redraw(); },
    }, AXIS_TITLES[axis]));
    const shown = html("output", {}, "0");
    const slider = html("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "Smoothing",
      oninput: () => {
        view.smoothing = +slider.value;
        shown.textContent = slider.value;
        redraw();
      },
    });
    toolbar.axes = html("span", { class: "segments", role: "group" }, ...axes);
    toolbar.reset = html("button", {
      type: "button", hidden: "",
      onclick: () => { view.zoom = {}; redraw(); },
    }, "Reset zoom");
    toolbar.legend = html("div", { class: "legend" });
    toolbar.element = html("div", { class: "toolbar" },
      toolbar.axes, html("label", {}, "Smoothing ", slider, shown), toolbar.reset,
      html("small", { class: "hint" }, "Drag to zoom, double-click to reset."),
      toolbar.legend);
    return toolbar.element;
  }

  /** Show one button per curve name that linked charts share. */
  function setLegend(series) {
    toolbar.legend.replaceChildren(...legendButtons(series, view.hidden, () => {
      setLegend(series);
      redraw();
    }));
  }

  function add(figure, data) {
    const chart = new Chart(figure, data);
    charts.push(chart);
    return chart;
  }

  /** Make the charts of a page interactive. */
  function start() {
    const blocks = [...document.querySelectorAll("script.chart-data")];
    if (!blocks.length) return;
    const all = blocks.map(block => [block.closest("figure"), JSON.parse(block.textContent)]);
    view.x = all[0][1].x;
    const figures = blocks[0].closest(".figures");
    if (figures) {
      // The toolbar stays in view next to its charts, and only there.
      const group = html("div", {}), folded = figures.nextElementSibling;
      figures.before(group);
      group.append(buildToolbar(), figures);
      if (folded?.matches("details")) group.append(folded);
    }
    for (const [figure, data] of all) add(figure, data);
    const linked = new Map(all.filter(([, data]) => data.linked)
      .flatMap(([, data]) => data.series.map(curve => [curve.name, curve])));
    if (linked.size) setLegend([...linked.values()].sort((a, b) => a.color - b.color));
    if (toolbar.element) redraw();
  }

  start();
  return {
    view, charts, html, color, add, redraw, buildToolbar, setLegend,
    smooth, selectPoints, linearTicks, logTicks, formatTick, formatTicks, formatNumber,
    formatDuration,
  };
})();
