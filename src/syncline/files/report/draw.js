
/* Draws prepared timelines into an element, and finds the span at a place of the drawing. */
class Picture {
  static SVG = 'http://www.w3.org/2000/svg';
  static NARROW = 600; // below this width, names stand above their rows
  static GUTTER = 108;
  static LEAD = 3;
  static NEAR = 4; // pixels by which a pointer may miss a small span

  constructor(element, timelines, view) {
    this.element = element;
    this.timelines = timelines;
    this.view = view;
    this.selected = null;
    this.pointerX = null;
    this.pen = document.createElement('canvas').getContext('2d');
    this.widths = new Map();
  }

  draw() {
    const full = this.element.clientWidth;
    this.left = full < Picture.NARROW ? 0 : Picture.GUTTER;
    this.width = Math.max(full - this.left - 1, 50);
    this.layout = arrange(this.timelines, this.left === 0);
    const { height } = this.layout;
    this.pen.font = `11.5px ${getComputedStyle(this.element).fontFamily}`;
    const svg = Picture.shape('svg', { viewBox: `0 0 ${full} ${height}`, width: full, height });
    svg.append(this.axis());
    for (const timeline of this.layout.timelines) svg.append(this.timeline(timeline));
    svg.append(...this.pointer());
    this.element.replaceChildren(svg);
  }

  /* The span at a place of the element, or the nearest one within a few pixels, or null. */
  spanAt(x, y) {
    const rows = this.layout.timelines.flatMap((timeline) => timeline.rows);
    const row = rows.find((r) => y >= r.y && y <= r.y + r.height);
    if (!row) return null;
    const time = this.timeAt(x);
    const index = firstAfter(row.spans, time);
    const away = (span) => Math.max(span.start - time, time - span.stop, 0);
    const [nearest] = [row.spans[index], row.spans[index - 1]].filter(Boolean)
      .sort((a, b) => away(a) - away(b));
    const slack = (Picture.NEAR / this.width) * this.view.span;
    return nearest && away(nearest) <= slack ? nearest : null;
  }

  /* Where a place lies in the plot: 0 at its left edge, 1 at its right. */
  share(x) {
    return Math.min(Math.max((x - this.left) / this.width, 0), 1);
  }

  timeAt(x) {
    return this.view.from + ((x - this.left) / this.width) * this.view.span;
  }

  /* Horizontal place in the plot, kept near it: far coordinates would lose precision. */
  place(time) {
    const x = ((time - this.view.from) / this.view.span) * this.width;
    return Math.min(Math.max(x, -2), this.width + 2);
  }

