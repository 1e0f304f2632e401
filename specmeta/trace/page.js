"use strict";
// The page of a trace. `load` goes over the whole run, as the picture of the run does, which is made
// once for each size and theme; the search for the next mark may. Else a step costs what is drawn of
// it, the window of steps around it and all pages: what they need is found by binary search.

const $ = (id) => document.getElementById(id);
const meta = JSON.parse($("meta").textContent);

// --- The data: columns by row, by step and by event, as typed arrays.

const TYPES = {
  uint8: Uint8Array, int8: Int8Array, uint16: Uint16Array, int16: Int16Array, uint32: Uint32Array, int32: Int32Array,
};
const data = {};
// The rows of each request, and the events of each page, in order.
const index = {};
let numSteps = 0, numRequests = 0, numPages = 0, mostDrafts = 0, mostUsed = 1, laneOf = [], lanes = { slot: 0, row: 0 };

async function load() {
  const packed = bytesOf($("data").textContent);
  $("data").remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  for (const { name, type, at, length } of meta.arrays) data[name] = new TYPES[type](buffer, at, length);

  numSteps = data.first.length - 1;
  numRequests = meta.num_requests;
  numPages = data.event_page.length ? data.event_page[data.event_page.length - 1] + 1 : 0;
  index.request = group(data.request, numRequests);
  index.page = group(data.event_page, numPages);
  for (const name of ["emitted", "draft_tokens"]) data[`${name}_first`] = sums(data[`${name}_count`]);
  for (const name of ["drafts", "accepted"]) for (const count of data[name]) mostDrafts = Math.max(mostDrafts, count);
  for (const used of data.step_used_pages) mostUsed = Math.max(mostUsed, used);
  // Slots that no row ever carried have no lane.
  const slots = new Set(data.slot);
  slots.delete(-1);
  [...slots].sort((a, b) => a - b).forEach((slot, lane) => (laneOf[slot] = lane));
  lanes.slot = Math.max(slots.size, 1);
  for (let step = 0; step < numSteps; step++) lanes.row = Math.max(lanes.row, data.first[step + 1] - data.first[step]);
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function sums(counts) {
  const first = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) first[i + 1] = first[i] + counts[i];
  return first;
}

/** Where each key's items are, in their order: `items[first[k]] .. items[first[k + 1] - 1]`. */
function group(keys, count) {
  const counts = new Uint32Array(count);
  for (const key of keys) if (key >= 0) counts[key]++;
  const first = sums(counts), place = first.slice(), items = new Uint32Array(first[count]);
  keys.forEach((key, i) => { if (key >= 0) items[place[key]++] = i; });
  return { first, items };
}

/** The last of a key's items that lies before `end`, as `at` sees it; -1 where there is none. */
function lastBefore({ first, items }, key, end, at = (item) => item) {
  let low = first[key], high = first[key + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(items[middle]) < end) low = middle + 1;
    else high = middle;
  }
  return low > first[key] ? items[low - 1] : -1;
}

