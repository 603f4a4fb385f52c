// What every page does: times in the reader's zone, charts from tables, copying, and the secret that forms carry.
"use strict";
(() => {
  const root = document.documentElement;
  const zone = root.dataset.zone || undefined;
  const narrow = window.matchMedia("(max-width: 56rem)");
  const form = (options) => { try { return new Intl.DateTimeFormat(undefined, { timeZone: zone, ...options }); } catch { return new Intl.DateTimeFormat(undefined, options); } };
  const shapes = {
    moment: form({ dateStyle: "medium", timeStyle: "medium" }),
    minute: form({ dateStyle: "medium", timeStyle: "short" }),
    day: form({ dateStyle: "medium" }),
    log: form({ month: "short", day: "numeric", hour: "numeric", minute: "2-digit", second: "2-digit" }),
  };

  function times(part) {
    for (const one of part.querySelectorAll("time[datetime]")) {
      const at = new Date(one.dateTime);
      if (Number.isNaN(at.getTime())) continue;
      one.textContent = (shapes[one.dataset.shape] || shapes.minute).format(at);
      one.title = `${one.dateTime} (UTC)`;
    }
  }

  // -- charts -------------------------------------------------------------------------------------
  const digits = (value, most) => new Intl.NumberFormat(undefined, { maximumSignificantDigits: most, notation: Math.abs(value) >= 1e4 ? "compact" : "standard" }).format(value);
  const write = {
    nano: (value, figure) => `${digits(value / 1e9, 4)} ${figure.dataset.currency}`,
    count: (value) => digits(value, 4),
    workers: (value) => digits(value, 3),
    ms: (value) => (value >= 1000 ? `${digits(value / 1000, 3)} s` : `${digits(value, 3)} ms`),
    percent: (value) => `${digits(value * 100, 4)} %`,
  };

  function read(table) {
    const names = [...table.tHead.rows[0].cells].slice(1).map((cell) => cell.textContent.trim());
    const rows = [...table.tBodies[0].rows];
    const at = rows.map((row) => Number(row.dataset.at));
    const columns = names.map((_, i) => rows.map((row) => { const raw = row.cells[i + 1].dataset.value; return raw === "" ? null : Number(raw); }));
    return { names, at, columns };
  }

  function draw(figure) {
    const { names, at, columns } = read(figure.querySelector("table"));
    const target = figure.querySelector(".plot");
    target.replaceChildren();
    figure.querySelector(".legend")?.remove();
    if (!window.uPlot || !at.length) return;
    const look = getComputedStyle(root);
    const colour = (name) => look.getPropertyValue(name).trim();
    const stacked = "stacked" in figure.dataset;
    const say = (value) => (value == null ? "–" : write[figure.dataset.unit](value, figure));
    const legend = document.createElement("ul");
    legend.className = "legend";
    legend.setAttribute("aria-hidden", "true");
    const values = names.map((name, i) => {
      const item = document.createElement("li");
      item.className = `c${(i % 8) + 1}`;
      const value = document.createElement("b");
      item.append(name, value);
      legend.append(item);
      return value;
    });
    target.before(legend);
    // A stacked chart is drawn from the top of the pile down, each bar over the one behind it.
    const piles = [];
    if (stacked) columns.forEach((column, i) => piles.push(column.map((value, j) => (value || 0) + (i ? piles[i - 1][j] : 0))));
    const order = names.map((_, i) => (stacked ? names.length - 1 - i : i));
    const series = order.map((i) => ({
      label: names[i], stroke: colour(`--s${(i % 8) + 1}`), width: stacked ? 0 : 2, spanGaps: false,
      fill: stacked ? colour(`--s${(i % 8) + 1}`) : undefined,
      paths: stacked ? uPlot.paths.bars({ size: [0.72, 48], align: 1 }) : undefined,
      points: { show: !stacked && at.length < 40, size: 5 },
    }));
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const step = at.length > 1 ? at[1] - at[0] : 3600;
    new uPlot({
      width: target.clientWidth || 600, height: 200, legend: { show: false },
      tzDate: zone ? (seconds) => uPlot.tzDate(new Date(seconds * 1000), zone) : undefined,
      scales: {
        x: { time: true, range: () => [at[0], at[at.length - 1] + (stacked ? step : 0)] },
        y: { range: (_, low, high) => [Math.min(0, low || 0), figure.dataset.unit === "percent" ? 1.02 : (high || 1) * 1.08] },
      },
      cursor: { y: false, points: { show: !stacked } },
      series: [{}, ...series],
      axes: [{ ...axis, grid: { show: false } }, { ...axis, size: 78, values: (_, ticks) => ticks.map(say) }],
      hooks: { setCursor: [(plot) => { const j = plot.cursor.idx; values.forEach((value, i) => { value.textContent = j == null ? "" : say(columns[i][j]); }); }] },
    }, [at, ...order.map((i) => (stacked ? piles[i] : columns[i]))], target);
  }

  const drawAll = (part) => part.querySelectorAll("figure.chart").forEach(draw);

  // -- small things -------------------------------------------------------------------------------
  function prepare(part) { times(part); drawAll(part); }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    const words = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = words; }, 1500);
  });
  document.addEventListener("submit", (event) => {
    const question = event.submitter?.dataset.sure || event.target.dataset.sure;
    if (question && !window.confirm(question)) event.preventDefault();
  }, true);
  document.addEventListener("change", (event) => { if (event.target.matches("[data-submits]")) event.target.form.requestSubmit(); });
  document.addEventListener("htmx:configRequest", (event) => {
    event.detail.headers["x-csrf-token"] = document.querySelector('meta[name="csrf-token"]').content;
  });
  // What refreshes itself must not take away what somebody reads, opened or stands on.
  document.addEventListener("htmx:beforeRequest", (event) => {
    const part = event.detail.elt;
    if (document.hidden || part.contains(document.activeElement) || part.querySelector("details[open]")) event.preventDefault();
  });
  document.addEventListener("htmx:load", (event) => { if (event.detail.elt !== document.body) prepare(event.detail.elt); });
  let due = 0;
  const again = () => { clearTimeout(due); due = setTimeout(() => drawAll(document), 120); };
  window.addEventListener("resize", again);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  // The address says which organisation it is about, so that it can be passed on.
  const here = new URL(location.href);
  if (root.dataset.org && !here.searchParams.has("org")) {
    here.searchParams.set("org", root.dataset.org);
    history.replaceState(history.state, "", here);
  }
  const zones = document.querySelector("[data-zones]");
  if (zones && Intl.supportedValuesOf) zones.append(...Intl.supportedValuesOf("timeZone").map((name) => new Option("", name)));
  const menu = document.querySelector(".menu");
  const fold = () => { if (menu) menu.open = !narrow.matches; };
  narrow.addEventListener("change", fold);
  fold();
  prepare(document);
})();
