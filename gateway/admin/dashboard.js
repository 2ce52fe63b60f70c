"use strict";
// The live page of the admin port. All that comes from requests is inserted as text; nothing is asked of another host.
(() => {
  const EVERY = 2000; // ms between two looks
  const KEPT = 90; // looks that a sparkline remembers
  const SLOWEST = 10;
  const byId = (id) => document.getElementById(id);

  // ---------------------------------------------------------------- elements

  const filled = (made, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  };
  const el = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) =>
    filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const cell = (text, kind = "n", title = null) => el("td", { class: kind, title }, text);

  // ---------------------------------------------------------------- numbers

  const ms = (value) => {
    if (value === null || value === undefined) return "–";
    return value < 10000 ? `${value.toFixed(value < 10 ? 1 : 0)} ms` : `${(value / 1000).toFixed(1)} s`;
  };
  const share = (value) => (value === null ? "–" : value === 1 ? "100%" : `${(value * 100).toFixed(1)}%`);
  const age = (s) => (s < 120 ? `${Math.max(s, 0).toFixed(0)} s` : s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(0)} h`);
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

  // Counts that came between two looks; a count that went back is another process's, which began at nothing.
  const grown = (before, after) =>
    Object.fromEntries(
      Object.entries(after).map(([name, value]) => {
        const was = (before ?? {})[name] ?? 0;
        return [name, value >= was ? value - was : value];
      }),
    );
  const buckets = (before, after) => {
    if (!before || !before.counts.length) return after.counts;
    if (before.le.join() !== after.le.join()) return after.counts.map(() => 0);
    const since = after.counts.map((count, at) => count - before.counts[at]);
    return Math.min(...since) < 0 ? after.counts : since;
  };
  // Where a straight line through its bucket puts it; beyond the last bound it is that bound.
  const quantile = (bounds, counts, q) => {
    const total = sum(counts);
    if (!bounds.length || !total) return null;
    let below = 0;
    for (let at = 0; at < counts.length; at += 1) {
      if (counts[at] && below + counts[at] >= q * total) {
        if (at === bounds.length) return bounds[at - 1];
        const low = at ? bounds[at - 1] : 0;
        return low + ((bounds[at] - low) * (q * total - below)) / counts[at];
      }
      below += counts[at];
    }
    return bounds[bounds.length - 1];
  };

  // ---------------------------------------------------------------- routes

  const history = new Map(); // of each route: {p50, p95} a look

  const looked = (before, after, seconds) => {
    const outcomes = grown(before?.requests, after.requests);
    const met = grown(before?.slo.ttft, after.slo.ttft);
    const counts = buckets(before?.ttft_ms, after.ttft_ms);
    const [p50, p95, p99] = [0.5, 0.95, 0.99].map((q) => quantile(after.ttft_ms.le, counts, q));
    const judged = sum(Object.values(met));
    const rate = (...names) => sum(names.map((name) => outcomes[name] ?? 0)) / seconds;
    const pools = Object.entries(grown(before?.pools, after.pools)).filter(([pool, count]) => pool !== "-" && count);
    return {
      p50, p95, p99,
      rate: sum(Object.values(outcomes)) / seconds,
      attainment: judged ? (met.true ?? 0) / judged : null,
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
    const [width, height] = [220, 34];
    const seen = points.map((p) => p.p95).filter((value) => value !== null);
    const most = Math.max(...seen, budget ?? 0, 1) * 1.15;
    const x = (at) => width - 4 - ((points.length - 1 - at) * (width - 8)) / (KEPT - 1);
    const y = (value) => height - 2 - (value / most) * (height - 4);
    const last = points[points.length - 1]?.p95 ?? null;
    const said = `p95 ${ms(last)} now, budget ${ms(budget)}`;
    return svg(
      "svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said },
      svg("title", {}, said),
      budget === null ? null : svg("line", { class: "limit", x1: 0, x2: width, y1: y(budget), y2: y(budget) }),
      line(points.map((p) => p.p50), x, y, "p50"),
      line(points.map((p) => p.p95), x, y, "p95"),
      last === null ? null
        : svg("circle", { class: budget !== null && last > budget ? "last over" : "last", cx: x(points.length - 1), cy: y(last), r: 2.5 }),
    );
  };

  const routeRow = (route, seen, points) => {
    const [grows, target] = [route.ttft_budget_grows, route.ttft_target];
    const budget = grows ? null : route.ttft_budget_ms; // a line that every prompt is held against
    const over = (value) => (budget !== null && value !== null && value > budget ? "n bad" : "n");
    const short = seen.attainment !== null && target !== null && seen.attainment < target;
    const answered = sum(seen.pools.map(([, count]) => count));
    const by = seen.pools.map(([pool, count]) => `${pool} ${((count * 100) / answered).toFixed(0)}%`).join(" · ");
    return el(
      "tr", {},
      el("td", {}, el("span", { class: "name" }, route.route), " ", el("span", { class: "soft" }, route.workload === route.route ? "" : route.workload)),
      cell(seen.rate.toFixed(1)), cell(ms(seen.p50)), cell(ms(seen.p95), over(seen.p95)), cell(ms(seen.p99), over(seen.p99)),
      el("td", {}, spark(points, budget)),
      cell(grows ? `${ms(route.ttft_budget_ms)}+` : ms(budget)),
      cell(share(seen.attainment), short ? "n bad" : "n", target === null ? null : `target ${share(target)}`),
      cell(`${route.held}`), cell(seen.shed.toFixed(1), seen.shed ? "n bad" : "n"),
      cell(seen.failed.toFixed(1), seen.failed ? "n bad" : "n"), cell(by, ""),
    );
  };

  const showRoutes = (before, after) => {
    const seconds = Math.max(after.at - before.at, 0.001);
    const known = new Map(before.routes.map((route) => [route.route, route]));
    const rows = after.routes.map((route) => {
      const seen = looked(known.get(route.route), route, seconds);
      const points = [...(history.get(route.route) ?? []), { p50: seen.p50, p95: seen.p95 }].slice(-KEPT);
      history.set(route.route, points);
      return [routeRow(route, seen, points), seen.rate];
    });
    byId("routes").tBodies[0].replaceChildren(...rows.map(([row]) => row));
    byId("routes-note").textContent = `last ${seconds.toFixed(0)} s; curves ${((KEPT * EVERY) / 60000).toFixed(0)} min`;
    showWhole(before.gateway, after.gateway, sum(rows.map(([, rate]) => rate)));
  };

  const showWhole = (before, after, rate) => {
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

  // ---------------------------------------------------------------- endpoints

  const meter = (value) => {
    const bar = svg(
      "svg", { class: "meter", viewBox: "0 0 64 8", role: "img", "aria-label": share(value) },
      svg("rect", { class: "track", width: 64, height: 8, rx: 2 }),
      svg("rect", { class: "fill", width: Math.min(value, 1) * 64, height: 8, rx: 2 }),
    );
    return el("td", {}, bar, `${(value * 100).toFixed(0)}%`);
  };

  const beliefText = (found) => {
    const lasts = found.for_s === null ? "" : `, for ${found.for_s.toFixed(0)} s`;
    const whom = found.callers === "all" ? "all callers" : `${found.callers} of the callers`;
    return `${found.what}${lasts}, to ${whom}: ${found.why}`;
  };
  const holdText = (held) =>
    `${held.requests} held by ${held.rule}, for up to ${held.longest_s.toFixed(1)} s; freed by ${held.freed_by}`;
  const holdRow = (held) => el("tr", {}, el("td", { class: "why", colspan: 11 }, holdText(held)));
  const beliefRow = (found) => el("tr", {}, el("td", { class: "why", colspan: 11 }, beliefText(found)));

  const endpointRows = (entry) => {
    const { load, calibration } = entry;
    const [low, middle, high] = entry.error.map((ratio) => ratio.toFixed(2));
    const again = entry.tried_again_in_s ? `, again in ${entry.tried_again_in_s.toFixed(0)} s` : "";
    const dissent = Object.entries(entry.health_by_worker ?? {}).filter(([, health]) => health !== load.health);
    const otherwise = dissent.length ? ` (not to worker ${dissent.map(([worker]) => worker).join(", ")})` : "";
    const row = el(
      "tr", { class: entry.believed.length ? "told" : null },
      cell(entry.endpoint.id, "mono"), cell(`${load.health}${again}${otherwise}`, `state ${load.health}`),
      cell(`${load.in_flight}`), cell(load.ahead.toFixed(0)), cell(`${load.running}`), cell(`${load.waiting}`),
      entry.scraped_s_ago === null ? cell("–", "soft") : meter(load.kv_usage),
      entry.samples ? cell(`${middle} (${low} to ${high})`) : cell("–"),
      cell(share(calibration ? calibration.under_p90 : null)),
      cell(entry.prefix_capacity ? `${entry.prefix_blocks}` : "–", "n", `of ${entry.prefix_capacity}`), cell(`${entry.samples}`),
    );
    return [row, ...entry.believed.map(beliefRow), ...entry.held.map(holdRow)];
  };

  const showFleet = (fleet) => byId("fleet").tBodies[0].replaceChildren(...fleet.flatMap(endpointRows));

  // ---------------------------------------------------------------- the slowest requests

  const GROUPS = [
    ["gateway", "gateway"], ["queue", "held back, rate limits"], ["lost", "lost attempts"], ["connect", "connect"],
    ["engine_queue", "engine queue"], ["upstream", "engine"],
  ];
  const GROUP_OF = { queue: "queue", rate_limit: "queue", failover: "lost", connect: "connect", upstream: "upstream" };
  const PARTS = new Set(["engine_queue", "engine_prefill", "stream"]); // of another stage, or after the first token

  const spentBy = (record) => {
    const groups = {};
    for (const [stage, spent] of Object.entries(record.stages_ms)) {
      const group = GROUP_OF[stage] ?? "gateway";
      if (!PARTS.has(stage)) groups[group] = (groups[group] ?? 0) + spent;
    }
    const queued = Math.min(record.engine_queue_ms ?? record.stages_ms.engine_queue ?? 0, groups.upstream ?? 0);
    if (queued) Object.assign(groups, { engine_queue: queued, upstream: groups.upstream - queued });
    return groups;
  };

  const stageBar = (record, longest) => {
    const groups = spentBy(record);
    const stages = Object.entries(record.stages_ms).filter(([stage]) => stage !== "stream");
    const said = stages.map(([stage, spent]) => `${stage} ${ms(spent)}`).join(", ");
    let from = 0;
    const rects = GROUPS.filter(([group]) => groups[group]).map(([group]) => {
      const width = (groups[group] / longest) * 300;
      from += width;
      return svg("rect", { class: `s-${group}`, x: from - width, width, height: 12 });
    });
    const budget = record.ttft_budget_ms;
    const at = budget === null ? null : (budget / longest) * 300;
    return svg(
      "svg", { class: "bar", viewBox: "0 0 300 12", role: "img", "aria-label": said },
      svg("title", {}, said), svg("rect", { class: "track", width: 300, height: 12 }), ...rects,
      at === null || at > 299 ? null : svg("line", { class: "tick", x1: at, x2: at, y1: 0, y2: 12 }),
    );
  };

  const causes = (record) => record.attempts.filter((attempt) => attempt.cause)
    .map((attempt) => `attempt ${attempt.number}: ${attempt.cause}`).join("; ");

  const slowRow = (record, longest, now) => {
    const waited = record.ttft_ms ?? record.total_ms;
    const seen = record.on_screen_ms === null ? "" : `on screen after ${ms(record.on_screen_ms)}`;
    const why = record.why ?? null;
    const row = el(
      "tr", { class: why ? "told" : null },
      cell(`${age(now - record.wall)} ago`, "n soft"), cell(record.route, "name"), cell(record.endpoint, "mono", causes(record) || null),
      cell(record.ttft_ms === null ? `none in ${ms(waited)}` : ms(waited), record.ttft_met === false ? "n bad" : "n", seen),
      cell(ms(record.ttft_budget_ms), "n soft"), el("td", {}, stageBar(record, longest)), cell(ms(record.ttft_predicted_p50_ms)),
      cell(record.prompt_tokens_reported === null ? "–" : `${record.prompt_tokens_reported}`, "n",
        record.cached_tokens_reported === null ? null : `${record.cached_tokens_reported} cached`),
      cell(record.request_id, "mono soft"),
    );
    if (why === null) return [row];
    return [row, el("tr", {}, el("td", { class: "why", colspan: 9 }, `${why.cause}: ${why.evidence}. ${why.mend}`))];
  };

  const showSlow = (records, now) => {
    const longest = Math.max(...records.map((record) => record.ttft_ms ?? record.total_ms), 1);
    const rows = records.flatMap((record) => slowRow(record, longest, now));
    const none = el("tr", {}, el("td", { class: "none", colspan: 9 }, "no stream yet"));
    byId("slow").tBodies[0].replaceChildren(...(rows.length ? rows : [none]));
  };

  // ---------------------------------------------------------------- explain

  const candidateRow = (found) =>
    el(
      "tr", { class: found.chosen ? "chosen" : null },
      cell(`${found.rank}`), cell(found.endpoint, "mono"), cell(`${found.tier}`), cell(ms(found.ttft_p50_ms)),
      cell(ms(found.ttft_p90_ms)), cell(found.chance.toFixed(3)), cell(`${found.hit_tokens} / ${found.prompt_tokens}`),
      cell(`${found.tokens_ahead}`), cell(`${found.running} + ${found.waiting}`), cell(`$${found.price_usd.toFixed(6)}`),
      cell(`${found.chosen ? "chosen: " : ""}${found.reason}`, "words"),
    );
  const rejectedRow = (found) =>
    el(
      "tr", {}, cell("–"), cell(found.endpoint ?? found.pool, "mono"), cell(`${found.tier}`),
      el("td", { class: "words", colspan: 8 }, `rejected: ${found.reason}`),
    );
  const believedRow = ([endpoint, found]) =>
    el(
      "tr", {}, cell("–"), cell(endpoint, "mono"), cell(""),
      el("td", { class: "words", colspan: 8 }, `believed: ${beliefText(found)}`),
    );
  const HEADING = [
    ["", "n"], ["endpoint", ""], ["tier", "n"], ["p50", "n"], ["p90", "n"], ["chance", "n"], ["hit / prompt", "n"],
    ["ahead", "n"], ["run + wait", "n"], ["price", "n"], ["why", ""],
  ];

  const decisionOf = (said) => {
    const left = said.budget_left_ms === null ? "no TTFT budget" : `${ms(said.budget_left_ms)} left for the first token`;
    const heading = el("tr", {}, ...HEADING.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
    const beliefs = Object.entries(said.believed).flatMap(([endpoint, found]) => found.map((each) => [endpoint, each]));
    const rows = [
      ...said.candidates.map(candidateRow), ...said.rejected.map(rejectedRow), ...beliefs.map(believedRow),
    ];
    return [
      el("p", {}, el("span", { class: "name" }, said.outcome), `: ${said.reason}. ${left}; `,
        `${said.expected_output_tokens} tokens of answer expected.`,
        said.held_by ? ` Held by ${said.held_by.rule}; freed by ${said.held_by.freed_by}.` : ""),
      el("div", { class: "wide" }, el("table", {}, el("thead", {}, heading), el("tbody", {}, ...rows))),
    ];
  };

  const explain = async () => {
    const headers = { "content-type": "application/json" };
    if (byId("key").value) headers.authorization = `Bearer ${byId("key").value}`;
    const path = encodeURIComponent(byId("path").value);
    try {
      const reply = await fetch(`explain?path=${path}`, { method: "POST", headers, body: byId("request").value });
      const said = await reply.json();
      byId("answer").replaceChildren(...(reply.ok ? decisionOf(said) : [el("p", { class: "bad" }, said.error.message)]));
    } catch {
      byId("answer").replaceChildren(el("p", { class: "bad" }, "The gateway does not answer."));
    }
  };

  // ---------------------------------------------------------------- looking

  const status = (kind, text) => Object.assign(byId("status"), { className: kind, textContent: text });
  const asked = async (path) => {
    const reply = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
    return reply.json();
  };

  let before = null;
  const look = async () => {
    const [routes, fleet, slowest] = await Promise.all(["routes", "fleet", `requests?slowest=${SLOWEST}`].map(asked));
    const reading = !getSelection().isCollapsed && before !== null; // what is being marked must not be replaced
    if (!byId("request").value) {
      const model = routes.routes[0]?.route ?? "model";
      byId("request").value = JSON.stringify({ model, stream: true, messages: [{ role: "user", content: "hello" }] }, null, 1);
    }
    if (!reading) {
      if (before !== null && routes.at > before.at) showRoutes(before, routes);
      showFleet(fleet);
      showSlow(slowest, routes.at);
      before = routes;
    }
    status("live", reading ? "paused while text is marked" : "live");
  };

  const lookForever = async () => {
    try {
      if (document.visibilityState === "visible") await look();
    } catch (error) {
      status("gone", `the gateway has gone away and is tried again (${error.message})`);
    }
    setTimeout(lookForever, before === null ? 500 : EVERY);
  };

  const legend = GROUPS.flatMap(([group, text]) => [el("span", { class: `key square s-${group}` }), text]);
  byId("stages").append(...legend, el("span", { class: "key mark" }), "budget");
  byId("go").addEventListener("click", explain);
  globalThis.firsttoken = { buckets, quantile }; // for tests
  lookForever();
})();