/** The step that has a row. */
function stepOf(row) {
  let low = 0, high = numSteps;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (data.first[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}

const rowAt = (request, step) => lastBefore(index.request, request, data.first[step + 1]);
const eventAt = (page, step) => lastBefore(index.page, page, step + 1, (event) => data.event_step[event]);
const tokens = (name, row) => data[name].subarray(data[`${name}_first`][row], data[`${name}_first`][row + 1]);
const committed = (row) => (data.committed_len[row] >= 0 ? data.committed_len[row] : data.seq_len[row]);
const pagesFor = (length) => Math.ceil(length / meta.page_size);
const laneOfRow = (row, step) => (state.lanes === "row" ? row - data.first[step] : data.slot[row] < 0 ? -1 : laneOf[data.slot[row]]);

/** How a page stands at a step: who has it, and whether the request's length reaches it. */
function pageAt(page, step, used = new Map()) {
  const event = eventAt(page, step);
  if (event < 0 || data.event_request[event] < 0) return { event, request: -1 };
  const request = data.event_request[event];
  if (!used.has(request)) {
    const row = rowAt(request, step);
    const now = row >= data.first[step];
    used.set(request, row < 0 ? [0, 0] : [now ? data.used_pages[row] : 0, pagesFor(committed(row))]);
  }
  const [reached, kept] = used.get(request), place = data.event_place[event];
  const use = place < kept ? "used" : place < reached ? "given up" : "allocated";
  return { event, request, use, place, handedOver: data.event_step[event] === step && data.event_previous[event] >= 0 };
}

// --- What is chosen.

const state = { step: 0, request: -1, page: -1, lanes: "slot", cell: 0, window: 0 };

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const cells = () => Math.max(1, Math.floor(timeline.width / state.cell));

function goTo(step) {
  state.step = clamp(step, 0, numSteps - 1);
  keepInWindow();
  invalidate();
}

/** Move the window of steps only where the chosen one would leave it. */
function keepInWindow() {
  const count = cells(), margin = Math.min(3, count >> 2);
  state.window = clamp(state.window, state.step + 1 + margin - count, state.step - margin);
  state.window = clamp(state.window, 0, Math.max(0, numSteps - count));
}

function choose(request, page = -1) {
  state.request = request;
  state.page = page;
  invalidate();
}

let isDrawing = false, tableTimer = 0;
function invalidate() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    $("slider").value = state.step;
    $("slider").setAttribute("aria-valuetext", `step ${state.step} of ${numSteps - 1}`);
    $("step").textContent = `${state.step} of ${numSteps - 1}`;
    $("pages-step").textContent = $("rows-step").textContent = state.step;
    drawRun();
    drawTimeline();
    drawPages();
    // Thousands of cells of a table would hold the slider up.
    clearTimeout(tableTimer);
    tableTimer = setTimeout(showTable, 120);
  });
}

// --- Colours: the style sheet's, as numbers; a hue by request.

const colours = {};
function readColours() {
  const probe = document.body.appendChild(document.createElement("span"));
  for (const name of ["panel", "ink", "soft", "line", "empty", "focus", "prompt", "token", "accepted", "rejected", "fault", "rewind", "handover"]) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  requestColours.clear();
}
const requestColours = new Map();
function colourOf(request) {
  if (!requestColours.has(request)) {
    const light = isDark() ? 62 : 50, hue = (request * 137.508 + 210) % 360;
    requestColours.set(request, `hsl(${hue.toFixed(1)} 58% ${light}%)`);
  }
  return requestColours.get(request);
}
const rgb = (colour) => colour.match(/[\d.]+/g).slice(0, 3).map(Number);
const mix = (a, b, share) => rgb(a).map((value, i) => Math.round(value + (rgb(b)[i] - value) * share));
const isDark = () => document.documentElement.dataset.theme === "dark"
  || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);

/** A canvas in CSS pixels, sharp on every screen. */
function surface(canvas, height) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth;
  const size = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// --- The run: acceptance, pages and marks over all steps, drawn once for each size and theme.

const RUN_HEIGHT = 84, PLOT = 58;
let runPicture = null;

function drawRun() {
  const { context, width } = surface($("run"), RUN_HEIGHT);
  const scale = devicePixelRatio || 1;
  if (!runPicture || runPicture.width !== $("run").width) {
    runPicture = new OffscreenCanvas($("run").width, $("run").height);
    const picture = runPicture.getContext("2d");
    picture.scale(scale, scale);
    drawWholeRun(picture, width);
  }
  context.drawImage(runPicture, 0, 0, width, RUN_HEIGHT);
  const x = (step) => (step / numSteps) * width;
  context.fillStyle = colours.focus;
  context.globalAlpha = 0.14;
  context.fillRect(x(state.window), 0, Math.max(2, x(Math.min(cells(), numSteps))), RUN_HEIGHT);
  context.globalAlpha = 1;
  context.fillRect(Math.min(x(state.step + 0.5), width - 1) - 1, 0, 2, RUN_HEIGHT);
}

