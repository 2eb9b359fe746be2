"use strict";

/* Downloads */

const download = (name, blob) => {
  const link = document.createElement("a");
  link.download = name;
  link.href = URL.createObjectURL(blob);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
};

const downloadSvg = (name, svg, format) => {
  if (format === "svg") {
    download(`${name}.svg`, new Blob([svg], { type: "image/svg+xml" }));
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
    canvas.toBlob((blob) => download(`${name}.png`, blob));
  });
  image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
};

const onDownload = (root, callback) => {
  for (const button of root.querySelectorAll("[data-take]")) {
    button.hidden = false;
    button.addEventListener("click", () => callback(button.dataset.take, button));
  }
};

/* Downloads always use the light theme. */
const withLightTheme = (callback) => {
  const { classList } = document.documentElement;
  classList.add("light");
  const result = callback();
  classList.remove("light");
  return result;
};

/* Curves */

(() => {
  const figure = document.getElementById("errors");
  const chart = figure.querySelector(".chart");
  const rows = [...figure.querySelectorAll(".numbers tbody tr")];
  const positions = rows.map((row) => Number(row.dataset.x));
  const slider = figure.querySelector("input[type=range]");
  const cursor = figure.querySelector(".cursor");
  const tip = figure.querySelector(".tip");
  const entries = [...figure.querySelectorAll(".legend li")];
  let current = rows.length - 1;

  // All values are read from the table of numbers.
  const readout = (index, model) => {
    const cell = rows[index].cells[model + 1];
    const spread = cell.dataset[figure.dataset.band];
    return spread ? `${cell.textContent} ± ${spread}` : cell.textContent;
  };

  const show = (index) => {
    current = index;
    const lead = rows[index].cells[0].textContent;
    figure.querySelector("output").textContent = lead;
    entries.forEach((entry, i) => { entry.querySelector("data").textContent = readout(index, i); });
    cursor.setAttribute("transform", `translate(${positions[index]} 0)`);
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
    const distances = positions.map((position) => Math.abs(position - x));
    return distances.indexOf(Math.min(...distances));
  };

  const showTip = (event) => {
    show(nearest(event));
    const head = document.createElement("p");
    head.textContent = `lead ${rows[current].cells[0].textContent}`;
    const lines = entries.map((entry, i) => {
      const line = document.createElement("p");
      line.append(entry.querySelector("svg").cloneNode(true), entry.querySelector("span").textContent);
      const number = document.createElement("b");
      const text = readout(current, i);
      number.textContent = /\d$/.test(text) ? `${text} %` : text;
      line.append(number);
      return line;
    });
    tip.replaceChildren(head, ...lines);
    tip.hidden = false;
    const box = chart.getBoundingClientRect(), offset = box.top - chart.parentNode.getBoundingClientRect().top;
    const x = positions[current] * box.width / chart.viewBox.baseVal.width;
    const left = x > box.width / 2 ? x - tip.offsetWidth - 14 : x + 14;
    const top = event.clientY - box.top - tip.offsetHeight / 2;
    tip.style.left = `${Math.max(0, Math.min(left, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${offset + Math.max(0, Math.min(top, box.height - tip.offsetHeight))}px`;
  };

  for (const type of ["pointermove", "pointerdown"]) chart.addEventListener(type, showTip);
  chart.addEventListener("pointerleave", () => { tip.hidden = true; });
  if (slider) {
    slider.hidden = false;
    slider.addEventListener("input", () => show(Number(slider.value)));
  }
  for (const choice of figure.querySelectorAll(".choice")) {
    choice.hidden = false;
    const choose = () => {
      figure.dataset[choice.dataset.of] = choice.querySelector(":checked").value;
      show(current);
    };
    choice.addEventListener("change", choose);
    choose(); // the browser may restore the choice on reload
  }
  show(current);

  const MARGIN = 16;
  const INLINED_STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin"];
  const svgElement = (tag, attributes, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  };

  // The chart as a standalone file: styles become attributes; legend and sample are added below.
  const standaloneSvg = () => {
    const copy = chart.cloneNode(true);
    const { width, height } = chart.viewBox.baseVal;
    const pairs = [...chart.querySelectorAll("*")].map((element, i) => [element, copy.querySelectorAll("*")[i]]);
    for (const [source, target] of pairs) {
      const style = getComputedStyle(source);
      if (style.display === "none" || source === cursor) target.dataset.gone = "";
      target.removeAttribute("class");
      for (const name of INLINED_STYLES) target.setAttribute(name, style.getPropertyValue(name));
      target.setAttribute("visibility", source.matches(".crowded circle, .yardstick circle") ? "hidden" : "inherit");
      if (source.tagName === "text") target.setAttribute("font-size", 13);
    }
    copy.querySelectorAll("[data-gone]").forEach((node) => node.remove());
    const ink = getComputedStyle(figure).color;
    let y = height + 18;
    entries.forEach((entry, i) => {
      const line = entry.querySelector("path");
      const style = getComputedStyle(line);
      const x = 44 + (i % 3) * 226;
      copy.append(svgElement("path", { d: `M${x},${y - 4} h26`, fill: "none", stroke: style.stroke, "stroke-width": 2, "stroke-dasharray": style.strokeDasharray, "stroke-linecap": "round" }));
      copy.append(svgElement("text", { x: x + 34, y, fill: ink, "font-size": 13 }, entry.querySelector("span").textContent));
      if (i % 3 === 2 || i === entries.length - 1) y += 20;
    });
    for (const note of figure.querySelectorAll(".legend .note")) {
      if (getComputedStyle(note).display === "none") continue;
      copy.append(svgElement("text", { x: 44, y: y + 4, fill: ink, "font-size": 11 }, note.textContent));
      y += 16;
    }
    const frame = { width: width + 2 * MARGIN, height: y + 2 * MARGIN };
    copy.prepend(svgElement("rect", { x: -MARGIN, y: -MARGIN, ...frame, fill: "#ffffff" }));
    const attributes = { viewBox: `${-MARGIN} ${-MARGIN} ${frame.width} ${frame.height}`, ...frame, "font-family": "system-ui, sans-serif" };
    for (const [name, value] of Object.entries(attributes)) copy.setAttribute(name, value);
    return new XMLSerializer().serializeToString(copy);
  };
  onDownload(figure, (format) => {
    chart.querySelectorAll(".on").forEach((dot) => dot.classList.remove("on"));
    downloadSvg("errors", withLightTheme(standaloneSvg), format);
    show(current);
  });
})();

