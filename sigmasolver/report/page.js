"use strict";

/* What can be taken along */

const take = (name, blob) => {
  const link = document.createElement("a");
  link.download = name;
  link.href = URL.createObjectURL(blob);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
};

const takeSvg = (name, svg, kind) => {
  if (kind === "svg") {
    take(`${name}.svg`, new Blob([svg], { type: "image/svg+xml" }));
    return;
  }
  const image = new Image();
  image.addEventListener("load", () => {
    const canvas = document.createElement("canvas");
    canvas.width = 2 * image.width;
    canvas.height = 2 * image.height;
    const context = canvas.getContext("2d");
    context.fillStyle = "#ffffff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => take(`${name}.png`, blob));
  });
  image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
};

const onTake = (root, act) => {
  for (const button of root.querySelectorAll("[data-take]")) {
    button.hidden = false;
    button.addEventListener("click", () => act(button.dataset.take, button));
  }
};

/* Whatever is taken along is drawn as on a light page. */
const inLight = (act) => {
  const { classList } = document.documentElement;
  classList.add("light");
  const made = act();
  classList.remove("light");
  return made;
};

/* Curves */

(() => {
  const figure = document.getElementById("errors");
  const chart = figure.querySelector(".chart");
  const rows = [...figure.querySelectorAll(".numbers tbody tr")];
  const places = rows.map((row) => Number(row.dataset.x));
  const slider = figure.querySelector("input[type=range]");
  const cursor = figure.querySelector(".cursor");
  const tip = figure.querySelector(".tip");
  const entries = [...figure.querySelectorAll(".legend li")];
  let shown = rows.length - 1;

  // The table of all numbers is the one source of what is read out.
  const reading = (index, model) => {
    const cell = rows[index].cells[model + 1];
    const spread = cell.dataset[figure.dataset.band];
    return spread ? `${cell.textContent} ± ${spread}` : cell.textContent;
  };

  const show = (index) => {
    shown = index;
    const lead = rows[index].cells[0].textContent;
    figure.querySelector("output").textContent = lead;
    entries.forEach((entry, i) => { entry.querySelector("data").textContent = reading(index, i); });
    cursor.setAttribute("transform", `translate(${places[index]} 0)`);
    cursor.setAttribute("visibility", "visible");
    chart.querySelectorAll("circle").forEach((dot) => dot.classList.toggle("on", Number(dot.dataset.lead) === index));
    if (slider) {
      slider.value = index;
      slider.setAttribute("aria-valuetext", `lead ${lead}`);
    }
  };

  const nearest = (event) => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
    const distances = places.map((place) => Math.abs(place - x));
    return distances.indexOf(Math.min(...distances));
  };

  const point = (event) => {
    show(nearest(event));
    const head = document.createElement("p");
    head.textContent = `lead ${rows[shown].cells[0].textContent}`;
    const lines = entries.map((entry, i) => {
      const line = document.createElement("p");
      line.append(entry.querySelector("svg").cloneNode(true), entry.querySelector("span").textContent);
      const number = document.createElement("b");
      const told = reading(shown, i);
      number.textContent = /\d$/.test(told) ? `${told} %` : told;
      line.append(number);
      return line;
    });
    tip.replaceChildren(head, ...lines);
    tip.hidden = false;
    const box = chart.getBoundingClientRect(), above = box.top - chart.parentNode.getBoundingClientRect().top;
    const x = places[shown] * box.width / chart.viewBox.baseVal.width;
    const left = x > box.width / 2 ? x - tip.offsetWidth - 14 : x + 14;
    const top = event.clientY - box.top - tip.offsetHeight / 2;
    tip.style.left = `${Math.max(0, Math.min(left, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${above + Math.max(0, Math.min(top, box.height - tip.offsetHeight))}px`;
  };

  for (const kind of ["pointermove", "pointerdown"]) chart.addEventListener(kind, point);
  chart.addEventListener("pointerleave", () => { tip.hidden = true; });
  if (slider) {
    slider.hidden = false;
    slider.addEventListener("input", () => show(Number(slider.value)));
  }
  for (const choice of figure.querySelectorAll(".choice")) {
    choice.hidden = false;
    const choose = () => {
      figure.dataset[choice.dataset.of] = choice.querySelector(":checked").value;
      show(shown);
    };
    choice.addEventListener("change", choose);
    choose(); // a reloaded page may remember the choice
  }
  show(shown);

  const MARGIN = 16;
  const KEPT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin"];
  const svg = (tag, facts, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(facts)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  };

  // The chart as a file of its own: styles become attributes, the legend and what was measured stand below it.
  const alone = () => {
    const copy = chart.cloneNode(true);
    const { width, height } = chart.viewBox.baseVal;
    const pairs = [...chart.querySelectorAll("*")].map((own, i) => [own, copy.querySelectorAll("*")[i]]);
    for (const [own, other] of pairs) {
      const style = getComputedStyle(own);
      if (style.display === "none" || own === cursor) other.dataset.gone = "";
      other.removeAttribute("class");
      for (const name of KEPT) other.setAttribute(name, style.getPropertyValue(name));
      other.setAttribute("visibility", own.matches(".crowded circle, .yardstick circle") ? "hidden" : "inherit");
      if (own.tagName === "text") other.setAttribute("font-size", 13);
    }
    copy.querySelectorAll("[data-gone]").forEach((node) => node.remove());
    const ink = getComputedStyle(figure).color;
    let y = height + 18;
    entries.forEach((entry, i) => {
      const line = entry.querySelector("path");
      const style = getComputedStyle(line);
      const x = 44 + (i % 3) * 226;
      copy.append(svg("path", { d: `M${x},${y - 4} h26`, fill: "none", stroke: style.stroke, "stroke-width": 2, "stroke-dasharray": style.strokeDasharray, "stroke-linecap": "round" }));
      copy.append(svg("text", { x: x + 34, y, fill: ink, "font-size": 13 }, entry.querySelector("span").textContent));
      if (i % 3 === 2 || i === entries.length - 1) y += 20;
    });
    for (const note of figure.querySelectorAll(".legend .note")) {
      if (getComputedStyle(note).display === "none") continue;
      copy.append(svg("text", { x: 44, y: y + 4, fill: ink, "font-size": 11 }, note.textContent));
      y += 16;
    }
    const frame = { width: width + 2 * MARGIN, height: y + 2 * MARGIN };
    copy.prepend(svg("rect", { x: -MARGIN, y: -MARGIN, ...frame, fill: "#ffffff" }));
    const whole = { viewBox: `${-MARGIN} ${-MARGIN} ${frame.width} ${frame.height}`, ...frame, "font-family": "system-ui, sans-serif" };
    for (const [name, value] of Object.entries(whole)) copy.setAttribute(name, value);
    return new XMLSerializer().serializeToString(copy);
  };
  onTake(figure, (kind) => {
    chart.querySelectorAll(".on").forEach((dot) => dot.classList.remove("on"));
    takeSvg("errors", inLight(alone), kind);
    show(shown);
  });
})();