function drawWholeRun(context, width) {
  context.fillStyle = colours.empty;
  context.fillRect(0, 0, width, PLOT);
  const columns = Math.min(Math.ceil(width), numSteps), wide = width / columns;
  const line = [], marks = { faults: [], rewinds: [], handovers: [] };
  for (let column = 0; column < columns; column++) {
    const begin = Math.floor((column * numSteps) / columns), end = Math.floor(((column + 1) * numSteps) / columns);
    const add = (name) => data[name].subarray(begin, end).reduce((a, b) => a + b, 0);
    const drafts = add("step_drafts");
    const x = column * wide, high = drafts ? (add("step_accepted") / drafts) * PLOT : 0;
    context.fillStyle = colours.accepted;
    context.globalAlpha = 0.6;
    context.fillRect(x, PLOT - high, wide, high);
    context.globalAlpha = 1;
    line.push([x + wide / 2, PLOT - (add("step_used_pages") / (end - begin) / mostUsed) * (PLOT - 3) - 1]);
    for (const name in marks) marks[name].push(add(`step_${name}`));
  }
  Object.entries(marks).forEach(([name, counts], lane) => {
    const most = counts.reduce((a, b) => Math.max(a, b), 1);
    context.fillStyle = colours[name.slice(0, -1)];
    counts.forEach((count, column) => {
      context.globalAlpha = count ? 0.3 + (0.7 * count) / most : 0;
      context.fillRect(column * wide, PLOT + 2 + lane * 8, clamp(wide - 1, 1.5, 6), 7);
    });
  });
  context.globalAlpha = 1;
  context.strokeStyle = colours.token;
  context.lineWidth = 1.5;
  context.beginPath();
  line.forEach(([x, y]) => context.lineTo(x, y));
  context.stroke();
}

// --- The steps: cells by lane. Small ones are pixels of a picture, large ones show each token.

const timeline = { width: 0, lane: 0 };
const DETAIL_CELL = 12, DETAIL_LANE = 9, AXIS = 18;

function layOutTimeline() {
  timeline.width = $("timeline").clientWidth - 1;
  timeline.lane = clamp(Math.floor(500 / lanes[state.lanes]), 3, 26);
  if (!state.cell) {
    const detailed = clamp(6 * (mostDrafts + 1) + 4, 16, 48);
    const all = timeline.width / numSteps;
    state.cell = clamp(all, timeline.lane >= DETAIL_LANE ? detailed : 4, detailed * 1.5);
  }
  keepInWindow();
}

function drawTimeline() {
  const count = lanes[state.lanes];
  const { context, width } = surface($("timeline"), count * timeline.lane + AXIS);
  const end = Math.min(numSteps, state.window + cells());
  const isDetailed = state.cell >= DETAIL_CELL && timeline.lane >= DETAIL_LANE;
  context.fillStyle = colours.empty;
  context.fillRect(0, 0, Math.min(width, (end - state.window) * state.cell), count * timeline.lane);
  $("small").hidden = isDetailed;
  if (isDetailed) drawCells(context, end);
  else drawPixels(context, end, count);
  drawAxis(context, end, count * timeline.lane);
  const x = (state.step - state.window) * state.cell;
  context.strokeStyle = colours.focus;
  context.lineWidth = 2;
  context.strokeRect(x, 1, Math.max(state.cell, 3), count * timeline.lane - 2);
}

function drawAxis(context, end, y) {
  const apart = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((n) => n * state.cell >= 56) || 10000;
  context.fillStyle = colours.soft;
  context.font = "11px system-ui, sans-serif";
  for (let step = Math.ceil(state.window / apart) * apart; step < end; step += apart) {
    context.fillText(step, (step - state.window) * state.cell + 1, y + 13);
  }
}

function drawPixels(context, end, count) {
  const picture = new ImageData(Math.max(1, end - state.window), count);
  const pixels = new Uint32Array(picture.data.buffer);
  const pack = ([r, g, b]) => 0xff000000 | (b << 16) | (g << 8) | r;
  const rates = Array.from({ length: 17 }, (_, i) => pack(mix(colours.rejected, colours.accepted, i / 16)));
  const flat = {};
  for (const name of ["prompt", "token", "fault"]) flat[name] = pack(rgb(colours[name]));
  for (let step = state.window; step < end; step++) {
    for (let row = data.first[step]; row < data.first[step + 1]; row++) {
      const lane = laneOfRow(row, step);
      if (lane < 0) continue;
      const drafts = data.drafts[row];
      let colour = drafts > 0 ? rates[Math.round((16 * data.accepted[row]) / drafts)] : flat.token;
      if (data.prompt_len[row] > 0) colour = flat.prompt;
      if (data.new_faults[row]) colour = flat.fault;
      else if (!data.query_len[row]) continue;
      if (state.request >= 0 && data.request[row] !== state.request) colour = (colour & 0xffffff) | 0x38000000;
      pixels[lane * picture.width + step - state.window] = colour;
    }
  }
  const small = new OffscreenCanvas(picture.width, count);
  small.getContext("2d").putImageData(picture, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, picture.width * state.cell, count * timeline.lane);
}

