// Routes: figures of a window, and a curve that the gateway keeps.

const figures = (before, after, seconds) => {
  const outcomes = grown(before?.requests, after.requests);
  const [met, good] = [grown(before?.slo.ttft, after.slo.ttft), grown(before?.slo.goodput, after.slo.goodput)];
  const [ttft, tpot, gap] = ["ttft_ms", "tpot_ms", "longest_gap_ms"].map((name) => [after[name].le, buckets(before?.[name], after[name])]);
  const tokens = grown(before?.tokens, after.tokens);
  const cost = grown({ n: before?.cost_usd ?? 0 }, { n: after.cost_usd }).n;
  const pools = Object.entries(grown(before?.pools, after.pools)).filter(([pool, count]) => pool !== "-" && count);
  const rate = (...names) => sum(names.map((name) => outcomes[name] ?? 0)) / seconds;
  const of = (part, total) => (total ? (part ?? 0) / total : null);
  const asked = sum(Object.values(outcomes));
  return {
    p50: quantile(...ttft, 0.5), p95: quantile(...ttft, 0.95), p99: quantile(...ttft, 0.99),
    tpot: quantile(...tpot, 0.95), gap: quantile(...gap, 0.95),
    rate: asked / seconds,
    attainment: of(met.true, sum(Object.values(met))),
    goodput: of(good.true, sum(Object.values(good))), goodRate: (good.true ?? 0) / seconds,
    hit: of(tokens.cached, tokens.input), price: asked ? (1000 * cost) / asked : null,
    tokens: ((tokens.input ?? 0) + (tokens.output ?? 0)) / seconds,
    shed: rate("shed"),
    failed: rate("failed", "upstream_broke", "internal", "unavailable"),
    pools: pools.sort((a, b) => b[1] - a[1]),
  };
};

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

const routeRow = (route, seen, kept) => {
  const [grows, target] = [route.ttft_budget_grows, route.ttft_target];
  const budget = grows ? null : route.ttft_budget_ms; // a line that every prompt is held against
  const over = (value) => (budget !== null && value !== null && value > budget ? "n bad" : "n");
  const short = (value) => (value !== null && target !== null && value < target ? "n bad" : "n");
  const answered = sum(seen.pools.map(([, count]) => count));
  const by = seen.pools.map(([pool, count]) => `${pool} ${((count * 100) / answered).toFixed(0)}%`).join(" · ");
  const left = kept?.error_budget_left ?? null;
  const title = target === null ? null : `target ${share(target)}`;
  return el(
    "tr", {},
    el("td", {}, el("span", { class: "name" }, route.route), " ", el("span", { class: "soft" }, route.workload === route.route ? "" : route.workload)),
    cell(seen.rate.toFixed(1)), cell(ms(seen.p50)), cell(ms(seen.p95), over(seen.p95)), cell(ms(seen.p99), over(seen.p99)),
    el("td", {}, spark(kept?.points ?? [], budget)),
    cell(grows ? `${ms(route.ttft_budget_ms)}+` : ms(budget)),
    cell(share(seen.attainment), short(seen.attainment), title),
    cell(share(seen.goodput), short(seen.goodput), `${seen.goodRate.toFixed(1)} requests/s within every budget`),
    cell(left === null ? "–" : `${(left * 100).toFixed(0)}%`, left !== null && left < 0 ? "n bad" : "n", title),
    cell(ms(seen.tpot)), cell(ms(seen.gap)), cell(share(seen.hit)), cell(seen.tokens.toFixed(0)),
    cell(seen.price === null ? "–" : `$${seen.price.toFixed(2)}`),
    cell(`${route.held}`), cell(seen.shed.toFixed(1), seen.shed ? "n bad" : "n"),
    cell(seen.failed.toFixed(1), seen.failed ? "n bad" : "n"), cell(by, ""),
  );
};

// `kept`: the answer of /windows; `before`, `after`: two answers of /routes, whose difference is the window "now".
const showRoutes = (window, before, after, kept) => {
  const live = window === "now";
  const seconds = live ? Math.max(after.at - before.at, 0.001) : kept.covered_s || 1;
  const known = new Map(live ? before.routes.map((route) => [route.route, route]) : []);
  const history = new Map(kept.routes.map((route) => [route.route, route]));
  const rows = (live ? after : kept).routes.map((route) =>
    routeRow(route, figures(known.get(route.route), route, seconds), history.get(route.route)),
  );
  replaceRows(byId("routes").tBodies[0], rows);
  const part = live || kept.covered_s >= kept.window_s * 0.98 ? "" : `, of which ${age(kept.covered_s)} are known`;
  byId("routes-note").textContent = `${WINDOWS[window]}${part}; curves ${live ? "5 min" : age(kept.window_s)}`;
  showWhole(before, after);
};

const showWhole = (earlier, later) => {
  const [before, after] = [earlier.gateway, later.gateway];
  const asked = (stats) => Object.fromEntries(stats.routes.map((route) => [route.route, sum(Object.values(route.requests))]));
  const rate = sum(Object.values(grown(asked(earlier), asked(later)))) / Math.max(later.at - earlier.at, 0.001);
  const counts = buckets(before.loop_lag_ms, after.loop_lag_ms);
  const at = counts.findLastIndex((count) => count > 0);
  const stalls = grown({ n: before.loop_stalls }, { n: after.loop_stalls }).n;
  const said = [`${rate.toFixed(1)} req/s`];
  if ("in_progress" in after) said.push(`${after.in_progress} in progress`);
  if (at >= 0) said.push(at < after.loop_lag_ms.le.length ? `loop lag under ${after.loop_lag_ms.le[at]} ms` : "loop lag over 1 s");
  if (stalls) said.push(`${stalls} stalls`);
  for (const name of ["workers", "replicas"]) if (name in after) said.push(`${after[name]} ${name}`);
  if ("redis_up" in after) said.push(after.redis_up ? "redis up" : "redis DOWN");
  if (after.version) said.push(after.version);
  byId("whole").textContent = said.join("  ·  ");
};

