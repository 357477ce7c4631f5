
/* What the reader does: zoom, pan, select a span to see its details. */
(() => {
  const chart = document.getElementById('chart');
  if (!chart) return;

  const data = JSON.parse(document.getElementById('data').textContent);
  const timelines = prepare(data);
  const ends = timelines.flatMap((t) => [t.iteration, ...t.rows.map((r) => r.spans.at(-1).stop)]);
  const view = new View(Math.max(1, ...ends) * 1.012);
  const picture = new Picture(chart, timelines, view);
  const details = document.getElementById('details');
  const help = document.getElementById('help');
  const range = document.getElementById('range');
  const buttons = document.querySelectorAll('#tools button');
  let hovered = null;
  let due = 0;

  function draw() {
    due = 0;
    picture.draw();
    range.textContent = `${view.from ? formatTime(view.from, 4) : 0} – ${formatTime(view.to, 4)}`;
    for (const button of buttons) {
      button.disabled = button.dataset.do === 'zoom-in' ? view.span <= view.least : view.whole;
    }
  }

  function redraw() {
    due ||= requestAnimationFrame(draw);
  }

  /* ---- what is known about a span ---- */

  function facts(span) {
    const took = span.stop - span.start;
    const known = [['Kind', data.kinds[span.kind]]];
    if (span.ready === null) {
      known.push(['Start', formatTime(span.start, 4)]);
    } else {
      // What is ready before the iteration is shown from its beginning.
      const ready = span.ready || !span.start ? formatTime(span.ready, 4) : 'before';
      known.push(['Ready', ready], ['Issued', formatTime(span.start, 4)]);
      known.push(['Finished', formatTime(span.stop, 4)]);
    }
    known.push(['Duration', formatTime(took, 4)]);
    if (span.bytes !== null) known.push(['Size', formatSize(span.bytes)]);
    if (span.bytes && took) known.push(['Rate', `${formatSize((span.bytes / took) * 1e9)}/s`]);
    if (span.twin) {
      const other = span.twin.stop - span.twin.start;
      const change = took ? ` (${formatChange(other / took - 1)})` : '';
      known.push([capital(timelines[span.twin.t].source), `${formatTime(other, 4)}${change}`]);
    }
    return known;
  }

  function element(name, css, ...children) {
    const made = document.createElement(name);
    if (css) made.className = css;
    made.append(...children);
    return made;
  }

  function describe() {
    const span = picture.selected ?? hovered;
    help.hidden = Boolean(span);
    details.hidden = !span;
    if (!span) return;
    const pairs = facts(span).map(([term, value]) => (
      element('div', '', element('dt', '', term), element('dd', '', value))));
    details.replaceChildren(
      element('p', '',
        element('span', `swatch k-${span.kind}`), ' ',
        element('b', '', span.label), ' ',
        element('span', 'note', timelines[span.t].source)),
      element('dl', '', ...pairs),
    );
  }

  function select(span) {
    picture.selected = span;
    if (span && (span.stop < view.from || span.start > view.to)) {
      const middle = (span.start + span.stop) / 2;
      view.show(middle - view.span / 2, middle + view.span / 2);
    }
    describe();
  }

  function step(by) {
    const order = timelines.flatMap((t) => t.rows.flatMap((r) => r.spans));
    const now = order.indexOf(picture.selected);
    const next = now < 0 && by < 0 ? order.length - 1 : now + by;
    select(order[(next + order.length) % order.length] ?? null);
  }

  function fit(span) {
    if (!span) return;
    const margin = Math.max((span.stop - span.start) * 0.25, view.least / 2);
    view.show(span.start - margin, span.stop + margin);
  }

  /* ---- what the reader does ---- */

  const actions = {
    'zoom-in': () => view.zoom(1 / 1.6),
    'zoom-out': () => view.zoom(1.6),
    'pan-left': () => view.pan(-0.25),
    'pan-right': () => view.pan(0.25),
    reset: () => view.reset(),
  };

  const keys = {
    '+': actions['zoom-in'],
    '=': actions['zoom-in'],
    '-': actions['zoom-out'],
    0: actions.reset,
    arrowleft: actions['pan-left'],
    arrowright: actions['pan-right'],
    arrowup: actions['zoom-in'],
    arrowdown: actions['zoom-out'],
    n: () => step(1),
    p: () => step(-1),
    enter: () => fit(picture.selected),
    escape: () => {
      hovered = null;
      select(null);
    },
  };

  function listenToKeysAndButtons() {
    document.getElementById('tools').addEventListener('click', (event) => {
      actions[event.target.closest('button')?.dataset.do]?.();
      redraw();
    });
    chart.addEventListener('keydown', (event) => {
      const act = keys[event.key.toLowerCase()];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
      redraw();
    });
  }

  const place = (event) => {
    const box = chart.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  function listenToWheel() {
    let scrolledAt = -Infinity; // when the wheel last moved the page
    document.addEventListener('wheel', (event) => {
      if (!chart.contains(event.target)) scrolledAt = event.timeStamp;
    }, { passive: true });
    chart.addEventListener('wheel', (event) => {
      const pixels = [1, 16, 400][event.deltaMode];
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      // The page goes on scrolling when its scroll reaches the chart, or when the chart cannot zoom
      // out or pan any more: the chart must not trap the wheel.
      const passing = event.timeStamp - scrolledAt < 250 && !event.ctrlKey;
      if (passing || (view.whole && (sideways || event.deltaY > 0))) {
        scrolledAt = event.timeStamp;
        return;
      }
      event.preventDefault();
      const speed = event.ctrlKey ? 0.01 : 0.002; // a pinch on a touchpad comes with ctrlKey
      if (sideways) view.pan((event.deltaX * pixels) / picture.width);
      else view.zoom(Math.exp(event.deltaY * pixels * speed), picture.share(place(event).x));
      redraw();
    }, { passive: false });
  }

  function listenToPointers() {
    const down = new Map(); // pointer -> its last place
    let pressed = null; // where a press began that may yet become a click

    function drag(id, to) {
      const from = down.get(id);
      const other = [...down].find(([key]) => key !== id)?.[1];
      if (other) {
        const apart = (a) => Math.max(Math.hypot(a.x - other.x, a.y - other.y), 20);
        view.zoom(apart(from) / apart(to), picture.share(other.x));
      } else {
        view.pan((from.x - to.x) / picture.width);
      }
      down.set(id, to);
    }

    function hover(at) {
      picture.pointerX = at?.x ?? null;
      const span = at && picture.spanAt(at.x, at.y);
      chart.classList.toggle('over', Boolean(span));
      if (span !== hovered) {
        hovered = span;
        if (!picture.selected) describe();
      }
    }

    chart.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      down.set(event.pointerId, place(event));
      pressed = down.size === 1 ? place(event) : null;
    });
    chart.addEventListener('pointermove', (event) => {
      const at = place(event);
      if (event.pointerType === 'mouse') hover(at);
      redraw();
      if (!down.has(event.pointerId)) return;
      if (pressed && Math.hypot(at.x - pressed.x, at.y - pressed.y) <= Picture.NEAR) return;
      if (pressed) chart.setPointerCapture(event.pointerId);
      pressed = null;
      chart.classList.add('dragging');
      drag(event.pointerId, at);
    });
    const lift = (event) => {
      const at = place(event);
      if (event.type === 'pointerup' && pressed) select(picture.spanAt(at.x, at.y));
      down.delete(event.pointerId);
      pressed = null;
      chart.classList.toggle('dragging', down.size > 0);
      redraw();
    };
    chart.addEventListener('pointerup', lift);
    chart.addEventListener('pointercancel', lift);
    chart.addEventListener('pointerleave', (event) => {
      hover(null);
      if (!chart.hasPointerCapture(event.pointerId)) down.delete(event.pointerId);
      redraw();
    });
    chart.addEventListener('dblclick', (event) => {
      const { x, y } = place(event);
      fit(picture.spanAt(x, y));
      redraw();
    });
    // Two fingers belong to the chart; with one, the page still scrolls up and down.
    chart.addEventListener('touchmove', (event) => {
      if (event.touches.length > 1) event.preventDefault();
    }, { passive: false });
  }

  document.getElementById('tools').hidden = false;
  chart.classList.add('live');
  describe();
  draw();
  new ResizeObserver(redraw).observe(chart);
  listenToKeysAndButtons();
  listenToWheel();
  listenToPointers();
})();