function drawCells(context, end) {
  for (let step = state.window; step < end; step++) {
    for (let row = data.first[step]; row < data.first[step + 1]; row++) {
      const lane = laneOfRow(row, step);
      if (lane < 0) continue;
      const x = (step - state.window) * state.cell + 1, y = lane * timeline.lane;
      const isOther = state.request >= 0 && data.request[row] !== state.request;
      context.globalAlpha = isOther ? 0.25 : 1;
      drawCell(context, row, x, y + 1, state.cell - 3, timeline.lane - 2);
    }
  }
  context.globalAlpha = 1;
}

function drawCell(context, row, x, y, width, height) {
  const bar = Math.min(4, Math.max(2, height >> 2)), high = height - bar - 1;
  if (data.request[row] >= 0) {
    context.fillStyle = colourOf(data.request[row]);
    context.fillRect(x - 1, y + height - bar, state.cell, bar);
  }
  const drafts = Math.max(data.drafts[row], data.accepted[row], 0), prompt = data.prompt_len[row];
  const box = width / (mostDrafts + 1);
  if (prompt > 0) {
    context.fillStyle = colours.prompt;
    context.fillRect(x, y, width - drafts * box, high);
    if (width - drafts * box > 22 && high >= 10) {
      context.fillStyle = colours.panel;
      context.font = `${Math.min(11, high - 1)}px system-ui, sans-serif`;
      context.textBaseline = "middle";
      context.fillText(prompt, x + 3, y + high / 2 + 0.5);
      context.textBaseline = "alphabetic";
    }
  } else if (data.query_len[row] > 0) {
    context.fillStyle = colours.token;
    context.fillRect(x, y, box - 1, high);
  }
  const begin = prompt > 0 ? x + width - drafts * box : x + box;
  for (let k = 0; k < drafts; k++) {
    if (k < data.accepted[row]) {
      context.fillStyle = colours.accepted;
      context.fillRect(begin + k * box, y, box - 1, high);
    } else {
      context.strokeStyle = colours.rejected;
      context.lineWidth = 1.2;
      context.strokeRect(begin + k * box + 0.6, y + 0.6, box - 2.2, high - 1.2);
    }
  }
  context.font = `bold ${Math.min(13, height)}px system-ui, sans-serif`;
  if (data.rewound_pages[row]) {
    context.fillStyle = colours.rewind;
    context.fillText("◄", x + width - 9, y + Math.min(10, high));
  }
  if (data.new_faults[row]) {
    context.strokeStyle = context.fillStyle = colours.fault;
    context.lineWidth = 2;
    context.strokeRect(x, y, width, high);
    context.fillText("!", x + width / 2 - 2, y + Math.min(11, high));
  }
}

// --- The pages: a map at the chosen step.

const map = { cell: 0, columns: 1 };

function layOutMap() {
  const width = $("pages").clientWidth;
  map.cell = clamp(Math.floor(Math.sqrt((width * 460) / Math.max(numPages, 1))), 5, 30);
  map.columns = Math.max(1, Math.floor(width / map.cell));
}

