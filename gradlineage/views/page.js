"use strict";
(() => {
  const $ = (query, root = document) => root.querySelector(query), $$ = (query, root = document) => [...root.querySelectorAll(query)];
  const data = JSON.parse($("#data").textContent), { items, pictures } = data;
  const rows = $$("tbody tr"), rowOf = new Map(rows.map((tr) => [+tr.dataset.i, tr]));
  const pane = $("#pane"), panel = $("#panel"), find = $("#find"), found = $("#found");
  const feeds = items.map(() => []), fed = items.map(() => []), members = items.map(() => []);
  for (let n = 0; n < data.wires.length; n += 2) {
    fed[data.wires[n + 1]].push(data.wires[n]);
    feeds[data.wires[n]].push(data.wires[n + 1]);
  }
  items.forEach((item, n) => item.h >= 0 && members[item.h].push(n));
  const insideOf = new Map(pictures.map((p, n) => [p.of, n]).filter(([of]) => of >= 0));
  const depths = pictures.map((p, n) => n).filter((n) => pictures[n].of < 0);
  let chosen = -1, ups = new Set(), downs = new Set(), leaves = new Set(); // what is chosen, and what is lit because of it
  let current = null; // the row that Tab leads to
  let hits = null, at = -1, flags = new Set(), folded = new Set();
  let picture = -1, base = -1, nodes = new Map(), view = { x: 0, y: 0, s: 1 }, size = [1, 1];

  // names are data: text only, never markup
  function make(tag, text = "", attributes = {}, ...children) {
    const element = document.createElement(tag);
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  const link = (text, item) => (item < 0 ? make("span", text) : make("a", text, { href: `#r${item}`, "data-to": item }));
  const join = (parts) => parts.flatMap((part, n) => (n ? [", ", part] : [part]));

  // -- what reaches what ----------------------------------------------------------------------------------------------------
  function within(item) { // an item that is no container is its own and only leaf
    const out = [], stack = [item];
    while (stack.length) {
      const n = stack.pop();
      if (members[n].length) stack.push(...members[n]);
      else if (n === item || items[n].k !== "decision") out.push(n);
    }
    return out;
  }
  function reach(starts, edges) {
    const seen = new Set(), stack = [...starts];
    while (stack.length) for (const n of edges[stack.pop()]) if (!seen.has(n)) (seen.add(n), stack.push(n));
    for (const n of starts) seen.delete(n);
    return seen;
  }

  // -- the table --------------------------------------------------------------------------------------------------------------
  const open = (n) => { for (let h = items[n].h; h >= 0; h = items[h].h) if (folded.has(h)) return false; return true; };
  function showRows() {
    const filtered = hits || flags.size, hitSet = new Set(hits);
    let any = false;
    for (const tr of rows) {
      const n = +tr.dataset.i, item = items[n];
      const match = (!hits || hitSet.has(n)) && (!flags.size || (item.f || []).some((f) => flags.has(f)));
      tr.hidden = filtered ? !match : !open(n);
      any ||= !tr.hidden;
      if (item.k === "container") {
        tr.classList.toggle("folded", folded.has(n));
        tr.setAttribute("aria-expanded", !folded.has(n));
      }
    }
    $("#nothing").hidden = any;
    if (!current || current.hidden) tabTo(rows.find((tr) => !tr.hidden)); // one row can always be reached by Tab
    $("#foldall").textContent = folded.size ? "Unfold all" : "Fold all";
    lightRows();
  }
  function lightRows() {
    for (const tr of rows) {
      const n = +tr.dataset.i;
      // a container shows what its rows are only while they are folded away
      const inner = items[n].k === "container" ? (folded.has(n) ? within(n) : []) : [n];
      const is = (set) => n !== chosen && inner.some((m) => set.has(m));
      tr.classList.toggle("sel", n === chosen);
      tr.setAttribute("aria-selected", n === chosen);
      const up = is(ups);
      tr.classList.toggle("up", up);
      tr.classList.toggle("down", !up && is(downs));
    }
  }
  function foldTo(depth) { // as the picture of that depth shows it
    folded = new Set(items.map((_, n) => n).filter((n) => items[n].k === "container" && members[n].length && items[n].l >= depth - 1));
    showRows();
  }
  function fold(n, on = !folded.has(n)) {
    if (!members[n].length) return;
    folded[on ? "add" : "delete"](n);
    showRows();
  }
  const shown = () => rows.filter((tr) => !tr.hidden);
  function tabTo(tr) {
    if (current) current.tabIndex = -1;
    current = tr || current;
    if (tr) tr.tabIndex = 0;
  }
  function focusRow(tr) {
    if (!tr) return;
    tabTo(tr);
    tr.focus({ preventScroll: true });
    tr.scrollIntoView({ block: "nearest" });
  }

  // -- the picture ------------------------------------------------------------------------------------------------------------
  function place() { $(".stage", pane)?.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.s})`); }
  function fitting() {
    const { width, height } = pane.getBoundingClientRect();
    return Math.min((width - 24) / size[0], (height - 24) / size[1], 1.6);
  }
  function fit(readable = false) { // a picture too tall to be read as a whole begins at its top
    const { width, height } = pane.getBoundingClientRect(), whole = fitting();
    const s = readable && whole < 0.5 ? Math.max(whole, Math.min(0.8, (width - 24) / size[0])) : whole;
    view = { s, x: (width - size[0] * s) / 2, y: Math.max(12, (height - size[1] * s) / 2) };
    place();
  }
  function zoom(factor, x = pane.clientWidth / 2, y = pane.clientHeight / 2) {
    const s = Math.min(6, Math.max(0.01, view.s * factor)), k = s / view.s;
    view = { s, x: x - (x - view.x) * k, y: y - (y - view.y) * k };
    place();
  }
  function setPicture(n, readable = true) {
    if (n < 0 || !pane) return;
    picture = n;
    if (pictures[n].of < 0) base = n;
    pane.replaceChildren($(`#p${n}`).content.cloneNode(true));
    const svg = $("svg", pane);
    size = [+svg.dataset.w, +svg.dataset.h];
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `Picture with ${pictures[n].nodes} nodes`);
    nodes = new Map($$(".n, .c", svg).map((g) => [+g.dataset.i, g]));
    for (const button of $$("[data-picture]")) button.setAttribute("aria-pressed", +button.dataset.picture === base);
    crumbs();
    fit(readable);
    light();
  }
  function crumbs() {
    const trail = [];
    for (let n = pictures[picture].of; n >= 0; n = items[n].h) trail.unshift(n);
    const parts = trail.map((n) => make("button", items[n].n, { type: "button", "data-open": n }));
    if (trail.length) parts.unshift(make("button", "whole model", { type: "button", "data-open": -1 }));
    $("#crumbs").replaceChildren(make("bdi", "", {}, ...parts.flatMap((part, n) => (n ? [" › ", part] : [part]))));
  }
  function look(item) { // inside of a container, or back at the whole
    const n = item < 0 ? base : insideOf.get(item);
    if (n !== undefined) setPicture(n);
    if (item >= 0 && n !== undefined) (folded.delete(item), showRows());
  }
  function light() {
    const svg = pane && $("svg", pane);
    if (!svg) return;
    const hitSet = new Set(hits), state = new Map();
    svg.classList.toggle("chosen", chosen >= 0);
    svg.classList.toggle("searched", !!hits && chosen < 0);
    for (const [n, g] of nodes) {
      const inner = n < 0 ? [] : g.classList.contains("container") || g.classList.contains("outside") ? within(n) : [n];
      const is = (set) => inner.some((m) => set.has(m));
      // of a chosen container that is open here its frame is marked, and what is in it stays bright
      const part = n >= 0 && g.classList.contains("n") && is(leaves), of = part && nodes.has(chosen) && n !== chosen;
      const mark = n >= 0 && n === chosen ? "sel" : of ? "in" : part ? "sel" : is(ups) ? "up" : is(downs) ? "down" : "";
      state.set(n, { up: is(ups), down: is(downs), sel: mark === "sel" || of }); // in a loop one may be both
      for (const name of ["sel", "in", "up", "down"]) g.classList.toggle(name, mark === name);
      g.classList.toggle("hit", hitSet.has(n) || is(hitSet));
    }
    for (const w of $$(".w", svg)) {
      const a = state.get(+w.dataset.a) || {}, b = state.get(+w.dataset.b) || {}, up = chosen >= 0 && !!a.up && !!(b.up || b.sel);
      w.classList.toggle("up", up);
      w.classList.toggle("in", !!a.sel && !!b.sel);
      w.classList.toggle("down", !up && !!b.down && !!(a.down || a.sel));
    }
  }
  function nodeOf(item) { // its own, that of the container it is folded in, or one of those within
    for (let n = item; n >= 0; n = items[n].h) if (nodes.has(n)) return nodes.get(n);
    return within(item).map((n) => nodes.get(n)).find(Boolean);
  }
  function bring(item) {
    const g = pane && nodeOf(item);
    if (!g) return;
    const box = g.getBoundingClientRect(), room = pane.getBoundingClientRect();
    if (box.left >= room.left && box.right <= room.right && box.top >= room.top && box.bottom <= room.bottom && view.s > 0.35) return;
    if (view.s < 0.5) zoom(0.8 / view.s);
    const now = g.getBoundingClientRect();
    view.x += room.left + room.width / 2 - now.left - now.width / 2;
    view.y += room.top + room.height / 2 - now.top - now.height / 2;
    place();
  }

  // -- choosing ---------------------------------------------------------------------------------------------------------------
  function choose(item, { scroll = true, pan = true } = {}) {
    chosen = item;
    leaves = new Set(item < 0 ? [] : within(item));
    ups = reach(leaves, fed);
    downs = reach(leaves, feeds);
    for (let h = item < 0 ? -1 : items[item].h; h >= 0; h = items[h].h) folded.delete(h);
    showRows();
    describe(item);
    light();
    if (item < 0) return;
    const tr = rowOf.get(item);
    if (tr && tr.hidden) { // a filter hides it
      flags.clear();
      search("");
      for (const chip of $$("[data-flag]")) chip.setAttribute("aria-pressed", false);
      showRows();
    }
    if (tr && scroll) tr.scrollIntoView({ block: "center" });
    if (tr) tabTo(tr);
    if (pan) bring(item);
  }
  function sourceOf([label, kind, ops, item, cut, share, reason]) {
    const line = make("span", "", cut ? { class: "cut", title: "no gradient flows back on this way" } : {});
    if (ops.length || cut) line.append(make("span", ops.join(" ← ") + (cut ? " ⇠ " : " ← "), { class: "op" }));
    line.append(link(kind === "parameter" || kind === "buffer" ? `[${label}]` : label, item));
    if (share) line.append(" ", make("small", share));
    if (reason) line.append(make("small", ` — ${reason}`));
    return line;
  }
  function describe(n) {
    panel.hidden = n < 0;
    if (n < 0) return;
    const item = items[n], facts = make("dl"), list = (parts) => make("ul", "", {}, ...parts.map((part) => make("li", "", {}, part)));
    const add = (name, ...parts) => parts.length && facts.append(make("dt", name), make("dd", "", {}, ...parts));
    const many = (all) => (all.length > 40 ? [...join(all.slice(0, 40).map((m) => link(items[m].n, m))), ` … ${all.length - 40} more`] : join(all.map((m) => link(items[m].n, m))));
    if (item.g) add("Seen in", `${item.g} of the passes`);
    if (item.s?.length) add("Gives", list(item.s.slice(0, 30)));
    if (item.p && item.p !== "0") add("Parameters", item.p + (item.shared ? ", shared with an earlier row" : ""));
    if (item.raised) add("Raised", "an exception ended this call");
    const inputs = (item.i || []).filter((tensor) => tensor[2].length || tensor[0]);
    add("Comes from", ...(inputs.length ? [list(inputs.map(([name, used, entries]) => {
      const line = make("span", name ? (name === "hidden" ? "by another door than its arguments: " : `${name}: `) : "", { class: "arg" });
      line.append(...join(entries.slice(0, 60).map(sourceOf)), entries.length > 60 ? ` … ${entries.length - 60} more` : "");
      if (!used) line.append(" ", make("em", "passed and not used"));
      return line;
    }))] : []));
    const next = new Set((members[n].length ? within(n) : [n]).flatMap((m) => feeds[m]).filter((m) => !leaves.has(m)));
    add("Goes to", ...many([...next].filter((m) => items[m].k !== "decision")));
    add("Decides", ...many([...next].filter((m) => items[m].k === "decision")));
    if (item.w) add("At", item.w, ...(item.c ? [" ", make("code", item.c)] : []));
    const near = data.breaks.filter((b) => [...b.before, ...b.after].some(([, m]) => m === n || leaves.has(m)));
    if (near.length) add("No gradient", list(near.slice(0, 20).map(broken)));
    if (n >= 0 && (ups.size || downs.size)) add("In all", `comes from ${ups.size.toLocaleString("en")}, goes to ${downs.size.toLocaleString("en")}, both lit`);
    const buttons = [make("button", "×", { type: "button", id: "close", "aria-label": "Close the details", title: "Close ( Esc )" })];
    if (insideOf.has(n)) buttons.unshift(make("button", "Look inside", { type: "button", "data-open": n }));
    const title = make("h2", item.n + (item.x ? ` ×${item.x}` : ""), {}, ...(item.t && item.t !== item.n ? [" ", make("span", item.t, { class: "type" })] : []));
    panel.replaceChildren(make("header", "", {}, title, ...buttons), facts);
    panel.scrollTop = 0;
  }
  function broken(b) {
    const side = (all) => join(all.slice(0, 12).map(([label, item]) => link(label, item))).concat(all.length > 12 ? [` … ${all.length - 12} more`] : []);
    return make("span", "", {}, make("b", b.op, { class: "cut" }), b.w ? ` at ${b.w} ` : " ", ...(b.c ? [make("code", b.c), " "] : []),
      "cuts off ", ...side(b.before), " from ", ...side(b.after));
  }

  // -- finding ----------------------------------------------------------------------------------------------------------------
  function search(text) {
    if (find.value !== text) find.value = text;
    const q = text.trim().toLowerCase();
    at = -1;
    hits = q ? items.map((_, n) => n).filter((n) => items[n].k !== "loop" && `${items[n].n}\n${items[n].t}\n${(items[n].i || []).flatMap((t) => t[2].flatMap((e) => e[2])).join("\n")}`.toLowerCase().includes(q)) : null;
    found.textContent = hits ? `${hits.length} found` : "";
    if (hits && chosen >= 0) choose(-1);
    else (showRows(), light());
  }
  function step(by) {
    if (!hits?.length) return;
    at = at < 0 && by < 0 ? hits.length - 1 : (at + by + hits.length) % hits.length;
    const before = [find.value, hits, at];
    choose(hits[at]);
    [, hits, at] = before;
    found.textContent = `${at + 1} of ${hits.length}`;
  }

  // -- what the reader does -------------------------------------------------------------------------------------------------------
  document.addEventListener("click", (event) => {
    const to = event.target.closest("[data-to]"), opens = event.target.closest("[data-open]"), tr = event.target.closest("tbody tr");
    if (to) (event.preventDefault(), choose(+to.dataset.to));
    else if (opens) look(+opens.dataset.open);
    else if (event.target.closest("#close")) choose(-1);
    else if (event.target.closest(".fold")) fold(+tr.dataset.i);
    else if (tr && !String(getSelection())) choose(+tr.dataset.i, { scroll: false });
  });
  find.addEventListener("input", () => search(find.value));
  find.addEventListener("keydown", (event) => event.key === "Enter" && (event.preventDefault(), step(event.shiftKey ? -1 : 1)));
  for (const chip of $$("[data-flag]")) chip.addEventListener("click", () => {
    const on = !flags.has(chip.dataset.flag);
    flags[on ? "add" : "delete"](chip.dataset.flag);
    chip.setAttribute("aria-pressed", on);
    showRows();
  });
  for (const button of $$("[data-picture]")) button.addEventListener("click", () => {
    setPicture(+button.dataset.picture);
    foldTo(pictures[picture].name === "all" ? Infinity : pictures[picture].depth);
    if (chosen >= 0) choose(chosen);
  });
  $("#foldall").addEventListener("click", () => foldTo(folded.size ? Infinity : 1));
  $("#theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input"), tr = event.target.closest("tbody tr");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      if (typing || hits) (search(""), typing?.blur());
      else if (chosen >= 0) choose(-1);
      else if (pane && pictures[picture]?.of >= 0) look(-1);
    } else if (typing) return;
    else if (event.key === "/") (event.preventDefault(), find.focus(), find.select());
    else if (event.key === "o" && chosen >= 0) look(chosen);
    else if (tr && rowKey(event, tr)) event.preventDefault();
    else if (pane && pictureKey(event)) event.preventDefault();
  });
  function rowKey({ key, target }, tr) {
    const all = shown(), n = all.indexOf(tr), item = +tr.dataset.i;
    if (target !== tr) return false;
    if (key === "ArrowDown" || key === "ArrowUp") focusRow(all[n + (key === "ArrowDown" ? 1 : -1)]);
    else if (key === "Home" || key === "End") focusRow(all.at(key === "Home" ? 0 : -1));
    else if (key === "Enter" || key === " ") choose(item, { scroll: false });
    else if (key === "ArrowRight") fold(item, false);
    else if (key === "ArrowLeft") (members[item].length && !folded.has(item) ? fold(item, true) : focusRow(rowOf.get(items[item].h)));
    else return false;
    return true;
  }
  function pictureKey({ key, target }) {
    const moves = { ArrowUp: [0, 60], ArrowDown: [0, -60], ArrowLeft: [60, 0], ArrowRight: [-60, 0] };
    if (key === "+" || key === "=") zoom(1.25);
    else if (key === "-") zoom(0.8);
    else if (key === "0") fit();
    else if (target === pane && moves[key]) ((view.x += moves[key][0]), (view.y += moves[key][1]), place());
    else return false;
    return true;
  }
  if (pane) {
    let from = null;
    pane.addEventListener("wheel", (event) => {
      const box = pane.getBoundingClientRect();
      event.preventDefault();
      zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    pane.addEventListener("pointerdown", (event) => event.button === 0 && (from = { x: event.clientX, y: event.clientY, view: { ...view }, moved: false }));
    pane.addEventListener("pointermove", (event) => {
      if (!from) return;
      const dx = event.clientX - from.x, dy = event.clientY - from.y;
      if (!from.moved && Math.hypot(dx, dy) < 5) return; // a click may tremble
      if (!from.moved) (pane.setPointerCapture(event.pointerId), pane.classList.add("drag"));
      from.moved = true;
      view = { ...from.view, x: from.view.x + dx, y: from.view.y + dy };
      place();
    });
    for (const end of ["pointerup", "pointercancel"]) pane.addEventListener(end, (event) => {
      const g = from && !from.moved && end === "pointerup" ? event.target.closest?.(".n, .c") : null, moved = from?.moved;
      from = null;
      pane.classList.remove("drag");
      if (g && +g.dataset.i >= 0) choose(+g.dataset.i, { pan: false });
      else if (!g && !moved && chosen >= 0) choose(-1);
    });
    pane.addEventListener("pointerover", (event) => { // tooltips are made when they are asked for: they would be half of the file
      const g = event.target.closest(".n, .c"), item = g && items[g.dataset.i];
      if (!item || $("title", g)) return;
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = [item.n, item.t !== item.n && item.t, insideOf.has(+g.dataset.i) && "double-click to look inside"].filter(Boolean).join("\n");
      g.prepend(title);
    });
    pane.addEventListener("dblclick", (event) => {
      const g = event.target.closest(".n, .c");
      if (g && +g.dataset.i >= 0) look(+g.dataset.i);
    });
    $("#in").addEventListener("click", () => zoom(1.25));
    $("#out").addEventListener("click", () => zoom(0.8));
    $("#fit").addEventListener("click", () => fit());
    new ResizeObserver(() => fit(true)).observe(pane);
    addEventListener("beforeprint", () => {
      if (picture < 0) return;
      $("svg", pane).setAttribute("viewBox", `0 0 ${size}`.replace(",", " "));
      $(".stage", pane).removeAttribute("transform");
    });
    addEventListener("afterprint", () => ($("svg", pane)?.removeAttribute("viewBox"), place()));
  }
  addEventListener("beforeprint", () => $$(".facts details").forEach((d) => (d.open = true)));

  if (data.breaks.length) {
    const box = $("#breaks");
    box.hidden = false;
    $("summary", box).textContent = `No gradient flows back past ${data.breaks.length} place${data.breaks.length > 1 ? "s" : ""} in the model`;
    $("ul", box).append(...data.breaks.map((b) => make("li", "", {}, broken(b))));
  }
  // at first the deepest picture that can be read as a whole
  const able = depths.filter((n) => !pictures[n].too);
  let first = able[0] ?? -1;
  if (pane) for (const n of able) {
    const svg = $("svg", $(`#p${n}`).content);
    size = [+svg.dataset.w, +svg.dataset.h];
    if (fitting() >= 0.72) first = n;
  }
  if (first >= 0) (setPicture(first), foldTo(pictures[first].name === "all" ? Infinity : pictures[first].depth));
  else showRows();
  $("#foldall").hidden = !rows.some((tr) => tr.classList.contains("container") && members[+tr.dataset.i].length);
  const tooMany = depths.filter((n) => pictures[n].too);
  if (pane && tooMany.length) {
    const box = $("#large");
    box.hidden = false;
    box.textContent = `${tooMany.map((n) => (pictures[n].name === "all" ? "Full detail" : `Depth ${pictures[n].name}`)).join(" and ")} would have ${Math.max(...tooMany.map((n) => pictures[n].nodes)).toLocaleString("en")} nodes, too many for one picture. ${able.length ? "Double-click a container to look inside." : "The table has all of them."}`;
    if (!able.length) pane.replaceWith(box);
  }
})();
