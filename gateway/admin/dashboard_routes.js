// Routes: figures of a window, and a curve, both as the gateway computes them.

const line = (points, x, y, name) => {
  let path = "";
  let pen = "M";
  points.forEach((value, at) => {
    if (value === null) pen = "M";
    else {
      path += `${pen}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
      pen = "L";
    }
  });
  return svg("path", { class: name, d: path });
};

const spark = (points, budget) => {
  const [width, height] = [140, 34];
  const seen = points.map((point) => point?.[1] ?? null).filter((value) => value !== null);
  const most = Math.max(...seen, budget ?? 0, 1) * 1.15;
  const x = (at) => 4 + (at * (width - 8)) / (points.length - 1);
  const y = (value) => height - 2 - (value / most) * (height - 4);
  const latest = points.findLastIndex((point) => (point?.[1] ?? null) !== null);
  const last = latest < 0 ? null : points[latest][1];
  const said = `p95 ${ms(last)} lately, budget ${ms(budget)}`;
  const curve = (at) => points.map((point) => point?.[at] ?? null);
  return svg(
    "svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said },
    svg("title", {}, said),
    budget === null ? null : svg("line", { class: "limit", x1: 0, x2: width, y1: y(budget), y2: y(budget) }),
    line(curve(0), x, y, "p50"),
    line(curve(1), x, y, "p95"),
    last === null ? null
      : svg("circle", { class: budget !== null && last > budget ? "last over" : "last", cx: x(latest), cy: y(last), r: 2.5 }),
  );
};

const openRoutes = new Set(); // routes whose further figures are shown

const furtherFigures = (route) => {
  const seen = route.figures;
  const usd = seen.usd_per_1000 === null ? "–" : `$${seen.usd_per_1000.toFixed(2)}`;
  return [
    `p99 ${ms(seen.ttft_ms.p99)}`, `within every budget ${share(seen.goodput)}, ${seen.good_per_s.toFixed(1)}/s`,
    `p95 per output token ${ms(seen.tpot_p95_ms)}`, `p95 of the longest gap ${ms(seen.longest_gap_p95_ms)}`,
    `prompt tokens cached ${share(seen.hit)}`, `${seen.tokens_per_s.toFixed(0)} tokens/s`, `${usd} per 1000 requests`,
    `${route.held} held`,
  ].join(" · ");
};

const routeToggle = (name, open) => {
  const toggle = el(
    "button", { type: "button", class: "toggle name", "aria-expanded": open, "data-focus": `route ${name}` }, open ? "▾ " : "▸ ", name,
  );
  toggle.addEventListener("click", () => {
    openRoutes.delete(name) || openRoutes.add(name);
    lookForever();
  });
  return toggle;
};

const rate = (value) => (value && value < 0.05 ? "<0.1" : value.toFixed(1));
const lost = (seen) => {
  if (!seen.shed_per_s && !seen.failed_per_s) return cell("0");
  return cell(`${rate(seen.shed_per_s)}, ${rate(seen.failed_per_s)}/s`, "n bad");
};

const routeRows = (route) => {
  const seen = route.figures;
  const { p50, p95 } = seen.ttft_ms;
  const [grows, target] = [route.ttft_budget_grows, route.ttft_target];
  const budget = grows ? null : route.ttft_budget_ms; // a line that every prompt is held against
  const by = Object.entries(seen.pools).map(([pool, part]) => `${pool} ${(part * 100).toFixed(0)}%`).join(" · ");
  const promised = target === null ? "" : ` / ${share(target).replace(".0%", "%")}`;
  const open = openRoutes.has(route.route);
  const row = el(
    "tr", { class: open ? "told" : null },
    el("td", {}, routeToggle(route.route, open), " ", el("span", { class: "soft big" }, route.workload === route.route ? "" : route.workload)),
    cell(seen.requests_per_s.toFixed(1), "n big"), cell(ms(p50), "n big"),
    cell(ms(p95), budget !== null && p95 !== null && p95 > budget ? "n bad" : "n"),
    el("td", { class: "big" }, el("span", { class: "against" }, spark(route.points, budget), `${ms(route.ttft_budget_ms)}${grows ? "+" : ""}`)),
    cell(`${share(seen.met)}${seen.met === null ? "" : promised}`, seen.met !== null && target !== null && seen.met < target ? "n bad" : "n"),
    lost(seen), cell(by, "big"),
  );
  return open ? [row, el("tr", {}, el("td", { class: "opened", colspan: 8 }, furtherFigures(route)))] : [row];
};

// `found`: the answer of /windows.
const showRoutes = (found) => {
  replaceRows(byId("routes").tBodies[0], found.routes.flatMap(routeRows));
  const part = found.covered_s >= found.window_s * 0.98 ? "" : `, of which ${age(found.covered_s)} are known`;
  const curve = found.slot_s * (found.routes[0]?.points.length ?? 0);
  byId("routes-note").textContent = `${WINDOWS[found.window]}${part}; curves ${age(curve)}`;
  showWhole(found.gateway, sum(found.routes.map((route) => route.figures.requests_per_s)));
};

const showWhole = (after, rate) => {
  const at = after.loop_lag_ms.counts.findLastIndex((count) => count > 0);
  const said = [`${rate.toFixed(1)} req/s`];
  if ("in_progress" in after) said.push(`${after.in_progress} in progress`);
  if (at >= 0) said.push(at < after.loop_lag_ms.le.length ? `loop lag under ${after.loop_lag_ms.le[at]} ms` : "loop lag over 1 s");
  if (after.loop_stalls) said.push(`${after.loop_stalls} ${after.loop_stalls === 1 ? "stall" : "stalls"}`);
  for (const name of ["worker", "replica"]) {
    const count = after[`${name}s`];
    if (count !== undefined) said.push(`${count} ${name}${count === 1 ? "" : "s"}`);
  }
  if ("redis_up" in after) said.push(after.redis_up ? "redis up" : "redis DOWN");
  if (after.version) said.push(after.version);
  byId("whole").textContent = said.join("  ·  ");
};