function drawPages() {
  const rows = Math.ceil(numPages / map.columns);
  const { context } = surface($("pages"), Math.max(rows * map.cell, 1));
  const used = new Map(), gap = map.cell > 7 ? 2 : 1, size = map.cell - gap, given = [];
  let held = 0, reached = 0;
  for (let page = 0; page < numPages; page++) {
    const x = (page % map.columns) * map.cell, y = Math.floor(page / map.columns) * map.cell;
    const at = pageAt(page, state.step, used);
    const isOther = state.page >= 0 ? page !== state.page : state.request >= 0 && at.request !== state.request;
    context.globalAlpha = isOther ? 0.28 : 1;
    if (at.request < 0) {
      context.fillStyle = colours.empty;
      context.fillRect(x, y, size, size);
    } else {
      held++;
      if (at.use !== "allocated") reached++;
      drawPage(context, at, x, y, size, isOther ? 0.28 : 1);
      if (at.handedOver) {
        given.push([page, at]);
        ring(context, colours.handover, x, y, size);
      }
      if (data.event_holders[at.event] > 1) ring(context, colours.fault, x, y, size);
    }
    if (map.cell >= 20) {
      context.fillStyle = at.use === "used" ? colours.panel : colours.soft;
      context.font = "9.5px system-ui, sans-serif";
      context.fillText(page, x + 2.5, y + size - 4);
    }
    if (page === state.page) ring(context, colours.focus, x, y, size);
  }
  context.globalAlpha = 1;
  showEvents(held, reached, given);
}

function drawPage(context, at, x, y, size, alpha) {
  context.fillStyle = context.strokeStyle = colourOf(at.request);
  if (at.use === "used") {
    context.fillRect(x, y, size, size);
    return;
  }
  context.globalAlpha = alpha * 0.25;
  context.fillRect(x, y, size, size);
  context.globalAlpha = alpha;
  if (at.use === "given up") {
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + size, y);
    context.lineTo(x, y + size);
    context.fill();
    context.strokeStyle = colours.rewind;
  }
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
}

function ring(context, colour, x, y, size) {
  context.strokeStyle = colour;
  context.lineWidth = size > 8 ? 2.5 : 1.5;
  context.strokeRect(x + 0.75, y + 0.75, size - 1.5, size - 1.5);
}

function showEvents(held, reached, given) {
  const parts = [numPages ? `${reached} pages used of ${held} allocated.` : "This trace has no pages."];
  if (given.length) {
    const some = given.slice(0, 6).map(([page, at]) => `page ${page} from request ${data.event_previous[at.event]} to ${at.request}`);
    parts.push(`Handed over: ${some.join(", ")}${given.length > 6 ? `, and ${given.length - 6} more` : ""}.`);
  }
  if (state.page >= 0) parts.push(history(state.page));
  const text = parts.join(" ");
  if ($("events").textContent !== text) $("events").textContent = text;
}

/** Who had a page around the chosen step, in words. */
function history(page) {
  const most = 6, { first, items } = index.page, at = eventAt(page, state.step);
  let begin = first[page];
  while (items[begin] < at && begin < first[page + 1]) begin++;
  begin = Math.max(first[page], begin - (most >> 1));
  const words = [];
  for (let i = begin; i < Math.min(first[page + 1], begin + most); i++) {
    const request = data.event_request[items[i]];
    words.push(`${data.event_step[items[i]]} ${request < 0 ? "free" : `request ${request}`}`);
  }
  const more = begin + most < first[page + 1] ? ", …" : ".";
  return `Page ${page}, from step: ${begin > first[page] ? "…, " : ""}${words.join(", ")}${more}`;
}

// --- Numbers: the tip under the pointer, and the table.

const unknown = (value) => (value < 0 ? "–" : String(value));
/** The names of a status word's bits, and what no name stands for as a number. */
function faultNames(word) {
  const names = Object.keys(meta.status).filter((name) => word & meta.status[name]);
  const rest = names.reduce((bits, name) => bits & ~meta.status[name], word);
  return [...names, ...(rest ? [rest] : [])].join(", ");
}
const plural = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;

function rewindOf(row) {
  const pages = data.rewound_pages[row];
  return data.rewound_tokens[row] ? `${plural(data.rewound_tokens[row], "token")}${pages ? `, ${plural(pages, "page")}` : ""}` : "";
}