/* Drawings: they turn dark by a rule of their own, which a file leaves out; there it says what was measured. */

const signed = (svg, words) => {
  const [, width, height] = svg.match(/viewBox="0 0 ([\d.]+) ([\d.]+)"/).map(Number);
  const lines = words.match(new RegExp(`.{1,${Math.floor(width / 3.2)}}(\\s|$)`, "g"));
  const safe = (text) => text.trim().replace(/[&<>]/g, (one) => `&#${one.charCodeAt(0)};`);
  const texts = lines.map((line, k) => `<text x="4" y="${height + 8 * k + 6}" font-size="6" font-family="sans-serif" fill="#6a6a6a">${safe(line)}</text>`);
  const taller = height + 8 * lines.length + 4;
  return svg.replace(/<style>@media.*?<\/style>/s, "")
    .replace(`height="${height}pt" viewBox="0 0 ${width} ${height}"`, `height="${taller}pt" viewBox="0 0 ${width} ${taller}"`)
    .replace(/<\/svg>\s*$/, `${texts.join("")}</svg>`);
};

for (const card of document.querySelectorAll(".card")) {
  card.querySelector(".downloads").hidden = false;
  onTake(card, (kind) => {
    const bytes = Uint8Array.from(atob(card.querySelector("img").src.split(",")[1]), (one) => one.charCodeAt(0));
    takeSvg(card.dataset.name, signed(new TextDecoder().decode(bytes), card.dataset.sample), kind);
  });
}

/* A GIF of frames, each the numbers of colours in one palette of 256 */

