// ---- What the page does with the model ----------------------------------------------------------

const $ = id => document.getElementById(id);
const live = JSON.parse($('data').textContent);
live.weights = unpackWeights(live.weights, live.shapes);
const { config, tokens } = live;
const EOT = tokens.length;          // end of text: every text begins after one
const rank = new Map(tokens.map((token, id) => [token, id]));
const HUES = [250, 65, 150, 15, 305, 105, 200, 345];
const UNTOUCHED = { out: {}, force: {}, top_k: config.top_k, temperature: 1 };
const EXAMPLES = ['The dogs near the tree', 'The boy who saw the girls', 'The king washes',
  'One rainy day Leo goes to the park.'];
const KINDS = {                     // of a layer, by the end of its name: a choice, what it does
  shrink: ['expert', 'halves the width'],
  grow: ['expert', 'doubles it again'],
  att: ['module', 'attention'],
  ffd: ['module', 'feed-forward'],
};

let hands = structuredClone(UNTOUCHED);
let ids = [];                       // the whole text; `idx` is what the model can read of it
let idx = [];
let looked = 0;                     // the token whose way is shown
let picked = null;                  // the choice that was clicked, as [layer, e]
let now, before;                    // what the model says with the changes, and without them
let isWriting = false;

// Text from the data and the reader goes into the page through here alone, never as HTML.
function make(parent, tag, className = '', text = '') {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

function button(parent, id, text, act) {
  const element = make(parent, 'button', '', text);
  element.id = id;
  element.onclick = act;
  return element;
}

const percent = part => (100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0) + '%';
const signed = (value, digits) => (value < 0 ? '−' : '+') + Math.abs(value).toFixed(digits);
const number = value => Math.round(value).toLocaleString('en');
const kindOf = layer => KINDS[layer.split('.').at(-1)] || ['block', 'small Transformers'];
const layers = () => Object.keys(now.routes);

// A sign in place of each letter that would not show.
function visible(text) {
  const sign = c => '[U+' + c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0') + ']';
  const signs = text.replace(/[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}|[\u115f\u1160\u3164\uffa0]/gu, sign);
  return signs.replaceAll('[U+000A]', '↵').replaceAll('[U+0009]', '⇥');
}

function wordOf(id) {
  if (id === EOT) return '⟨start⟩';
  try {
    return visible(decode([tokens[id]], true)).replace(/^ (?=\S)/, '').replaceAll(' ', '␣');
  } catch {                         // a part of a letter
    return Array.from(tokens[id], c => '\\x' + c.charCodeAt(0).toString(16)).join('');
  }
}

function colour(element, e) {
  element.classList.add('choice');
  element.style.setProperty('--hue', HUES[e % HUES.length]);
}

// ---- Reading ------------------------------------------------------------------------------------

const memory = new Map();           // the last answers, by text box and changes

function read(box, idx, hands) {
  const key = box + JSON.stringify(hands);
  const known = memory.get(key);
  if (known && known.idx.join() === idx.join()) return known;
  if (memory.size > 30) memory.clear();
  const answer = forward(live, idx, hands, known);
  memory.set(key, answer);
  return answer;
}

// The ids of a text that the model reads. As in generate, a full context goes on from its newer half.
function readable(ids) {
  const half = config.block_size / 2;
  return ids.slice(half * Math.max(0, Math.ceil(ids.length / half) - 2));
}

const sum = row => row.reduce((a, b) => a + b, 0);
const isTouched = () => JSON.stringify(hands) !== JSON.stringify(UNTOUCHED);

// The text has changed. A token stays forced if nothing before it has changed.
function readText(newIds = [EOT, ...encode($('text').value, rank)]) {
  const old = idx;
  ids = newIds;
  idx = readable(ids);
  const same = idx.findIndex((id, t) => id !== old[t]);
  const kept = same < 0 ? idx.length : same;
  for (const layer in hands.force) {
    for (const t in hands.force[layer]) if (t >= kept) unforce(layer, t);
  }
  looked = idx.length - 1;
  update();
}

function update() {
  before = read('text', idx, UNTOUCHED);
  now = read('text', idx, hands);
  paint();
  paintPair();
}

function paint() {
  const focused = document.activeElement.id;
  paintTokens();
  paintMachine(looked);
  paintPanel();
  paintLoss();
  paintNext();
  if (focused && document.activeElement.id !== focused) $(focused)?.focus();
}

// ---- Hands on -----------------------------------------------------------------------------------