function describeRow(row) {
  const step = stepOf(row), staged = data.staged_len[row], parts = [];
  if (data.prompt_len[row]) parts.push(`${data.prompt_len[row]} of the prompt`);
  const certain = data.query_len[row] - data.prompt_len[row] - Math.max(data.drafts[row], 0);
  if (certain > 0) parts.push(`${certain} certain`);
  if (data.drafts[row] > 0) parts.push(plural(data.drafts[row], "draft"));
  return {
    title: `Step ${step}, row ${row - data.first[step]}`,
    slot: unknown(data.slot[row]),
    request: unknown(data.request[row]),
    length: (staged >= 0 ? `${staged} staged, ` : "") + data.seq_len[row]
      + (data.committed_len[row] >= 0 ? `, ${data.committed_len[row]} committed` : ""),
    "query tokens": `${data.query_len[row]}${parts.length ? ` (${parts.join(", ")})` : ""}, behind ${data.cached_len[row]} cached`,
    accepted: data.accepted[row] < 0 ? "" : `${data.accepted[row]}${data.drafts[row] >= 0 ? ` of ${data.drafts[row]}` : ""}`,
    drafts: tokens("draft_tokens", row).join(" "),
    emitted: tokens("emitted", row).join(" "),
    "pages used": String(data.used_pages[row]),
    "given up": rewindOf(row),
    status: faultNames(data.status[row]),
  };
}

function describePage(page) {
  const at = pageAt(page, state.step);
  const facts = { title: `Page ${page} at step ${state.step}` };
  if (at.request < 0) facts.held = "by nobody";
  else {
    facts.request = String(at.request);
    facts.place = `${at.place + 1} of its pages, ${at.use === "given up" ? "used, given up in this step" : at.use}`;
    if (data.event_holders[at.event] > 1) facts.held = `by ${data.event_holders[at.event]} at once`;
    facts.since = `step ${data.event_step[at.event]}`;
    if (data.event_previous[at.event] >= 0) facts["handed over"] = `from request ${data.event_previous[at.event]}`;
  }
  return facts;
}