const gif = (width, height, palette, frames) => {
  const out = [];
  const word = (value) => out.push(value & 255, value >> 8);
  out.push(...new TextEncoder().encode("GIF89a"));
  word(width);
  word(height);
  out.push(0xf7, 0, 0, ...palette.flat());
  out.push(0x21, 0xff, 11, ...new TextEncoder().encode("NETSCAPE2.0"), 3, 1, 0, 0, 0);
  for (const { pixels, hundredths } of frames) {
    out.push(0x21, 0xf9, 4, 4);
    word(hundredths);
    out.push(0, 0, 0x2c, 0, 0, 0, 0);
    word(width);
    word(height);
    out.push(0, 8);
    const packed = lzw(pixels);
    for (let start = 0; start < packed.length; start += 255) {
      const part = packed.slice(start, start + 255);
      out.push(part.length, ...part);
    }
    out.push(0);
  }
  out.push(0x3b);
  return new Blob([new Uint8Array(out)], { type: "image/gif" });
};

const lzw = (pixels) => {
  const CLEAR = 256, END = 257, FULL = 4096;
  const out = [];
  let held = 0, bits = 0, size = 9, next = END + 1;
  const known = new Map();
  const put = (code) => {
    held |= code << bits;
    bits += size;
    for (; bits >= 8; bits -= 8) {
      out.push(held & 255);
      held >>>= 8;
    }
  };
  put(CLEAR);
  let prefix = pixels[0];
  for (let k = 1; k < pixels.length; k += 1) {
    const longer = prefix * 256 + pixels[k];
    const code = known.get(longer);
    if (code !== undefined) {
      prefix = code;
      continue;
    }
    put(prefix);
    if (next < FULL) {
      known.set(longer, next);
      if (next === 1 << size) size += 1;
      next += 1;
    } else {
      put(CLEAR);
      known.clear();
      size = 9;
      next = END + 1;
    }
    prefix = pixels[k];
  }
  put(prefix);
  put(END);
  if (bits > 0) out.push(held & 255);
  return out;
};

/* Cases */