  static shape(name, attributes, text) {
    const element = document.createElementNS(Picture.SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  timeline(timeline) {
    const group = Picture.shape('g', {
      'data-timeline': timeline.source,
      'data-from': Math.round(this.view.from),
      'data-to': Math.round(this.view.to),
    });
    const { height } = this.layout;
    const plot = Picture.shape('svg', { x: this.left, y: 0, width: this.width, height });
    for (const row of timeline.rows) plot.append(...this.row(row));
    plot.append(...this.exposed(timeline), ...this.end(timeline));
    group.append(...this.names(timeline), plot);
    return group;
  }

  names(timeline) {
    const wide = this.left > 0;
    const name = (text, y, above) => (wide
      ? Picture.shape('text', { x: this.left - 10, y, class: 'name side' }, text)
      : Picture.shape('text', { x: 0, y: above, class: 'name' }, text));
    const about = timeline.about.slice(0, wide ? undefined : 2).join(', ');
    const title = Picture.shape('text', { x: 0, y: timeline.top + 14, class: 'title' });
    title.append(
      Picture.shape('tspan', { class: 'source' }, capital(timeline.source)),
      Picture.shape('tspan', { class: 'about', dx: 8 }, about),
    );
    const names = timeline.rows.filter((row) => row.name)
      .map((row) => name(row.name, row.y + row.height / 2 + 4, row.y - 3));
    if (wide && timeline.exposed.length) names.push(name('exposed', timeline.strip.y + 7));
    return [title, ...names];
  }

  row({ spans, leads, y, height }) {
    const shapes = this.leads(leads, y + height + 1);
    let last = null; // the box before, which stands for spans too small to be seen apart
    for (let i = firstAfter(spans, this.view.from); i < spans.length; i += 1) {
      const span = spans[i];
      if (span.start > this.view.to) break;
      const start = this.place(span.start);
      const stop = this.place(span.stop);
      const hidden = last && last.kind === span.kind && stop - last.start < 1.5;
      if (hidden && span !== this.selected) continue;
      const gap = stop - start > 5 ? 1 : 0;
      const width = Math.max(stop - start - gap, 0.9);
      const chosen = span === this.selected ? ' selected' : '';
      const twin = this.selected && span === this.selected.twin ? ' twin' : '';
      const css = `span k-${span.kind}${chosen}${twin}`;
      shapes.push(Picture.shape('rect', { x: start, y, width, height, class: css }));
      last = { start, kind: span.kind };
      const x = Math.max(start, 0) + 4;
      const text = this.fitted(span, Math.min(stop, this.width) - x - 3);
      const middle = y + height / 2 + 4;
      if (text) shapes.push(Picture.shape('text', { x, y: middle, class: 'label' }, text));
    }
    return shapes;
  }

  /* The wait of each message, from ready to issued; darker where several wait. */
  leads(spans, y) {
    const shapes = [];
    let last = []; // the selected one lies on top
    for (const span of spans) {
      if (span.ready > this.view.to || span.start < this.view.from) continue;
      const x = this.place(span.ready);
      const width = this.place(span.start) - x;
      const chosen = span === this.selected ? ' chosen' : '';
      if (width < 0.5 && !chosen) continue;
      const height = Picture.LEAD;
      const shape = Picture.shape('rect', { x, y, width, height, class: `lead${chosen}` });
      if (chosen) last = [shape];
      else shapes.push(shape);
    }
    return [...shapes, ...last];
  }

  /* The label, shortened to the room there is, or nothing where too little would be left. */
  fitted({ label, kind }, room) {
    if (room < 12) return '';
    if (this.measure(label) <= room) return label;
    const message = kind === 'message';
    let letters = Math.floor((label.length * room) / this.measure(label));
    // A message is recognised by its first tensor, an operation by the end of its path.
    const cut = () => (message ? `${label.slice(0, letters).trimEnd()}…`
      : `…${label.slice(-letters).replace(/^\.+/, '')}`);
    while (letters > 0 && this.measure(cut()) > room) letters -= 1;
    if (letters >= (message ? 12 : 5)) return cut();
    const [, tensors] = (message && label.match(/\((\d+)\)$/)) || [];
    const short = `${tensors} tensors`;
    return tensors && this.measure(short) <= room ? short : '';
  }

  measure(text) {
    if (!this.widths.has(text)) this.widths.set(text, this.pen.measureText(text).width);
    return this.widths.get(text);
  }

  exposed({ exposed, strip: { y, height } }) {
    return exposed
      .filter(([start, stop]) => stop >= this.view.from && start <= this.view.to)
      .map(([start, stop]) => {
        const x = this.place(start);
        const width = Math.max(this.place(stop) - x, 0.9);
        return Picture.shape('rect', { x, y, width, height, class: 'exposed' });
      });
  }

  /* Where the iteration ends. */
  end(timeline) {
    const x = this.place(timeline.iteration);
    const y1 = (timeline.rows[0] ?? timeline.strip).y - 4;
    return [Picture.shape('line', { x1: x, x2: x, y1, y2: timeline.bottom, class: 'end' })];
  }

  axis() {
    const group = Picture.shape('g', { class: 'axis' });
    const { marks, unit } = ticks(this.view.from, this.view.to, this.width / 80);
    const bottom = this.layout.axis;
    for (const { at, label } of marks) {
      const x = this.left + this.place(at);
      const text = label + (at === marks.at(-1).at ? `\u00a0${unit}` : '');
      group.append(Picture.shape('line', { x1: x, x2: x, y1: 0, y2: bottom, class: 'grid' }));
      const covered = this.pointerX !== null && Math.abs(x - this.pointerX) < 56;
      const place = { x, y: bottom + 15, 'text-anchor': this.anchor(x, 14) };
      if (!covered) group.append(Picture.shape('text', place, text));
    }
    return group;
  }

  /* A hairline under the pointer through all timelines, with its time. */
  pointer() {
    const x = this.pointerX;
    if (x === null || x < this.left || x > this.left + this.width) return [];
    const bottom = this.layout.axis;
    const at = { x, y: bottom + 15, 'text-anchor': this.anchor(x, 40), class: 'pointer' };
    return [
      Picture.shape('line', { x1: x, x2: x, y1: 0, y2: bottom + 3, class: 'pointer' }),
      Picture.shape('text', at, formatTime(this.timeAt(x), 4)),
    ];
  }

  anchor(x, room) {
    if (x < this.left + room) return 'start';
    return x > this.left + this.width - room ? 'end' : 'middle';
  }
}