function knock(layer, e) {
  const out = hands.out[layer] || [];
  hands.out[layer] = out.includes(e) ? out.filter(other => other !== e) : [...out, e];
  if (!hands.out[layer].length) delete hands.out[layer];
  for (const t in hands.force[layer]) if (hands.force[layer][t] === e) unforce(layer, t);
  update();
}

function force(layer, t, e) {
  if (hands.force[layer]?.[t] === e) unforce(layer, t);
  else (hands.force[layer] ??= {})[t] = e;
  update();
}

function unforce(layer, t) {
  delete hands.force[layer][t];
  if (!Object.keys(hands.force[layer]).length) delete hands.force[layer];
}

function reset() {
  hands = structuredClone(UNTOUCHED);
  for (const [id, value] of [['top_k', config.top_k], ['temperature', 0]]) {
    $(id).value = value;
    $(id).oninput();
  }
}

// Draw a token as sample.py does: of the 50 most probable, at a temperature of 0.8.
function draw(logits) {
  const best = [...logits.keys()].sort((a, b) => logits[b] - logits[a]).slice(0, 50);
  const prob = softmax(Float32Array.from(best, id => logits[id] / 0.8));
  let rest = Math.random();
  return best.find((_, i) => (rest -= prob[i]) < 0) ?? best[0];
}

async function goOn() {
  const begin = $('text').value;
  const start = ids.length;
  let shown = begin;
  isWriting = true;
  $('go').textContent = 'Stop';
  for (let n = 0; n < 60 && isWriting && $('text').value === shown; n++) {     // or until you type
    const id = draw(now.logits.at(-1));
    if (id === EOT) break;
    shown = $('text').value = begin + decode([...ids.slice(start), id].map(i => tokens[i]));
    readText([...ids, id]);
    await new Promise(resolve => setTimeout(resolve, 70));
  }
  isWriting = false;
  $('go').textContent = 'Go on';
}

// ---- Painting -----------------------------------------------------------------------------------

function paintTokens() {
  $('tokens').replaceChildren();
  const isPicked = picked && !hands.out[picked[0]]?.includes(picked[1]);
  idx.forEach((id, t) => {
    const token = button($('tokens'), `token${t}`, '', () => look(t));
    const word = make(token, 'span', '', wordOf(id));
    token.style.marginLeft = tokens[id]?.startsWith(' ') ? '5px' : 0;
    token.tabIndex = t === looked ? 0 : -1;
    token.setAttribute('aria-pressed', t === looked);
    token.onmouseenter = token.onfocus = () => paintMachine(t);
    token.onmouseleave = () => paintMachine(looked);
    const change = t ? now.nats[t] - before.nats[t] : 0;
    if (Math.abs(change) > 0.2) word.classList.add(change > 0 ? 'less' : 'more');
    if (isPicked && !now.routes[picked[0]].gate_NE[t][picked[1]]) token.classList.add('dim');
    const ways = layers().map(layer => {
      const gate_E = now.routes[layer].gate_NE[t];
      const bar = make(token, 'span', 'bar');
      for (const e of chosen(gate_E)) {
        const part = make(bar, 'span');
        part.style.flexGrow = gate_E[e];
        colour(part, e);
      }
      return `${layer}: ` + chosen(gate_E).map(e => `${e} ${percent(gate_E[e])}`).join(', ');
    });
    const said = t ? `probability ${percent(Math.exp(-now.nats[t]))}; ` : '';
    token.setAttribute('aria-label', `${wordOf(id)}, token ${t}; ${said}${ways.join('; ')}`);
  });
}

// Choices with a gate, the largest first.
function chosen(gate_E) {
  const open = [...gate_E.keys()].filter(e => gate_E[e] > 0);
  return open.sort((a, b) => gate_E[b] - gate_E[a]);
}

function look(t) {
  looked = t;
  paint();
}

