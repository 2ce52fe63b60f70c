"use strict";
// The live page of the admin port, first part: elements, numbers, and what is looked at.
// All that comes from requests is inserted as text; nothing is asked of another host.

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



// ---------------------------------------------------------------- what is looked at

// The window, the filters of the misses and the open request are in the address, so that a link leads to the same view.
const WINDOWS = { now: "last 10 s", "5m": "last 5 min", "1h": "last hour" };
const FILTERS = ["route", "key", "endpoint", "cause"];
const viewed = () => {
  const given = new URLSearchParams(location.hash.slice(1));
  return {
    window: Object.hasOwn(WINDOWS, given.get("window")) ? given.get("window") : "now",
    request: given.get("request") ?? "",
    filters: Object.fromEntries(FILTERS.map((name) => [name, given.get(name) ?? ""])),
  };
};
const address = (changes) => {
  const now = viewed();
  const members = { window: now.window, ...now.filters, request: now.request, ...changes };
  return `#${new URLSearchParams(Object.entries(members).filter(([, value]) => value))}`;
};
const view = (changes) => {
  location.hash = address(changes);
};

// Rows are replaced at each look: the control that had the focus gets it back.
const replaceRows = (body, rows) => {
  const focused = body.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
  body.replaceChildren(...rows);
  if (focused) [...body.querySelectorAll("[data-focus]")].find((one) => one.dataset.focus === focused)?.focus();
};
const nothing = (columns, text) => el("tr", {}, el("td", { class: "none", colspan: columns }, text));
