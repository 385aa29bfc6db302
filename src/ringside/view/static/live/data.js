// The run as the page knows it: the state as it is told, and every step's row. Grows with the run; void when it restarts.

function bytes(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

export const unpack = {
  f32: (text) => new Float32Array(bytes(text).buffer),
  f64: (text) => new Float64Array(bytes(text).buffer),
  i32: (text) => new Int32Array(bytes(text).buffer),
  u8: bytes,
};

function grown(array, length) {
  if (array.length >= length) return array;
  const wider = new array.constructor(Math.max(length, 2 * array.length));
  wider.set(array);
  return wider;
}

// Rows by step, and for the map pictures of 2, 4, 8 ... steps in one, each cell the latest of its steps.
export class Rows {
  constructor(ranks = 0) {
    this.ranks = ranks;
    this.count = 0;
    this.steps = new Float64Array(64);
    this.worst = new Int32Array(64);
    this.lines = {};
    this.levels = [new Uint8Array(64 * ranks)];
    this.changes = [];
    this.number = 0;
  }

  indexOf(step) {
    let low = 0, high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low;
  }

  nearest(step) {
    const at = this.indexOf(step);
    if (at >= this.count) return this.count - 1;
    return at > 0 && step - this.steps[at - 1] < this.steps[at] - step ? at - 1 : at;
  }

  take(answer) {
    const steps = unpack.f64(answer.steps), late = unpack.u8(answer.late), worst = unpack.i32(answer.worst);
    const lines = Object.fromEntries(Object.entries(answer.lines).map(([name, text]) => [name, unpack.f32(text)]));
    this.steps = grown(this.steps, this.count + answer.rows);
    this.worst = grown(this.worst, this.count + answer.rows);
    for (const name of Object.keys(lines)) {
      this.lines[name] = grown(this.lines[name] ?? new Float32Array(64), this.count + answer.rows);
    }
    this.levels[0] = grown(this.levels[0], (this.count + answer.rows) * this.ranks);
    for (let i = 0; i < answer.rows; i++) {
      const at = this.indexOf(steps[i]);
      if (at === this.count) this.count++;
      else if (this.steps[at] !== steps[i]) this.widen(at); // a rank's records came late: rare
      this.steps[at] = steps[i];
      this.worst[at] = worst[i];
      for (const [name, values] of Object.entries(lines)) this.lines[name][at] = values[i];
      this.levels[0].set(late.subarray(i * this.ranks, (i + 1) * this.ranks), at * this.ranks);
      this.pool(at);
      this.changes.push(at);
    }
    this.number++;
  }

  widen(at) {
    for (const line of [this.steps, this.worst, ...Object.values(this.lines)]) line.copyWithin(at + 1, at, this.count);
    this.levels[0].copyWithin((at + 1) * this.ranks, at * this.ranks, this.count * this.ranks);
    this.count++;
    for (let row = at + 1; row < this.count; row++) {
      this.pool(row);
      this.changes.push(row);
    }
  }

  pool(at) {
    const ranks = this.ranks;
    for (let level = 1; this.count >> level; level++) {
      const to = at >> level, fine = this.levels[level - 1];
      const first = 2 * to * ranks, second = 2 * to + 1 < (this.count + (1 << (level - 1)) - 1) >> (level - 1) ? first + ranks : first;
      const coarse = (this.levels[level] = grown(this.levels[level] ?? new Uint8Array(64 * ranks), (to + 1) * ranks));
      for (let rank = 0; rank < ranks; rank++) {
        const a = fine[first + rank], b = fine[second + rank];
        coarse[to * ranks + rank] = a > b ? a : b;
      }
      if (level > 20) break;
    }
  }

  columns(level) {
    return (this.count + (1 << level) - 1) >> level;
  }

  late(row, rank) {
    const code = this.levels[0][row * this.ranks + rank];
    return code ? ((code - 1) / 254) ** 2 : NaN;
  }
}

export class Run {
  constructor({ onState, onRows, onReset, onLink }) {
    this.hooks = { onState, onRows, onReset, onLink };
    this.rows = new Rows();
    this.epoch = "";
    this.since = 0;
    this.state = null;
    this.busy = false;
    this.connect();
  }

  connect() {
    const source = new EventSource("events");
    source.onopen = () => this.hooks.onLink(true);
    source.onerror = () => {
      this.hooks.onLink(false);
      if (source.readyState === EventSource.CLOSED) {
        source.close();
        setTimeout(() => this.connect(), 2000);
      }
    };
    source.addEventListener("now", (event) => this.hear(JSON.parse(event.data)));
  }

  hear(state) {
    this.state = state;
    this.begin(state);
    this.hooks.onState(state);
    if (state.serial > this.since) this.load();
  }

  begin({ epoch, ranks }) {
    if (epoch === this.epoch) return;
    this.epoch = epoch;
    this.since = 0;
    this.rows = new Rows(ranks);
    this.hooks.onReset();
  }

  async load() {
    if (this.busy) return;
    this.busy = true;
    try {
      let more = true;
      while (more) {
        const asked = this.epoch;
        const response = await fetch(`api/steps?since=${this.since}&epoch=${encodeURIComponent(asked)}`);
        if (!response.ok) break;
        const answer = await response.json();
        if (asked !== this.epoch) continue; // another run began meanwhile: this answer is none to what is asked now
        this.begin(answer); // where the epoch is another, the answer starts from the beginning
        this.rows.take(answer);
        this.since = answer.since;
        more = answer.more;
        this.hooks.onRows();
      }
    } catch {
      this.hooks.onLink(false); // the next state tries again
    } finally {
      this.busy = false;
    }
    if (this.state && this.state.serial > this.since && this.state.epoch === this.epoch) setTimeout(() => this.load(), 300);
  }

  async ofRank(rank) {
    const response = await fetch(`api/rank?rank=${rank}`);
    if (!response.ok) return null;
    const answer = await response.json();
    if (answer.epoch !== this.epoch) return null;
    const names = ["own", "wait", "wire"];
    return { rank, steps: unpack.f64(answer.steps), ...Object.fromEntries(names.map((name) => [name, unpack.f32(answer[name])])) };
  }
}