function paintMachine(t) {
  $('machine-title').textContent = `The way of “${wordOf(idx[t])}”`;
  const said = t ? `The model gave it a probability of ${percent(Math.exp(-now.nats[t]))}, a loss of ` +
    `${now.nats[t].toFixed(2)} nats.` : 'Every text begins with this token.';
  $('machine-hint').textContent = `${said} A ribbon is as wide as its gate. In a box: the gate, and ` +
    'the score that the router gave. Click a box to see its tokens, and to knock it out.';
  const machine = $('machine');
  machine.replaceChildren();
  make(machine, 'div', 'whole token', wordOf(idx[t]));
  let above = null;
  const { first, last } = live.weights;                  // MoEP's full layers
  const whole = (part, text) => {
    if (!part) return;
    ribbons(machine, above, null);
    above = null;
    make(machine, 'div', 'whole soft', text);
  };
  whole(first, 'an ordinary layer, the same for every token');
  for (const layer of layers()) {
    const { score_NE, gate_NE } = now.routes[layer];
    ribbons(machine, above, gate_NE[t]);
    above = gate_NE[t];
    const title = make(machine, 'p', 'title');
    make(title, 'b', '', layer);
    title.append(` ${kindOf(layer)[1]}`);
    const row = make(machine, 'div', 'layer');
    gate_NE[t].forEach((gate, e) => paintChoice(row, layer, e, gate, score_NE[t][e], gate_NE));
  }
  whole(last, 'an ordinary layer, then the guess for the next token');
}

function paintChoice(row, layer, e, gate, score, gate_NE) {
  const isOut = hands.out[layer]?.includes(e);
  const element = button(row, `${layer}-${e}`, '', () => {
    picked = picked?.join() === [layer, e].join() ? null : [layer, e];
    paint();
  });
  colour(element, e);
  element.style.setProperty('--gate', 100 * gate + '%');
  element.classList.toggle('on', gate > 0);
  element.classList.toggle('out', Boolean(isOut));
  element.setAttribute('aria-pressed', picked?.join() === [layer, e].join());
  const share = isOut ? 'out' : gate > 0 ? percent(gate) : '·';
  const label = `${kindOf(layer)[0]} ${e} of ${layer}: gate ${share}, score ${score.toFixed(1)}; ` +
    `${tokensOf(gate_NE, e).length} of ${gate_NE.length} tokens take it`;
  element.setAttribute('aria-label', label);
  element.title = label;
  const isRoomy = gate_NE[0].length <= 4;
  make(element, 'small', '', isRoomy ? `${kindOf(layer)[0]} ${e}` : e);
  make(element, 'b', '', share);
  make(element, 'small', '', (isRoomy ? 'score ' : '') + score.toFixed(1).replace('-', '−'));
}

// From the choices above, or the whole width, through one point to those below.
function ribbons(parent, above, below) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const set = (element, values) => {
    for (const key in values) element.setAttribute(key, values[key]);
  };
  set(svg, { viewBox: '0 0 100 66', preserveAspectRatio: 'none', 'aria-hidden': true });
  for (const [gates, edge, bend] of [[above || [1], 0, 0], [below || [1], 66, 44]]) {
    gates.forEach((gate, e) => {
      if (!gate) return;
      const path = document.createElementNS(svg.namespaceURI, 'path');
      const x = 100 * (e + 0.5) / gates.length;
      set(path, { d: `M${x} ${edge}V${bend}C${x} 22 50 ${bend} 50 22`, 'stroke-width': 1 + 8 * gate });
      if (gates.length > 1) colour(path, e);
      svg.append(path);
    });
  }
  parent.append(svg);
}

function paintPanel() {
  const panel = $('panel');
  panel.replaceChildren();
  panel.hidden = !picked;
  if (!picked) return;
  const [layer, e] = picked;
  const { gate_NE } = now.routes[layer];
  const [kind] = kindOf(layer);
  const out = hands.out[layer] || [];
  const isOut = out.includes(e);
  const isLast = !isOut && out.length + 1 >= gate_NE[0].length;
  make(panel, 'b', '', `${kind[0].toUpperCase()}${kind.slice(1)} ${e} of ${layer}`);
  const mine = tokensOf(gate_NE, e);
  const list = mine.map(t => `${wordOf(idx[t])} ${percent(gate_NE[t][e])}`).join(' · ');
  make(panel, 'p', 'small', `${mine.length} of ${idx.length} tokens take it. ${list}`);
  let row = make(panel, 'div', 'row');
  const off = button(row, 'knock', isOut ? 'Put it back' : 'Knock it out', () => knock(layer, e));
  off.disabled = isLast;
  make(row, 'span', 'soft small', isLast ? 'the last one of its layer stays' :
    'its score becomes −∞, so every token takes the next best instead');
  row = make(panel, 'div', 'row');
  const word = wordOf(idx[looked]);
  const isForced = hands.force[layer]?.[looked] === e;
  const send = button(row, 'force', isForced ? `Let “${word}” choose` : `Send “${word}” here`,
    () => force(layer, looked, e));
  send.disabled = isOut;
  make(row, 'span', 'soft small', 'this one token takes nothing else in this layer: a gate of 100%');
}