(() => {
  const section = document.getElementById("cases");
  if (!section) return;
  const LEVELS = 255, NOT_FINITE = [136, 136, 136], PAUSE = 450, ACROSS = 5, KEPT = 200;
  const stage = section.querySelector(".stage");
  const screens = section.querySelector(".screens");
  const reels = [...section.querySelectorAll(".reels > div")].map((node) => ({ node, ...JSON.parse(node.dataset.film) }));
  const selects = Object.fromEntries([...section.querySelectorAll("select")].map((one) => [one.name, one]));
  const slider = section.querySelector("input[type=range]");
  const button = section.querySelector(".transport button");
  const reading = section.querySelector(".reading");
  const hint = reading.textContent;
  let reel = null, timer = null, point = null, columns = [], bars = null;

  const part = (name) => section.querySelector(`[data-of=${name}]`);
  const chosen = (name) => section.querySelector(`input[name=${name}]:checked`).value;
  const distinct = (values) => [...new Set(values)];
  const fill = (name, values) => {
    const before = selects[name].value;
    selects[name].replaceChildren(...values.map((value) => new Option(value, value)));
    if (values.includes(before)) selects[name].value = before;
    part(name).hidden = values.length < 2; // what cannot be chosen is not asked for
  };
  const number = (value) => (value === 0 ? "0" : String(Number(value.toPrecision(3)))).replace("-", "−");
  const leadWords = (index) => `lead ${reel.leads[index]}${reel.times[index] ? `, ${reel.times[index]}` : ""}`;

  // Pixels of a picture, read once.
  const read = new Map();
  const pixelsOf = (image) => {
    if (!read.has(image)) {
      const canvas = document.createElement("canvas");
      canvas.width = image.naturalWidth;
      canvas.height = image.naturalHeight;
      const context = canvas.getContext("2d", { willReadFrequently: true });
      context.drawImage(image, 0, 0);
      read.set(image, context.getImageData(0, 0, canvas.width, canvas.height).data);
    }
    return read.get(image);
  };
  const strip = ({ kind, model }) => [...reel.node.querySelectorAll(`img[data-kind=${kind}]`)].find((one) => kind === "truth" || one.dataset.model === model);
  const palette = (kind) => {
    const colours = pixelsOf(reel.node.querySelector(`.bar[data-kind=${kind}] img`));
    return (level) => (level === LEVELS ? NOT_FINITE : colours.subarray(4 * level, 4 * level + 3));
  };
  const limit = (index) => (chosen("errors") === "each" ? reel.limits[index] : reel.limit);

  // What a level stands for; row 0 of a picture is the top.
  const level = (cell, column, row) => {
    const [width, height] = reel.size;
    return pixelsOf(strip(cell))[4 * ((cell.index * height + row) * width + column)];
  };
  const meaning = (cell, held) => {
    const share = held / (LEVELS - 1);
    if (cell.kind === "error") return reel.tops[cell.index] * share ** 2;
    return reel.values[0] + share * (reel.values[1] - reel.values[0]);
  };
  const inWords = (cell, held) => {
    if (held === LEVELS) return "not finite";
    const beyond = cell.kind !== "forecast" ? "" : held === 0 ? "≤ " : held === LEVELS - 1 ? "≥ " : "";
    // No more digits than the levels tell apart.
    const value = meaning(cell, held), apart = (reel.values[1] - reel.values[0]) / (LEVELS - 1);
    if (cell.kind === "error") return String(Number(value.toPrecision(2)));
    return beyond + value.toFixed(Math.min(20, Math.max(0, Math.ceil(-Math.log10(apart))))).replace("-", "−");
  };

  // Maps in colour, kept while film and scale stay.
  const painted = new Map();
  const coloured = (cell) => {
    const key = [cell.kind, cell.model, cell.index, chosen("errors")].join("|");
    if (painted.has(key)) return painted.get(key);
    const [width, height] = reel.size, pixels = pixelsOf(strip(cell));
    const colour = palette(cell.kind === "error" ? "errors" : "values");
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, height);
    // Of each level, its colour: that of its place in the bar.
    const colours = Array.from({ length: LEVELS + 1 }, (_, held) => {
      if (cell.kind !== "error" || held === LEVELS) return colour(held);
      return colour(Math.round(Math.min(1, meaning(cell, held) / limit(cell.index)) * (LEVELS - 1)));
    });
    const start = 4 * cell.index * width * height;
    for (let k = 0; k < 4 * width * height; k += 4) {
      const [r, g, b] = colours[pixels[start + k]];
      image.data[k] = r;
      image.data[k + 1] = g;
      image.data[k + 2] = b;
      image.data[k + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    if (painted.size >= KEPT) painted.clear();
    painted.set(key, canvas);
    return canvas;
  };

  /* One map with its axes, in a given width */

  const LEFT = 34, FOOT = 20, FONT = "11px system-ui, sans-serif";
  const spacing = (axis) => reel.axes[axis].spacing || 1;
  const plot = (room) => {
    const [width, height] = reel.size;
    const known = reel.axes.every((axis) => axis.spacing);
    const ratio = known ? height * spacing(1) / (width * spacing(0)) : height / width;
    const wide = Math.min(room - LEFT - 8, 1.6 * room / ratio);
    return { wide, high: Math.max(12, wide * ratio) };
  };
  // Round numbers inside an axis, with their share of its length; the middle of the first point is zero.
  const ticks = (axis, most) => {
    const count = reel.size[axis], step = spacing(axis), span = count * step;
    const unit = 10 ** Math.floor(Math.log10(span / most));
    const factor = [1, 2, 2.5, 5, 10].find((one) => span / (one * unit) <= most && one * unit >= (reel.axes[axis].spacing ? 0 : 1));
    const found = [];
    for (let value = 0; value < span - 0.5 * step; value += factor * unit) {
      found.push({ text: String(Number(value.toPrecision(4))), share: (value / step + 0.5) / count });
    }
    return found;
  };
  const axisName = ({ name, unit }) => (unit ? `${name} (${unit})` : name);

  const paint = (context, cell, x, y, room, ink) => {
    const { wide, high } = plot(room);
    const left = x + LEFT;
    context.imageSmoothingEnabled = false;
    context.drawImage(coloured(cell), left, y, wide, high);
    context.font = FONT;
    context.fillStyle = ink.soft;
    context.strokeStyle = ink.soft;
    context.lineWidth = 1;
    context.textBaseline = "alphabetic";
    context.textAlign = "right";
    const across = axisName(reel.axes[0]);
    context.fillText(across, left + wide, y + high + 15);
    const free = left + wide - context.measureText(across).width - 4;
    context.textAlign = "center";
    for (const { text, share } of ticks(0, 4)) {
      const place = left + share * wide;
      context.fillRect(place - 0.5, y + high, 1, 4);
      if (place + context.measureText(text).width / 2 < free) context.fillText(text, place, y + high + 15);
    }
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(reel.axes[1].name, left - 6, y + 6);
    for (const { text, share } of ticks(1, Math.max(1, Math.min(4, Math.floor(high / 30))))) {
      const place = y + (1 - share) * high;
      context.fillRect(left - 4, place - 0.5, 4, 1);
      if (place > y + 18) context.fillText(text, left - 6, place);
    }
    if (point && ink.pointer) {
      const px = left + (point[0] + 0.5) / reel.size[0] * wide, py = y + (point[1] + 0.5) / reel.size[1] * high;
      for (const [colour, thick] of [["#ffffff", 3.5], ["#000000", 1.5]]) {
        context.strokeStyle = colour;
        context.lineWidth = thick;
        context.beginPath();
        context.arc(px, py, 6, 0, 2 * Math.PI);
        context.stroke();
      }
    }
  };

  /* What stands side by side */

  const evenly = (count, most) => {
    const kept = Math.min(count, most);
    return Array.from({ length: kept }, (_, k) => (kept === 1 ? 0 : Math.round(k * (count - 1) / (kept - 1))));
  };
  const models = () => [...section.querySelectorAll("input[name=models]:checked")].map((one) => one.value);
  const ofModels = (index) => [
    { title: "truth", cells: [{ kind: "truth", title: "truth", index }] },
    ...models().map((model) => ({ title: model, cells: ["forecast", "error"].map((kind) => ({ kind, model, index })) })),
  ];
  const ofLeads = (model) => evenly(reel.leads.length, ACROSS).map((index) => ({
    title: leadWords(index),
    cells: ["truth", "forecast", "error"].map((kind) => ({ kind, model, index })),
  }));
  const wanted = () => (chosen("view") === "leads" ? ofLeads(selects.model.value) : ofModels(Number(slider.value)));
  const note = (cell) => {
    if (cell.kind !== "error") return "";
    const told = strip(cell).dataset.notes.split("|")[cell.index];
    return chosen("view") === "leads" && chosen("errors") === "each" ? `${told}, scale to ${number(limit(cell.index))}` : told;
  };
  const counted = (index) => `${reel.leads[index]} of ${reel.leads.at(-1)}${reel.times[index] ? `, ${reel.times[index]}` : ""}`;
  const heading = (index) => [
    reel.unit ? `${reel.field} (${reel.unit})` : reel.field, `case ${reel.case}, one window`, reel.plane,
    index === null ? `forecasts of ${selects.model.value}` : `lead ${counted(index)}`,
  ].filter(Boolean).join(" · ");

  const build = () => {
    columns = wanted();
    screens.replaceChildren(...columns.map((column) => {
      const box = document.createElement("div");
      const title = document.createElement("h3");
      title.textContent = column.title;
      box.append(title);
      for (const cell of column.cells) {
        const frame = document.createElement("figure");
        const caption = document.createElement("figcaption");
        cell.label = document.createElement("span");
        cell.value = document.createElement("output");
        cell.canvas = document.createElement("canvas");
        cell.canvas.setAttribute("role", "img");
        caption.append(cell.label, cell.value);
        frame.append(caption, cell.canvas);
        box.append(frame);
        for (const kind of ["pointermove", "pointerdown"]) cell.canvas.addEventListener(kind, (event) => aim(event, cell));
        cell.canvas.addEventListener("pointerleave", () => aim(null));
      }
      return box;
    }));
    bars = reel.node.querySelector(".bars").cloneNode(true);
    (chosen("view") === "leads" ? screens : screens.firstChild).append(bars);
    const leads = chosen("view") === "leads";
    section.querySelector(".transport").hidden = leads || reel.leads.length < 2;
    part("model").hidden = !leads || selects.model.length < 2;
    part("models").hidden = leads || section.querySelectorAll("input[name=models]").length < 2;
    draw();
  };

  const aim = (event, cell) => {
    point = null;
    if (event) {
      const box = cell.canvas.getBoundingClientRect(), { wide, high } = plot(box.width);
      const column = Math.floor((event.clientX - box.left - LEFT) / wide * reel.size[0]);
      const row = Math.floor((event.clientY - box.top - 1) / high * reel.size[1]);
      if (column >= 0 && row >= 0 && column < reel.size[0] && row < reel.size[1]) point = [column, row];
    }
    draw();
  };

  const inkOf = (pointer) => {
    const style = getComputedStyle(document.documentElement);
    return { ...Object.fromEntries(["ink", "soft", "paper"].map((name) => [name, style.getPropertyValue(`--${name}`)])), pointer };
  };

  const draw = () => {
    const ink = inkOf(true), index = Number(slider.value), leads = chosen("view") === "leads";
    for (const cell of columns.flatMap((column) => column.cells)) {
      if (!leads) cell.index = index;
      const { canvas } = cell;
      const room = canvas.clientWidth, { high } = plot(room), dense = devicePixelRatio || 1;
      canvas.style.height = `${high + FOOT + 2}px`;
      canvas.width = Math.round(room * dense);
      canvas.height = Math.round((high + FOOT + 2) * dense);
      const context = canvas.getContext("2d");
      context.scale(dense, dense);
      paint(context, cell, 0, 1, room, ink);
      cell.label.textContent = [cell.kind === cell.title ? "" : cell.kind, note(cell)].filter(Boolean).join(" ");
      cell.value.textContent = point ? inWords(cell, level(cell, ...point)) : "";
      const who = cell.kind === "truth" ? "truth" : `${cell.kind} of ${cell.model}`;
      canvas.setAttribute("aria-label", `${reel.field}, ${who}, ${leadWords(cell.index)}`);
    }
    const scale = [...bars.querySelectorAll("[data-kind=errors] div span")];
    const own = leads && chosen("errors") === "each";
    [0, limit(index) / 2, limit(index)].forEach((value, k) => { scale[k].textContent = own ? ["0", "", "end of each lead’s scale"][k] : number(value); });
    section.querySelector(".lead-number").textContent = counted(index);
    slider.setAttribute("aria-valuetext", leadWords(index));
    if (point) {
      const places = [point[0], reel.size[1] - 1 - point[1]].map((place, axis) => {
        const { name, unit } = reel.axes[axis];
        return `${name} = ${number(place * spacing(axis))}${unit ? ` ${unit}` : ""}`;
      });
      reading.textContent = `${places.join(", ")}; values beside each map${reel.unit ? ` in ${reel.unit}` : ""}.`;
    } else reading.textContent = hint;
  };

  const choose = () => {
    fill("field", distinct(reels.filter((one) => one.case === selects.case.value).map((one) => one.field)));
    const same = reels.filter((one) => one.case === selects.case.value && one.field === selects.field.value);
    fill("plane", distinct(same.map((one) => one.plane)));
    const next = same.find((one) => one.plane === selects.plane.value);
    // Pictures are unpacked when they are first wanted, and forgotten with their film.
    Promise.all([...next.node.querySelectorAll("img")].map((image) => image.decode())).then(() => {
      read.clear();
      painted.clear();
      reel = next;
      point = null;
      slider.max = reel.leads.length - 1;
      build();
    });
  };

  /* Playing */

  const stop = () => {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
    button.setAttribute("aria-pressed", "false");
  };
  const play = () => {
    if (Number(slider.value) === Number(slider.max)) slider.value = 0;
    button.textContent = "Pause";
    button.setAttribute("aria-pressed", "true");
    draw();
    timer = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      draw();
      if (Number(slider.value) === Number(slider.max)) stop();
    }, PAUSE);
  };

  /* The same on one sheet, to take along */

  const sheet = (shown, title, dense) => {
    const ROOM = 250, GAP = 14, LINE = 18, HEAD = 58, BAR = 56, ink = inLight(() => inkOf(false));
    const { wide, high } = plot(ROOM), tall = high + FOOT + LINE + 8;
    const down = Math.max(...shown.map((column) => column.cells.length));
    const under = shown[0].cells.length < down && tall >= 2 * BAR; // bars have room below the truth
    const width = shown.length * (ROOM + GAP) + GAP, height = HEAD + down * tall + (under ? 0 : 2 * BAR) + 8;
    const canvas = document.createElement("canvas");
    canvas.width = width * dense;
    canvas.height = Math.ceil(height) * dense;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.scale(dense, dense);
    context.fillStyle = ink.paper;
    context.fillRect(0, 0, width, Math.ceil(height));
    const write = (text, x, y, colour, font = "13px system-ui, sans-serif", align = "left") => {
      Object.assign(context, { fillStyle: colour, font, textAlign: align, textBaseline: "alphabetic" });
      context.fillText(text, x, y);
    };
    write(title, GAP + LEFT, 22, ink.ink, "600 14px system-ui, sans-serif");
    shown.forEach((column, k) => {
      const x = GAP + k * (ROOM + GAP);
      write(column.title, x + LEFT, 48, ink.ink);
      column.cells.forEach((cell, n) => {
        const y = HEAD + n * tall;
        if (cell.kind !== cell.title) write([cell.kind, note(cell)].filter(Boolean).join(" "), x + LEFT, y + 10, ink.soft, "12px system-ui, sans-serif");
        paint(context, cell, x, y + LINE, ROOM, ink);
      });
    });
    const top = HEAD + (under ? tall : down * tall) + LINE;
    [...bars.querySelectorAll(".bar")].forEach((bar, k) => {
      const x = GAP + LEFT, y = top + k * BAR;
      write(bar.querySelector("figcaption").textContent.trim(), x, y + 10, ink.soft, FONT);
      context.drawImage(bar.querySelector("img"), x, y + 16, wide, 10);
      [...bar.querySelectorAll(":scope > div span")].forEach((one, n) => write(one.textContent, x + n * wide / 2, y + 38, ink.soft, FONT, ["left", "center", "right"][n]));
    });
    return canvas;
  };

  // 118 colours of each bar, what is not finite, and greys for the words.
  const colours = () => {
    const half = 118, bar = [palette("values"), palette("errors")];
    const held = bar.flatMap((colour) => Array.from({ length: half }, (_, k) => [...colour(Math.round(k * (LEVELS - 1) / (half - 1)))]));
    const greys = 256 - held.length - 1;
    return [...held, NOT_FINITE, ...Array.from({ length: greys }, (_, k) => Array(3).fill(Math.round(255 * k / (greys - 1))))];
  };

  const movie = () => {
    const table = colours(), near = new Map(), before = slider.value;
    let width = 0, height = 0;
    const frames = reel.leads.map((_, index) => {
      slider.value = index;
      draw();
      const canvas = sheet(ofModels(index), heading(index), 1);
      ({ width, height } = canvas);
      const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
      const pixels = new Uint8Array(width * height);
      for (let k = 0; k < pixels.length; k += 1) {
        const [r, g, b] = [data[4 * k], data[4 * k + 1], data[4 * k + 2]], key = (r << 16) | (g << 8) | b;
        if (!near.has(key)) {
          const distances = table.map((one) => (one[0] - r) ** 2 + (one[1] - g) ** 2 + (one[2] - b) ** 2);
          near.set(key, distances.indexOf(Math.min(...distances)));
        }
        pixels[k] = near.get(key);
      }
      return { pixels, hundredths: index === reel.leads.length - 1 ? 150 : PAUSE / 10 };
    });
    slider.value = before;
    draw();
    return gif(width, height, table, frames);
  };

  onTake(section, (kind, pressed) => {
    stop();
    const name = ["case", reel.case, reel.field, reel.plane].filter(Boolean).join("-").replace(/[^\p{L}\p{N}-]+/gu, "-");
    const leads = chosen("view") === "leads";
    if (kind === "png") {
      const index = Number(slider.value), which = leads ? "leads" : `lead-${reel.leads[index]}`;
      sheet(wanted(), heading(leads ? null : index), 2).toBlob((blob) => take(`${name}-${which}.png`, blob));
      return;
    }
    pressed.disabled = true;
    setTimeout(() => { // the page shows that it is at work before it is
      take(`${name}.gif`, movie());
      pressed.disabled = false;
    }, 20);
  });

  fill("case", distinct(reels.map((one) => one.case)));
  fill("model", [...section.querySelectorAll("input[name=models]")].map((one) => one.value));
  for (const name of ["case", "field", "plane"]) selects[name].addEventListener("change", choose);
  selects.model.addEventListener("change", build);
  for (const name of ["view", "errors"]) {
    part(name).hidden = false;
    part(name).addEventListener("change", build);
  }
  part("models").addEventListener("change", build);
  slider.addEventListener("input", () => { stop(); draw(); });
  button.addEventListener("click", () => (timer === null ? play() : stop()));
  stage.hidden = false;
  choose();
  let width = 0;
  new ResizeObserver(() => {
    if (!reel || screens.clientWidth === width) return;
    width = screens.clientWidth;
    requestAnimationFrame(draw);
  }).observe(screens);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
})();