/* Figures: downloads omit the dark-mode rule and state the sample. */

const withSample = (svg, sample) => {
  const [, width, height] = svg.match(/viewBox="0 0 ([\d.]+) ([\d.]+)"/).map(Number);
  const lines = sample.match(new RegExp(`.{1,${Math.floor(width / 3.2)}}(\\s|$)`, "g"));
  const escape = (text) => text.trim().replace(/[&<>]/g, (character) => `&#${character.charCodeAt(0)};`);
  const texts = lines.map((line, k) => `<text x="4" y="${height + 8 * k + 6}" font-size="6" font-family="sans-serif" fill="#6a6a6a">${escape(line)}</text>`);
  const newHeight = height + 8 * lines.length + 4;
  return svg.replace(/<style>@media.*?<\/style>/s, "")
    .replace(`height="${height}pt" viewBox="0 0 ${width} ${height}"`, `height="${newHeight}pt" viewBox="0 0 ${width} ${newHeight}"`)
    .replace(/<\/svg>\s*$/, `${texts.join("")}</svg>`);
};

for (const card of document.querySelectorAll(".card")) {
  card.querySelector(".downloads").hidden = false;
  onDownload(card, (format) => {
    const bytes = Uint8Array.from(atob(card.querySelector("img").src.split(",")[1]), (character) => character.charCodeAt(0));
    downloadSvg(card.dataset.name, withSample(new TextDecoder().decode(bytes), card.dataset.sample), format);
  });
}

/* GIF encoder: frames of indices into one palette of 256 colours */