function paintLoss() {
  const box = $('loss');
  box.replaceChildren();
  const n = idx.length - 1;
  if (!n) {
    make(box, 'p', 'soft', 'Write something first.');
  } else {
    const [mean, old] = [now, before].map(answer => sum(answer.nats) / n);
    make(box, 'span', 'figure', mean.toFixed(2));
    box.append(' nats per token');
    if (isTouched()) {
      const word = Math.abs(mean - old) < 0.005 ? 'the same' : mean > old ? 'worse' : 'better';
      box.append(`; untouched ${old.toFixed(2)}: `);
      make(box, 'b', word, `${signed(mean - old, 2)}, ${word}`);
    }
    make(box, 'p', 'soft small', 'The loss, its mean surprise: 0 is certainty; here it is as ' +
      `unsure as among ${Math.exp(mean).toFixed(1)} equally probable tokens.`);
  }
  if (ids.length > idx.length) {
    make(box, 'p', 'soft small', `It reads the last ${idx.length} of ${ids.length} tokens.`);
  }
  const row = $('changes');
  row.replaceChildren();
  const say = text => make(row, 'span', 'soft small', text);
  for (const layer in hands.out) say(`${layer} without ${hands.out[layer].join(', ')};`);
  for (const layer in hands.force) {
    for (const [t, e] of Object.entries(hands.force[layer])) {
      say(`“${wordOf(idx[t])}” only to ${e} of ${layer};`);
    }
  }
  if (hands.top_k !== config.top_k) say(`K is ${hands.top_k};`);
  if (hands.temperature !== 1) say(`temperature ${hands.temperature.toFixed(2)};`);
  if (isTouched()) button(row, 'undo', 'Undo all', reset);
  else say('You have changed nothing yet. Click a box in the model, and knock it out.');
}

function paintNext() {
  const [prob, old] = [now, before].map(answer => softmax(answer.logits.at(-1)));
  const box = $('next');
  box.replaceChildren();
  const tail = idx.slice(-3).map(wordOf).join(' ');
  $('next-hint').textContent = `The most probable tokens after “${idx.length > 3 ? '… ' : ''}${tail}”. ` +
    `Click one to write it.${isTouched() ? ' The mark: without your changes.' : ''}`;
  const best = [...prob.keys()].sort((a, b) => prob[b] - prob[a]).slice(0, 8);
  best.forEach((id, i) => {
    const line = button(box, `next${i}`, '', () => {
      $('text').value += decode([tokens[id]]);
      readText([...ids, id]);
    });
    line.disabled = id === EOT;
    make(line, 'b', '', id === EOT ? '⟨end⟩' : wordOf(id));
    const track = make(line, 'span', 'track');
    make(track, 'i').style.width = 100 * prob[id] + '%';
    if (isTouched()) make(track, 'u').style.left = 100 * old[id] + '%';
    const change = isTouched() ? ` (${signed(100 * (prob[id] - old[id]), 1)})` : '';
    make(line, 'small', '', percent(prob[id]) + change);
  });
}

// ---- Controls -----------------------------------------------------------------------------------

// A slider with its name, its value, and a line that explains it.
function slider(parent, id, name, hint, [min, max, step], value, act) {
  const box = make(parent, 'div', 'slider');
  make(box, 'label', '', name).htmlFor = id;
  const shown = make(box, 'output');
  const input = make(box, 'input');
  Object.assign(input, { id, type: 'range', min, max, step, value });
  make(box, 'span', 'soft small', hint);
  input.oninput = () => { shown.textContent = act(Number(input.value)); };
  shown.textContent = act(value);
}

function makeRouter() {
  const fewest = Math.min(...Object.values(before.routes).map(route => route.gate_NE[0].length));
  slider($('router'), 'top_k', 'K, the choices of a token', `It was trained with ${config.top_k}. With 1, ` +
    'a token takes only its best choice; with more, weaker ones join in.', [1, fewest, 1],
  config.top_k, value => {
    hands.top_k = value;
    update();
    return value;
  });
  slider($('router'), 'temperature', 'Temperature of the router', 'It divides the scores (trained: 1). ' +
    'Cold, the best choice gets nearly all; hot, the gates become even.', [-1, 1, 0.05], 0, value => {
    hands.temperature = 10 ** value;
    update();
    return hands.temperature.toFixed(2);
  });
}