function showTip(event, facts) {
  const tip = $("tip");
  tip.hidden = !facts;
  if (!facts) return;
  const { title, ...others } = facts;
  const list = document.createElement("dl"), heading = document.createElement("b");
  heading.textContent = title;
  for (const [name, value] of Object.entries(others)) {
    if (value === "") continue;
    list.append(element("dt", name), element("dd", value));
  }
  tip.replaceChildren(heading, list);
  const { width, height } = tip.getBoundingClientRect();
  const x = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${clamp(event.clientY + 14, 4, Math.max(4, innerHeight - height - 4))}px`;
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

const COLUMNS = {
  row: (row) => row - data.first[state.step],
  slot: (row) => unknown(data.slot[row]),
  request: (row) => unknown(data.request[row]),
  cached: (row) => data.cached_len[row],
  query: (row) => data.query_len[row],
  prompt: (row) => data.prompt_len[row] || "",
  drafts: (row) => unknown(data.drafts[row]),
  accepted: (row) => unknown(data.accepted[row]),
  length: (row) => data.seq_len[row],
  committed: (row) => unknown(data.committed_len[row]),
  pages: (row) => data.used_pages[row],
  "given up": rewindOf,
  status: (row) => faultNames(data.status[row]),
  emitted: (row) => tokens("emitted", row).join(" "),
};

function showTable() {
  const lines = [];
  for (let row = data.first[state.step]; row < data.first[state.step + 1]; row++) {
    const line = document.createElement("tr");
    line.dataset.row = row;
    for (const [name, of] of Object.entries(COLUMNS)) {
      const cell = element("td", of(row));
      if (name === "status") cell.className = "bad";
      if (name === "request" && data.request[row] >= 0) {
        const swatch = document.createElement("span");
        swatch.className = "swatch";
        swatch.style.background = colourOf(data.request[row]);
        cell.prepend(swatch);
      }
      line.append(cell);
    }
    lines.push(line);
    if (data.request[row] >= 0 && data.request[row] === state.request) line.setAttribute("aria-selected", "true");
  }
  $("rows").replaceChildren(...lines);
  $("rows").querySelector("[aria-selected]")?.scrollIntoView({ block: "nearest" });
  $("chosen").textContent = state.request < 0 ? "" : describeRequest(state.request);
}

function describeRequest(request) {
  const { first, items } = index.request, own = items.subarray(first[request], first[request + 1]);
  if (!own.length) return `Request ${request} was in no step.`;
  let emitted = 0, drafts = 0, accepted = 0;
  for (const row of own) {
    emitted += data.emitted_count[row];
    if (data.prompt_len[row]) continue;
    drafts += Math.max(data.drafts[row], 0);
    accepted += Math.max(data.accepted[row], 0);
  }
  const rate = drafts ? `, ${accepted} of ${drafts} drafts accepted (${((100 * accepted) / drafts).toFixed(1)}%)` : "";
  return `Request ${request}: slot ${data.slot[own[0]]}, steps ${stepOf(own[0])} to ${stepOf(own[own.length - 1])}, ${plural(emitted, "token")}${rate}.`;
}

// --- Search: a request, a page or a step; again, where it next changes.

let lastQuery = "";

function find(query) {
  const again = query === lastQuery;
  lastQuery = query;
  const match = query.trim().toLowerCase().match(/^(request|r|page|p|step|s)?\s*(\d+)$/);
  if (!match) return say(query.trim() ? "Expected a request, a page or a step: request 3, page 40, step 12." : "");
  const kind = (match[1] || "request")[0], number = Number(match[2]);
  if (kind === "s") {
    if (number >= numSteps) return say(`No step ${number}: the last is ${numSteps - 1}.`);
    say(`Step ${number}.`);
    return goTo(number);
  }
  if (kind === "r") return findRequest(number, again);
  return findPage(number, again);
}

function say(text) {
  $("found").textContent = text;
}

function findRequest(request, again) {
  const { first, items } = index.request;
  if (request >= numRequests || first[request] === first[request + 1]) {
    return say(`No request ${request}: they are 0 to ${numRequests - 1}.`);
  }
  const begin = stepOf(items[first[request]]), end = stepOf(items[first[request + 1] - 1]);
  choose(request);
  say(describeRequest(request));
  if (again || state.step < begin || state.step > end) goTo(again && state.step === begin ? end : begin);
}

function findPage(page, again) {
  const { first, items } = index.page;
  if (page >= numPages || first[page] === first[page + 1]) return say(`No request had page ${page}.`);
  const own = Array.from(items.subarray(first[page], first[page + 1]), (event) => data.event_step[event]);
  if (again || pageAt(page, state.step).request < 0) goTo(own.find((step) => step > state.step) ?? own[0]);
  choose(pageAt(page, state.step).request, page);
  say(history(page));
}

function nextMark(direction) {
  const kind = $("kind").value, names = kind === "marks" ? ["faults", "rewinds", "handovers"] : [kind];
  for (let step = state.step + direction; step >= 0 && step < numSteps; step += direction) {
    if (names.some((name) => data[`step_${name}`][step])) {
      say(names.filter((name) => data[`step_${name}`][step])
        .map((name) => `${data[`step_${name}`][step]} ${{ faults: "rows with a fault", rewinds: "rows rewound over a page", handovers: "pages handed over" }[name]}`)
        .join(", ") + ` in step ${step}.`);
      return goTo(step);
    }
  }
  say(`None ${direction > 0 ? "behind" : "before"} step ${state.step}.`);
}

// --- Controls.

function chooseRow(direction) {
  const begin = data.first[state.step], end = data.first[state.step + 1];
  let row = direction > 0 ? begin - 1 : end;
  for (let i = begin; i < end; i++) if (data.request[i] === state.request && state.request >= 0) row = i;
  for (row += direction; row >= begin && row < end; row += direction) {
    if (data.request[row] >= 0) return choose(data.request[row]);
  }
}

function zoom(factor) {
  state.cell = clamp(state.cell * factor, 2, 120);
  const middle = cells() >> 1;
  state.window = state.step - middle;
  keepInWindow();
  invalidate();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  restyle();
}

function restyle() {
  readColours();
  runPicture = null;
  invalidate();
}

const KEYS = {
  ArrowLeft: (event) => goTo(state.step - (event.shiftKey ? 10 : 1)),
  ArrowRight: (event) => goTo(state.step + (event.shiftKey ? 10 : 1)),
  PageUp: () => goTo(state.step - cells()),
  PageDown: () => goTo(state.step + cells()),
  Home: () => goTo(0),
  End: () => goTo(numSteps - 1),
  ArrowUp: () => chooseRow(-1),
  ArrowDown: () => chooseRow(1),
  n: () => nextMark(1),
  p: () => nextMark(-1),
  "+": () => zoom(1.5),
  "=": () => zoom(1.5),
  "-": () => zoom(1 / 1.5),
  "/": () => $("query").select(),
  "?": () => $("keys").showModal(),
  t: () => setTheme(isDark() ? "light" : "dark"),
  Escape: () => { choose(-1); say(""); },
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  if (event.target === $("query")) {
    if (event.key === "Escape") { $("query").value = ""; $("query").blur(); KEYS.Escape(); }
    return;
  }
  if (event.target.tagName === "SELECT" || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key](event);
}

/** The step and row under the pointer; a row of -1 where the lane is empty. */
function underPointer(event) {
  const step = state.window + Math.floor(event.offsetX / state.cell), lane = Math.floor(event.offsetY / timeline.lane);
  if (step >= Math.min(numSteps, state.window + cells())) return null;
  for (let row = data.first[step]; row < data.first[step + 1]; row++) {
    if (laneOfRow(row, step) === lane) return { step, row };
  }
  return { step, row: -1 };
}

function pageUnderPointer(event) {
  const column = Math.floor(event.offsetX / map.cell);
  const page = Math.floor(event.offsetY / map.cell) * map.columns + column;
  return column < map.columns && page < numPages ? page : -1;
}

function listen() {
  document.addEventListener("keydown", onKey);
  $("slider").addEventListener("input", () => goTo(Number($("slider").value)));
  $("back").addEventListener("click", () => goTo(state.step - 1));
  $("on").addEventListener("click", () => goTo(state.step + 1));
  $("previous-mark").addEventListener("click", () => nextMark(-1));
  $("next-mark").addEventListener("click", () => nextMark(1));
  $("zoom-in").addEventListener("click", () => zoom(1.5));
  $("zoom-out").addEventListener("click", () => zoom(1 / 1.5));
  $("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  $("help").addEventListener("click", () => $("keys").showModal());
  $("search").addEventListener("submit", (event) => { event.preventDefault(); find($("query").value); });
  $("lanes").addEventListener("change", () => { state.lanes = $("lanes").value; layOutTimeline(); invalidate(); });
  const drag = (event) => { if (event.buttons & 1) goTo(Math.floor((event.offsetX / $("run").clientWidth) * numSteps)); };
  $("run").addEventListener("pointerdown", drag);
  $("run").addEventListener("pointermove", drag);
  $("timeline").addEventListener("pointermove", (event) => {
    const at = underPointer(event);
    showTip(event, at && at.row >= 0 ? describeRow(at.row) : null);
  });
  $("timeline").addEventListener("click", (event) => {
    const at = underPointer(event);
    if (!at) return;
    choose(at.row >= 0 ? data.request[at.row] : -1);
    goTo(at.step);
  });
  $("pages").addEventListener("pointermove", (event) => {
    const page = pageUnderPointer(event);
    showTip(event, page < 0 ? null : describePage(page));
  });
  $("pages").addEventListener("click", (event) => {
    const page = pageUnderPointer(event);
    if (page < 0) return;
    choose(pageAt(page, state.step).request, page);
  });
  for (const canvas of [$("timeline"), $("pages")]) canvas.addEventListener("pointerleave", () => showTip(null, null));
  $("rows").addEventListener("click", (event) => choose(data.request[event.target.closest("tr").dataset.row]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  new ResizeObserver(() => { layOutTimeline(); layOutMap(); runPicture = null; invalidate(); }).observe(document.querySelector("main"));
}

// What these say where nothing is wrong.
const FINE = { "pages held twice": "0", faults: "none" };

function showSummary() {
  for (const [name, text] of meta.summary) {
    const pair = document.createElement("div"), value = element("dd", text);
    if (name in FINE && text !== FINE[name]) value.className = "bad";
    pair.append(element("dt", name), value);
    $("summary").append(pair);
  }
  $("note").hidden = !meta.note;
  $("note").textContent = meta.note && `Note: ${meta.note}.`;
  for (const name of Object.keys(COLUMNS)) {
    const head = element("th", name);
    head.scope = "col";
    $("names").append(head);
  }
}

load().then(() => {
  $("slider").max = numSteps - 1;
  $("theme").textContent = isDark() ? "Light" : "Dark";
  readColours();
  showSummary();
  layOutTimeline();
  layOutMap();
  listen();
  goTo(0);
  document.documentElement.dataset.ready = "";
});