const gif = (width, height, palette, frames) => {
  const out = [];
  const uint16 = (value) => out.push(value & 255, value >> 8);
  out.push(...new TextEncoder().encode("GIF89a"));
  uint16(width);
  uint16(height);
  out.push(0xf7, 0, 0, ...palette.flat());
  out.push(0x21, 0xff, 11, ...new TextEncoder().encode("NETSCAPE2.0"), 3, 1, 0, 0, 0);
  for (const { pixels, hundredths } of frames) {
    out.push(0x21, 0xf9, 4, 4);
    uint16(hundredths);
    out.push(0, 0, 0x2c, 0, 0, 0, 0);
    uint16(width);
    uint16(height);
    out.push(0, 8);
    const packed = lzw(pixels);
    for (let start = 0; start < packed.length; start += 255) {
      const block = packed.slice(start, start + 255);
      out.push(block.length, ...block);
    }
    out.push(0);
  }
  out.push(0x3b);
  return new Blob([new Uint8Array(out)], { type: "image/gif" });
};

const lzw = (pixels) => {
  const CLEAR = 256, END = 257, TABLE_SIZE = 4096;
  const out = [];
  let buffer = 0, bits = 0, size = 9, next = END + 1;
  const codes = new Map();
  const emit = (code) => {
    buffer |= code << bits;
    bits += size;
    for (; bits >= 8; bits -= 8) {
      out.push(buffer & 255);
      buffer >>>= 8;
    }
  };
  emit(CLEAR);
  let prefix = pixels[0];
  for (let k = 1; k < pixels.length; k += 1) {
    const sequence = prefix * 256 + pixels[k];
    const code = codes.get(sequence);
    if (code !== undefined) {
      prefix = code;
      continue;
    }
    emit(prefix);
    if (next < TABLE_SIZE) {
      codes.set(sequence, next);
      if (next === 1 << size) size += 1;
      next += 1;
    } else {
      emit(CLEAR);
      codes.clear();
      size = 9;
      next = END + 1;
    }
    prefix = pixels[k];
  }
  emit(prefix);
  emit(END);
  if (bits > 0) out.push(buffer & 255);
  return out;
};

/* Cases */

