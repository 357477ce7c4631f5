'use strict';

/* What the chart shows, without the page: numbers, the visible range, ticks and layout. */

const TIME_UNITS = [[1e9, 's'], [1e6, 'ms'], [1e3, 'µs'], [1, 'ns']];
const SIZE_UNITS = [[1e12, 'TB'], [1e9, 'GB'], [1e6, 'MB'], [1e3, 'kB'], [1, 'B']];

function withUnit(value, units, digits = 3) {
  if (value === 0) return `0\u00a0${units === TIME_UNITS ? 's' : 'B'}`;
  const [factor, unit] =
    units.find(([f]) => Math.abs(value) >= f * 0.9995) ?? units[units.length - 1];
  const scaled = value / factor;
  const whole = Math.floor(Math.log10(Math.abs(scaled))) + 1;
  const decimals = factor === 1 ? 0 : Math.max(digits - whole, 0);
  return `${scaled.toFixed(decimals)}\u00a0${unit}`;
}

const formatTime = (ns, digits) => withUnit(ns, TIME_UNITS, digits);
const formatSize = (bytes) => withUnit(bytes, SIZE_UNITS);
const formatChange = (fraction) => (
  `${fraction < 0 ? '−' : '+'}${Math.abs(fraction * 100).toFixed(1)}\u00a0%`);
const capital = (text) => text[0].toUpperCase() + text.slice(1);

/* The visible range [from, to] of time, in nanoseconds, inside [0, extent]. */
class View {
  constructor(extent) {
    this.extent = extent;
    // Not beyond what single-precision SVG coordinates can still place to a pixel.
    this.least = Math.min(Math.max(extent / 20000, 200), extent);
    this.reset();
  }

  get span() {
    return this.to - this.from;
  }

  get whole() {
    return this.span >= this.extent;
  }

  reset() {
    this.show(0, this.extent);
  }

  show(from, to) {
    const span = Math.min(Math.max(to - from, this.least), this.extent);
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(middle - span / 2, 0), this.extent - span);
    this.to = this.from + span;
  }

  /* Shows `factor` times the present span; the time at `anchor` (0 to 1) stays where it is. */
  zoom(factor, anchor = 0.5) {
    const span = Math.min(Math.max(this.span * factor, this.least), this.extent);
    const from = this.from + (this.span - span) * anchor;
    this.show(from, from + span);
  }

  /* Moves by a share of the visible span. */
  pan(share) {
    const from = Math.min(Math.max(this.from + this.span * share, 0), this.extent - this.span);
    this.show(from, from + this.span);
  }
}

/* Round times in [from, to], at most `most` of them, all labelled in one unit. */
function ticks(from, to, most) {
  const raw = (to - from) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const [factor, unit] = TIME_UNITS.find(([f]) => to >= f) ?? TIME_UNITS[3];
  const decimals = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
  const marks = [];
  for (let k = Math.ceil(from / step); k * step <= to; k += 1) {
    marks.push({ at: k * step, label: (k * step / factor).toFixed(decimals) });
  }
  return { marks, unit };
}

/* Index of the first of the row's spans (sorted, disjoint) that ends after `time`. */
function firstAfter(spans, time) {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].stop <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* Spans as objects that know their timeline and row, and their counterpart in the other one. */
function prepare(data) {
  const kinds = Object.keys(data.kinds);
  const byKey = new Map();
  return data.timelines.map((timeline, t) => {
    const seen = new Map();
    const rows = timeline.rows.map((row, r) => ({
      name: row.name,
      spans: row.spans.map(([start, stop, kind, label, bytes, ready = null]) => (
        { start, stop, kind: kinds[kind], label, bytes, ready, t, r, twin: null })),
    }));
    // Kept apart: the wait of a message may be visible where the message is not.
    for (const row of rows) row.leads = row.spans.filter((s) => s.ready !== null && s.ready < s.start);
    for (const span of rows.flatMap((row) => row.spans).sort((a, b) => a.start - b.start)) {
      const name = `${span.kind} ${span.label}`;
      const nth = seen.get(name) ?? 0;
      seen.set(name, nth + 1);
      const key = `${nth} ${name}`;
      const other = byKey.get(key);
      if (other) {
        span.twin = other;
        other.twin = span;
      }
      byKey.set(key, span);
    }
    return { ...timeline, rows };
  });
}

/* Where everything goes, top to bottom, in pixels. `narrow` puts names above their rows. */
function arrange(timelines, narrow) {
  const size = narrow
    ? { title: 22, name: 16, row: 32, gap: 6, strip: 6, after: 22, axis: 22 }
    : { title: 26, name: 0, row: 32, gap: 6, strip: 6, after: 24, axis: 22 };
  let y = 0;
  const placed = timelines.map((timeline) => {
    const top = y;
    y += size.title;
    const rows = timeline.rows.map((row) => {
      y += row.name ? size.name : 0;
      const at = { ...row, y, height: size.row };
      y += size.row + size.gap;
      return at;
    });
    const strip = { y, height: size.strip };
    y += size.strip + size.after;
    return { ...timeline, top, rows, strip, bottom: strip.y + strip.height };
  });
  return { timelines: placed, axis: y - size.after + 8, height: y - size.after + 8 + size.axis };
}