function makePair() {
  ['The dogs near the tree are happy.', 'The dogs near the tree is happy.'].forEach((text, i) => {
    const row = make($('pair'), 'div', 'sentence');
    make(row, 'label', 'hidden', `sentence ${i + 1}`).htmlFor = `pair${i}`;
    const input = make(row, 'input');
    Object.assign(input, { id: `pair${i}`, type: 'text', maxLength: 500, value: text });
    input.oninput = paintPair;
    make(row, 'output', 'figure').id = `score${i}`;
  });
}

function paintPair() {
  const everywhere = { ...hands, force: {} };            // a token of the text above stays there
  const scores = [0, 1].map(i => {
    const idx = readable([EOT, ...encode($(`pair${i}`).value, rank)]);
    return [everywhere, UNTOUCHED].map(hands => -sum(read(`pair${i}`, idx, hands).nats));
  });
  scores.forEach(([score], i) => {
    $(`score${i}`).textContent = score.toFixed(2).replace('-', '−');
  });
  const [gap, old] = [0, 1].map(h => scores[0][h] - scores[1][h]);
  const prefers = gap => Math.abs(gap) < 0.005 ? 'both equally' :
    `the ${gap > 0 ? 'first' : 'second'}, by ${Math.abs(gap).toFixed(2)} nats`;
  const times = Math.exp(Math.abs(gap));
  $('verdict').textContent = `The model prefers ${prefers(gap)}` +
    (times > 1.05 ? `: ${times < 1e4 ? times.toFixed(1) : times.toExponential(0)} times as probable.` : '.') +
    (isTouched() ? ` Untouched it prefers ${prefers(old)}.` : '');
}

const SIZES = {                     // what the sliders change; n_embd takes the other widths along
  n_block: ['Blocks in a layer', 'More to choose from: more to store, and to attend in.'],
  n_expert: ['Experts', 'More to choose from: more to store.'],
  n_att: ['Attention modules in a layer', 'More to choose from: more to store.'],
  n_ffd: ['FFN modules in a layer', 'More to choose from: more to store.'],
  top_k: ['K', 'How many of them a token takes: this is what it pays for.'],
  n_embd: ['Width', 'Of the whole model: most costs grow with its square.'],
};
const WIDTHS = ['n_embd', 'n_embd_parallel', 'd_att', 'd_ffd'];

function makeCost() {
  const value = {};
  for (const key in SIZES) if (key in config) value[key] = [config[key]].flat()[0];
  for (const key in value) {
    const step = key === 'n_embd' ? config.n_embd / 4 : 1;
    slider($('sliders'), `cost-${key}`, ...SIZES[key], [step, 16 * step, step], value[key], chosen => {
      value[key] = chosen;
      paintCost(value);
      return chosen;
    });
  }
}

function paintCost(value) {
  const c = { ...config };
  for (const key in value) if (value[key] !== [config[key]].flat()[0]) c[key] = value[key];
  for (const key of WIDTHS) c[key] = config[key] * value.n_embd / config.n_embd;
  const { total, active, attention } = COST[live.model](c);
  const flops = 6 * active + 6 * attention * c.block_size;       // tools/flops.py
  $('cost').replaceChildren();
  for (const [figure, name] of [[total, 'parameters to store'], [active, 'active: used by a token'],
    [flops / 3, 'FLOPs to read a token']]) {
    const box = make($('cost'), 'div');
    make(box, 'div', 'figure', number(figure));
    make(box, 'div', 'soft small', name);
  }
  $('cost-hint').textContent = `A token uses ${percent(active / total)} of the parameters. To train on it ` +
    `takes ${number(flops)} FLOPs, three times as many, at a context of ${c.block_size} tokens.`;
}

// ---- Begin --------------------------------------------------------------------------------------

$('k').textContent = config.top_k;
$('source').textContent = `${live.model}.py of nanopaths, ${number(live.parameters)} parameters, ` +
  `run ${visible(live.name)}, trained on ${visible(live.data)}.`;
$('legend').textContent = 'A token is a word or a part of one. The bars below it are its gates, a bar for ' +
  'each layer, from the first down, a colour for each choice. ▾ ▴: your changes made it less or more probable.';
for (const text of EXAMPLES) {
  make($('examples'), 'button', 'small', text).onclick = () => {
    $('text').value = text;
    readText();
  };
}
$('text').value = live.prompt;
$('text').oninput = () => readText();
$('go').onclick = () => isWriting ? isWriting = false : goOn();
$('tokens').onkeydown = event => {
  if (event.key === 'ArrowRight') event.target.nextSibling?.focus();
  if (event.key === 'ArrowLeft') event.target.previousSibling?.focus();
};
makePair();
readText();
makeRouter();
makeCost();