(() => {
  const section = document.getElementById("cases");
  if (!section) return;
  const LEVELS = 255, NOT_FINITE = [136, 136, 136], FRAME_MS = 450, MAX_COLUMNS = 5, CACHE_SIZE = 200;
  const stage = section.querySelector(".stage");
  const screens = section.querySelector(".screens");
  const animations = [...section.querySelectorAll(".animations > div")].map((node) => ({ node, ...JSON.parse(node.dataset.animation) }));
  const selects = Object.fromEntries([...section.querySelectorAll("select")].map((select) => [select.name, select]));
  const slider = section.querySelector("input[type=range]");
  const button = section.querySelector(".transport button");
  const reading = section.querySelector(".reading");
  const hint = reading.textContent;
  let animation = null, timer = null, point = null, columns = [], bars = null;

  const control = (name) => section.querySelector(`[data-of=${name}]`);
  const checkedValue = (name) => section.querySelector(`input[name=${name}]:checked`).value;
  const distinct = (values) => [...new Set(values)];
  const fill = (name, values) => {
    const previous = selects[name].value;
    selects[name].replaceChildren(...values.map((value) => new Option(value, value)));
    if (values.includes(previous)) selects[name].value = previous;
    control(name).hidden = values.length < 2; // hide the control if there is no choice
  };
  const number = (value) => (value === 0 ? "0" : String(Number(value.toPrecision(3)))).replace("-", "−");
  const leadLabel = (index) => `lead ${animation.leads[index]}${animation.times[index] ? `, ${animation.times[index]}` : ""}`;

  // Cache of decoded image pixels.
  const pixelCache = new Map();
  const pixelsOf = (image) => {
    if (!pixelCache.has(image)) {
      const canvas = document.createElement("canvas");
      canvas.width = image.naturalWidth;
      canvas.height = image.naturalHeight;
      const context = canvas.getContext("2d", { willReadFrequently: true });
      context.drawImage(image, 0, 0);
      pixelCache.set(image, context.getImageData(0, 0, canvas.width, canvas.height).data);
    }
    return pixelCache.get(image);
  };
  const strip = ({ kind, model }) => [...animation.node.querySelectorAll(`img[data-kind=${kind}]`)].find((image) => kind === "truth" || image.dataset.model === model);
  const palette = (kind) => {
    const colours = pixelsOf(animation.node.querySelector(`.bar[data-kind=${kind}] img`));
    return (level) => (level === LEVELS ? NOT_FINITE : colours.subarray(4 * level, 4 * level + 3));
  };
  const limit = (index) => (checkedValue("errors") === "each" ? animation.limits[index] : animation.limit);

  // Level of a grid point; row 0 is the top of the image.
  const levelAt = (cell, column, row) => {
    const [width, height] = animation.size;
    return pixelsOf(strip(cell))[4 * ((cell.index * height + row) * width + column)];
  };
  const levelValue = (cell, level) => {
    const fraction = level / (LEVELS - 1);
    if (cell.kind === "error") return animation.tops[cell.index] * fraction ** 2;
    return animation.values[0] + fraction * (animation.values[1] - animation.values[0]);
  };
  const formatLevel = (cell, level) => {
    if (level === LEVELS) return "not finite";
    const prefix = cell.kind !== "forecast" ? "" : level === 0 ? "≤ " : level === LEVELS - 1 ? "≥ " : "";
    // No more digits than the quantization resolves.
    const value = levelValue(cell, level), step = (animation.values[1] - animation.values[0]) / (LEVELS - 1);
    if (cell.kind === "error") return String(Number(value.toPrecision(2)));
    return prefix + value.toFixed(Math.min(20, Math.max(0, Math.ceil(-Math.log10(step))))).replace("-", "−");
  };

  // Cache of coloured maps; cleared when the animation changes.
  const canvasCache = new Map();
  const colouredMap = (cell) => {
    const key = [cell.kind, cell.model, cell.index, checkedValue("errors")].join("|");
    if (canvasCache.has(key)) return canvasCache.get(key);
    const [width, height] = animation.size, pixels = pixelsOf(strip(cell));
    const colour = palette(cell.kind === "error" ? "errors" : "values");
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, height);
    // Colour of each level on the colour bar.
    const colours = Array.from({ length: LEVELS + 1 }, (_, level) => {
      if (cell.kind !== "error" || level === LEVELS) return colour(level);
      return colour(Math.round(Math.min(1, levelValue(cell, level) / limit(cell.index)) * (LEVELS - 1)));
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
    if (canvasCache.size >= CACHE_SIZE) canvasCache.clear();
    canvasCache.set(key, canvas);
    return canvas;
  };

  /* Draw one map with its axes in a given width */

  const LEFT = 34, FOOT = 20, FONT = "11px system-ui, sans-serif";
  const spacing = (axis) => animation.axes[axis].spacing || 1;
  const plot = (available) => {
    const [width, height] = animation.size;
    const known = animation.axes.every((axis) => axis.spacing);
    const ratio = known ? height * spacing(1) / (width * spacing(0)) : height / width;
    const wide = Math.min(available - LEFT - 8, 1.6 * available / ratio);
    return { wide, high: Math.max(12, wide * ratio) };
  };
  // Round tick values of an axis with their relative positions; zero is the centre of the first grid point.
  const ticks = (axis, limit) => {
    const count = animation.size[axis], step = spacing(axis), span = count * step;
    const unit = 10 ** Math.floor(Math.log10(span / limit));
    const factor = [1, 2, 2.5, 5, 10].find((candidate) => span / (candidate * unit) <= limit && candidate * unit >= (animation.axes[axis].spacing ? 0 : 1));
    const result = [];
    for (let value = 0; value < span - 0.5 * step; value += factor * unit) {
      result.push({ text: String(Number(value.toPrecision(4))), share: (value / step + 0.5) / count });
    }
    return result;
  };
  const axisName = ({ name, unit }) => (unit ? `${name} (${unit})` : name);

  const paint = (context, cell, x, y, available, ink) => {
    const { wide, high } = plot(available);
    const left = x + LEFT;
    context.imageSmoothingEnabled = false;
    context.drawImage(colouredMap(cell), left, y, wide, high);
    context.font = FONT;
    context.fillStyle = ink.soft;
    context.strokeStyle = ink.soft;
    context.lineWidth = 1;
    context.textBaseline = "alphabetic";
    context.textAlign = "right";
    const across = axisName(animation.axes[0]);
    context.fillText(across, left + wide, y + high + 15);
    const labelLimit = left + wide - context.measureText(across).width - 4;
    context.textAlign = "center";
    for (const { text, share } of ticks(0, 4)) {
      const position = left + share * wide;
      context.fillRect(position - 0.5, y + high, 1, 4);
      if (position + context.measureText(text).width / 2 < labelLimit) context.fillText(text, position, y + high + 15);
    }
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(animation.axes[1].name, left - 6, y + 6);
    for (const { text, share } of ticks(1, Math.max(1, Math.min(4, Math.floor(high / 30))))) {
      const position = y + (1 - share) * high;
      context.fillRect(left - 4, position - 0.5, 4, 1);
      if (position > y + 18) context.fillText(text, left - 6, position);
    }
    if (point && ink.pointer) {
      const px = left + (point[0] + 0.5) / animation.size[0] * wide, py = y + (point[1] + 0.5) / animation.size[1] * high;
      for (const [colour, lineWidth] of [["#ffffff", 3.5], ["#000000", 1.5]]) {
        context.strokeStyle = colour;
        context.lineWidth = lineWidth;
        context.beginPath();
        context.arc(px, py, 6, 0, 2 * Math.PI);
        context.stroke();
      }
    }
  };

  /* Layout */

  const evenlySpaced = (count, limit) => {
    const length = Math.min(count, limit);
    return Array.from({ length }, (_, k) => (length === 1 ? 0 : Math.round(k * (count - 1) / (length - 1))));
  };
  const checkedModels = () => [...section.querySelectorAll("input[name=models]:checked")].map((input) => input.value);
  const columnsByModel = (index) => [
    { title: "truth", cells: [{ kind: "truth", title: "truth", index }] },
    ...checkedModels().map((model) => ({ title: model, cells: ["forecast", "error"].map((kind) => ({ kind, model, index })) })),
  ];
  const columnsByLead = (model) => evenlySpaced(animation.leads.length, MAX_COLUMNS).map((index) => ({
    title: leadLabel(index),
    cells: ["truth", "forecast", "error"].map((kind) => ({ kind, model, index })),
  }));
  const visibleColumns = () => (checkedValue("view") === "leads" ? columnsByLead(selects.model.value) : columnsByModel(Number(slider.value)));
  const note = (cell) => {
    if (cell.kind !== "error") return "";
    const text = strip(cell).dataset.notes.split("|")[cell.index];
    return checkedValue("view") === "leads" && checkedValue("errors") === "each" ? `${text}, scale to ${number(limit(cell.index))}` : text;
  };
  const leadOfTotal = (index) => `${animation.leads[index]} of ${animation.leads.at(-1)}${animation.times[index] ? `, ${animation.times[index]}` : ""}`;
  const heading = (index) => [
    animation.unit ? `${animation.field} (${animation.unit})` : animation.field, `case ${animation.case}, one window`, animation.plane,
    index === null ? `forecasts of ${selects.model.value}` : `lead ${leadOfTotal(index)}`,
  ].filter(Boolean).join(" · ");

  const build = () => {
    columns = visibleColumns();
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
        for (const type of ["pointermove", "pointerdown"]) cell.canvas.addEventListener(type, (event) => onPointer(event, cell));
        cell.canvas.addEventListener("pointerleave", () => onPointer(null));
      }
      return box;
    }));
    bars = animation.node.querySelector(".bars").cloneNode(true);
    (checkedValue("view") === "leads" ? screens : screens.firstChild).append(bars);
    const leads = checkedValue("view") === "leads";
    section.querySelector(".transport").hidden = leads || animation.leads.length < 2;
    control("model").hidden = !leads || selects.model.length < 2;
    control("models").hidden = leads || section.querySelectorAll("input[name=models]").length < 2;
    draw();
  };

  const onPointer = (event, cell) => {
    point = null;
    if (event) {
      const box = cell.canvas.getBoundingClientRect(), { wide, high } = plot(box.width);
      const column = Math.floor((event.clientX - box.left - LEFT) / wide * animation.size[0]);
      const row = Math.floor((event.clientY - box.top - 1) / high * animation.size[1]);
      if (column >= 0 && row >= 0 && column < animation.size[0] && row < animation.size[1]) point = [column, row];
    }
    draw();
  };

  const inkOf = (pointer) => {
    const style = getComputedStyle(document.documentElement);
    return { ...Object.fromEntries(["ink", "soft", "paper"].map((name) => [name, style.getPropertyValue(`--${name}`)])), pointer };
  };

  const draw = () => {
    const ink = inkOf(true), index = Number(slider.value), leads = checkedValue("view") === "leads";
    for (const cell of columns.flatMap((column) => column.cells)) {
      if (!leads) cell.index = index;
      const { canvas } = cell;
      const available = canvas.clientWidth, { high } = plot(available), pixelRatio = devicePixelRatio || 1;
      canvas.style.height = `${high + FOOT + 2}px`;
      canvas.width = Math.round(available * pixelRatio);
      canvas.height = Math.round((high + FOOT + 2) * pixelRatio);
      const context = canvas.getContext("2d");
      context.scale(pixelRatio, pixelRatio);
      paint(context, cell, 0, 1, available, ink);
      cell.label.textContent = [cell.kind === cell.title ? "" : cell.kind, note(cell)].filter(Boolean).join(" ");
      cell.value.textContent = point ? formatLevel(cell, levelAt(cell, ...point)) : "";
      const source = cell.kind === "truth" ? "truth" : `${cell.kind} of ${cell.model}`;
      canvas.setAttribute("aria-label", `${animation.field}, ${source}, ${leadLabel(cell.index)}`);
    }
    const scale = [...bars.querySelectorAll("[data-kind=errors] div span")];
    const perLead = leads && checkedValue("errors") === "each";
    [0, limit(index) / 2, limit(index)].forEach((value, k) => { scale[k].textContent = perLead ? ["0", "", "end of each lead’s scale"][k] : number(value); });
    section.querySelector(".lead-number").textContent = leadOfTotal(index);
    slider.setAttribute("aria-valuetext", leadLabel(index));
    if (point) {
      const coordinates = [point[0], animation.size[1] - 1 - point[1]].map((gridIndex, axis) => {
        const { name, unit } = animation.axes[axis];
        return `${name} = ${number(gridIndex * spacing(axis))}${unit ? ` ${unit}` : ""}`;
      });
      reading.textContent = `${coordinates.join(", ")}; values next to each map${animation.unit ? ` in ${animation.unit}` : ""}.`;
    } else reading.textContent = hint;
  };

  const selectAnimation = () => {
    fill("field", distinct(animations.filter((each) => each.case === selects.case.value).map((each) => each.field)));
    const matching = animations.filter((each) => each.case === selects.case.value && each.field === selects.field.value);
    fill("plane", distinct(matching.map((each) => each.plane)));
    const next = matching.find((each) => each.plane === selects.plane.value);
    // Images are decoded on demand and dropped from the caches with their animation.
    Promise.all([...next.node.querySelectorAll("img")].map((image) => image.decode())).then(() => {
      pixelCache.clear();
      canvasCache.clear();
      animation = next;
      point = null;
      slider.max = animation.leads.length - 1;
      build();
    });
  };

  /* Playback */

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
    }, FRAME_MS);
  };

  /* Downloads of maps and animations */

  const renderSheet = (visible, title, pixelRatio) => {
    const CELL_WIDTH = 250, GAP = 14, LINE = 18, HEAD = 58, BAR = 56, ink = withLightTheme(() => inkOf(false));
    const { wide, high } = plot(CELL_WIDTH), cellHeight = high + FOOT + LINE + 8;
    const rows = Math.max(...visible.map((column) => column.cells.length));
    const barsBelowTruth = visible[0].cells.length < rows && cellHeight >= 2 * BAR;
    const width = visible.length * (CELL_WIDTH + GAP) + GAP, height = HEAD + rows * cellHeight + (barsBelowTruth ? 0 : 2 * BAR) + 8;
    const canvas = document.createElement("canvas");
    canvas.width = width * pixelRatio;
    canvas.height = Math.ceil(height) * pixelRatio;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.scale(pixelRatio, pixelRatio);
    context.fillStyle = ink.paper;
    context.fillRect(0, 0, width, Math.ceil(height));
    const write = (text, x, y, colour, font = "13px system-ui, sans-serif", align = "left") => {
      Object.assign(context, { fillStyle: colour, font, textAlign: align, textBaseline: "alphabetic" });
      context.fillText(text, x, y);
    };
    write(title, GAP + LEFT, 22, ink.ink, "600 14px system-ui, sans-serif");
    visible.forEach((column, k) => {
      const x = GAP + k * (CELL_WIDTH + GAP);
      write(column.title, x + LEFT, 48, ink.ink);
      column.cells.forEach((cell, n) => {
        const y = HEAD + n * cellHeight;
        if (cell.kind !== cell.title) write([cell.kind, note(cell)].filter(Boolean).join(" "), x + LEFT, y + 10, ink.soft, "12px system-ui, sans-serif");
        paint(context, cell, x, y + LINE, CELL_WIDTH, ink);
      });
    });
    const top = HEAD + (barsBelowTruth ? cellHeight : rows * cellHeight) + LINE;
    [...bars.querySelectorAll(".bar")].forEach((bar, k) => {
      const x = GAP + LEFT, y = top + k * BAR;
      write(bar.querySelector("figcaption").textContent.trim(), x, y + 10, ink.soft, FONT);
      context.drawImage(bar.querySelector("img"), x, y + 16, wide, 10);
      [...bar.querySelectorAll(":scope > div span")].forEach((label, n) => write(label.textContent, x + n * wide / 2, y + 38, ink.soft, FONT, ["left", "center", "right"][n]));
    });
    return canvas;
  };

  // 118 colours of each colour bar, one for non-finite values, and greys for text.
  const gifColours = () => {
    const count = 118, scales = [palette("values"), palette("errors")];
    const barColours = scales.flatMap((colour) => Array.from({ length: count }, (_, k) => [...colour(Math.round(k * (LEVELS - 1) / (count - 1)))]));
    const greys = 256 - barColours.length - 1;
    return [...barColours, NOT_FINITE, ...Array.from({ length: greys }, (_, k) => Array(3).fill(Math.round(255 * k / (greys - 1))))];
  };

  const renderGif = () => {
    const colourTable = gifColours(), nearest = new Map(), previous = slider.value;
    let width = 0, height = 0;
    const frames = animation.leads.map((_, index) => {
      slider.value = index;
      draw();
      const canvas = renderSheet(columnsByModel(index), heading(index), 1);
      ({ width, height } = canvas);
      const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
      const pixels = new Uint8Array(width * height);
      for (let k = 0; k < pixels.length; k += 1) {
        const [r, g, b] = [data[4 * k], data[4 * k + 1], data[4 * k + 2]], key = (r << 16) | (g << 8) | b;
        if (!nearest.has(key)) {
          const distances = colourTable.map((entry) => (entry[0] - r) ** 2 + (entry[1] - g) ** 2 + (entry[2] - b) ** 2);
          nearest.set(key, distances.indexOf(Math.min(...distances)));
        }
        pixels[k] = nearest.get(key);
      }
      return { pixels, hundredths: index === animation.leads.length - 1 ? 150 : FRAME_MS / 10 };
    });
    slider.value = previous;
    draw();
    return gif(width, height, colourTable, frames);
  };

  onDownload(section, (format, pressed) => {
    stop();
    const name = ["case", animation.case, animation.field, animation.plane].filter(Boolean).join("-").replace(/[^\p{L}\p{N}-]+/gu, "-");
    const leads = checkedValue("view") === "leads";
    if (format === "png") {
      const index = Number(slider.value), suffix = leads ? "leads" : `lead-${animation.leads[index]}`;
      renderSheet(visibleColumns(), heading(leads ? null : index), 2).toBlob((blob) => download(`${name}-${suffix}.png`, blob));
      return;
    }
    pressed.disabled = true;
    setTimeout(() => { // let the browser show the disabled button before the work starts
      download(`${name}.gif`, renderGif());
      pressed.disabled = false;
    }, 20);
  });

  fill("case", distinct(animations.map((each) => each.case)));
  fill("model", [...section.querySelectorAll("input[name=models]")].map((input) => input.value));
  for (const name of ["case", "field", "plane"]) selects[name].addEventListener("change", selectAnimation);
  selects.model.addEventListener("change", build);
  for (const name of ["view", "errors"]) {
    control(name).hidden = false;
    control(name).addEventListener("change", build);
  }
  control("models").addEventListener("change", build);
  slider.addEventListener("input", () => { stop(); draw(); });
  button.addEventListener("click", () => (timer === null ? play() : stop()));
  stage.hidden = false;
  selectAnimation();
  let width = 0;
  new ResizeObserver(() => {
    if (!animation || screens.clientWidth === width) return;
    width = screens.clientWidth;
    requestAnimationFrame(draw);
  }).observe(screens);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
})();
