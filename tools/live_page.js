// ---- What the page does with the model ----------------------------------------------------------

const $ = id => document.getElementById(id);
const live = JSON.parse($('data').textContent);
live.weights = unpackWeights(live.weights, live.shapes);
const { config, tokens } = live;
const EOT = tokens.length;          // end of text: every text begins after one
const rank = new Map(tokens.map((token, id) => [token, id]));
const UNTOUCHED = { out: [], force: {}, top_k: config.top_k, temperature: 1 };
const HUES = [250, 65, 150, 15, 305, 105, 200, 345];
const KINDS = {                     // of a layer, by the end of its name: a choice, what it does
  shrink: ['expert', 'to fewer numbers per token'],
  grow: ['expert', 'back to the full size'],
  att: ['module', 'attention'],
  ffd: ['module', 'feed-forward'],
};

let hands = structuredClone(UNTOUCHED);
let ids = [];                       // the whole text; idx is what the model can read of it
let idx = [];
let now, before;                    // what the model says with the changes, and without them
let looked = 0;                     // the token whose way is shown
let picked = null;                  // the box that was clicked, as 'layer/choice'
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

function colour(element, e) {
  element.classList.add('choice');
  element.style.setProperty('--hue', HUES[e % HUES.length]);
}

const percent = part => (100 * part).toFixed(part > 0 && part < 0.0995 ? 1 : 0) + '%';
const number = (value, digits) => value.toFixed(digits).replace('-', '−');
const signed = (value, digits) => (value < 0 ? '' : '+') + number(value, digits);
const whole = value => Math.round(value).toLocaleString('en');
const times = ratio => ratio < 10 ? number(ratio, 1) : whole(ratio);
const kindOf = layer => KINDS[layer.split('.').at(-1)] || ['block', 'small Transformers'];
const meanLoss = answer => total(answer.nats) / Math.max(1, idx.length - 1);
const layers = () => Object.keys(now.routes);
const isTouched = () => JSON.stringify(hands) !== JSON.stringify(UNTOUCHED);

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

// ---- Reading ------------------------------------------------------------------------------------

const memory = new Map();           // the last answers, by text box and changes

function read(box, idx, hands) {
  const key = box + JSON.stringify(hands);
  const known = memory.get(key);
  if (known && known.idx.join() === idx.join()) return known;
  if (memory.size > 30) memory.clear();
  memory.set(key, forward(live, idx, hands, known));
  return memory.get(key);
}

// What the model reads of a text. As in generate, a full context goes on from its newer half.
function readable(ids) {
  const half = config.block_size / 2;
  return ids.slice(half * Math.max(0, Math.ceil(ids.length / half) - 2));
}

// The text has changed. A token stays forced if all up to it is the same as before.
function readText(newIds = [EOT, ...encode($('text').value, rank)]) {
  const old = idx;
  ids = newIds;
  idx = readable(ids);
  for (const place in hands.force) {
    const end = Number(place.split('/')[1]) + 1;
    if (idx.slice(0, end).join() !== old.slice(0, end).join()) delete hands.force[place];
  }
  looked = idx.length - 1;
  update();
}

function update() {
  before = read('text', idx, UNTOUCHED);
  now = read('text', idx, hands);
  paint();
}

function paint() {
  const focused = document.activeElement.id;
  paintTokens();
  paintMachine(looked);
  paintPanel();
  paintLoss();
  paintNext();
  paintPair();
  if (focused && document.activeElement.id !== focused) $(focused)?.focus();
}

// Draw a token as sample.py does: from the 50 most probable, at a temperature of 0.8.
function draw(logits) {
  const best = [...logits.keys()].sort((a, b) => logits[b] - logits[a]).slice(0, 50);
  const prob = softmax(Float32Array.from(best, id => logits[id] / 0.8));
  let rest = Math.random();
  return best.find((_, i) => (rest -= prob[i]) < 0) ?? best[0];
}

async function goOn() {
  const start = ids.length;
  const begin = $('text').value;
  let written = begin;
  isWriting = true;
  $('go').textContent = 'Stop';
  for (let n = 0; n < 60 && isWriting && $('text').value === written; n++) {   // or until you type
    const id = draw(now.logits.at(-1));
    if (id === EOT) break;
    written = begin + decode([...ids.slice(start), id].map(i => tokens[i]));
    $('text').value = written;
    readText([...ids, id]);
    await new Promise(resolve => setTimeout(resolve, 70));
  }
  isWriting = false;
  $('go').textContent = 'Go on';
}

// ---- Painting -----------------------------------------------------------------------------------

function paintTokens() {
  const [layer, e] = picked && !hands.out.includes(picked) ? picked.split('/') : [];
  $('tokens').replaceChildren();
  idx.forEach((id, t) => {
    const token = button($('tokens'), `token${t}`, '', () => {
      looked = t;
      paint();
    });
    token.onmouseenter = token.onfocus = () => paintMachine(t);
    token.onmouseleave = () => paintMachine(looked);
    token.tabIndex = t === looked ? 0 : -1;
    token.setAttribute('aria-pressed', t === looked);
    token.style.marginLeft = tokens[id]?.startsWith(' ') ? '5px' : 0;
    if (layer && !now.routes[layer].gate_NE[t][e]) token.classList.add('dim');
    const change = now.nats[t] - before.nats[t];
    make(token, 'span', change > 0.2 ? 'less' : change < -0.2 ? 'more' : '', wordOf(id));
    let label = `${wordOf(id)}, probability ${percent(Math.exp(-now.nats[t]))}`;
    for (const layer of layers()) {
      const gate_E = now.routes[layer].gate_NE[t];
      const bar = make(token, 'span', 'bar');
      label += `; ${layer}`;
      gate_E.forEach((gate, e) => {
        if (!gate) return;
        const part = make(bar, 'span');
        part.style.flexGrow = gate;
        colour(part, e);
        label += ` ${e}: ${percent(gate)}`;
      });
    }
    token.setAttribute('aria-label', label);
  });
}

function paintMachine(t) {
  $('machine-title').textContent = `The way of “${wordOf(idx[t])}”`;
  $('machine-token').textContent = t ? 'The model had given it a probability of ' +
    `${percent(Math.exp(-now.nats[t]))}, a loss of ${number(now.nats[t], 2)} nats.` :
    'Every text begins with this token.';
  const machine = $('machine');
  machine.replaceChildren();
  make(machine, 'div', 'whole token', wordOf(idx[t]));
  let above = [1];
  const ordinary = text => {                             // MoEP's first and last layers
    ribbons(machine, above, [1]);
    above = [1];
    make(machine, 'div', 'whole soft', text);
  };
  if (live.model === 'moep') ordinary('an ordinary layer, the same for every token');
  for (const layer of layers()) {
    const { score_NE, gate_NE } = now.routes[layer];
    ribbons(machine, above, gate_NE[t]);
    above = gate_NE[t];
    const title = make(machine, 'p', 'title');
    make(title, 'b', '', layer);
    title.append(` ${kindOf(layer)[1]}`);
    const row = make(machine, 'div', gate_NE[t].length > 4 ? 'layer many' : 'layer');
    gate_NE[t].forEach((gate, e) => paintBox(row, layer, e, gate, score_NE[t][e]));
  }
  if (live.model === 'moep') ordinary('an ordinary layer, then the guess for the next token');
}

function paintBox(row, layer, e, gate, score) {
  const place = `${layer}/${e}`;
  const isOut = hands.out.includes(place);
  const box = button(row, place, '', () => {
    picked = picked === place ? null : place;
    paint();
    $('panel').scrollIntoView({ block: 'nearest' });
  });
  colour(box, e);
  box.style.setProperty('--gate', 100 * gate + '%');
  if (gate > 0) box.classList.add('on');
  if (isOut) box.classList.add('out');
  box.setAttribute('aria-pressed', picked === place);
  box.setAttribute('aria-label', `${kindOf(layer)[0]} ${e} of ${layer}, ` +
    `${isOut ? 'knocked out' : 'gate ' + percent(gate)}, score ${number(score, 1)}`);
  make(box, 'small', 'kind', `${kindOf(layer)[0]} `);
  make(box, 'small', '', e);
  const share = gate < 0.005 ? '<1%' : `${(100 * gate).toFixed(0)}%`;
  make(box, 'b', '', isOut ? 'out' : gate > 0 ? share : '·');
  make(box, 'small', 'kind', 'score ');
  make(box, 'small', '', number(score, 1));
}

// From the choices above through one point to those below.
function ribbons(parent, above, below) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', '0 0 100 66');
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('aria-hidden', true);
  for (const [gates, edge, bend] of [[above, 0, 0], [below, 66, 44]]) {
    gates.forEach((gate, e) => {
      if (!gate) return;
      const x = 100 * (e + 0.5) / gates.length;
      const path = document.createElementNS(svg.namespaceURI, 'path');
      path.setAttribute('d', `M${x} ${edge}V${bend}C${x} 22 50 ${bend} 50 22`);
      path.setAttribute('stroke-width', 1 + 8 * gate);
      if (gates.length > 1) colour(path, e);
      svg.append(path);
    });
  }
  parent.append(svg);
}

// What can be done with the box that was clicked.
function paintPanel() {
  const panel = $('panel');
  panel.replaceChildren();
  panel.hidden = !picked;
  if (!picked) return;
  const layer = picked.split('/')[0];
  const e = Number(picked.split('/')[1]);
  const { gate_NE } = now.routes[layer];
  const mine = tokensOf(gate_NE, e).map(t => `${wordOf(idx[t])} ${percent(gate_NE[t][e])}`);
  make(panel, 'b', '', `${kindOf(layer)[0]} ${e} of ${layer}`);
  make(panel, 'p', 'small', mine.length ? `${mine.length} of ${idx.length} tokens take it, the ` +
    `others are pale in the text: ${mine.join(' · ')}` : 'No token takes it.');

  const isOut = hands.out.includes(picked);
  const isOpen = other => other !== e && !hands.out.includes(`${layer}/${other}`);
  const others = [...gate_NE[0].keys()].filter(isOpen);
  let row = make(panel, 'div', 'row');
  button(row, 'knock', isOut ? 'Put it back' : 'Knock it out', () => {
    hands.out = isOut ? hands.out.filter(place => place !== picked) : [...hands.out, picked];
    for (const place in hands.force) {
      if (place.startsWith(`${layer}/`) && hands.force[place] === e) delete hands.force[place];
    }
    update();
  }).disabled = !others.length;
  make(row, 'span', 'hint', others.length ? 'Its score becomes −∞: tokens that took it take ' +
    'their next best instead.' : 'The last one of a layer stays.');

  const place = `${layer}/${looked}`;
  const word = wordOf(idx[looked]);
  const isForced = hands.force[place] === e;
  row = make(panel, 'div', 'row');
  button(row, 'force', isForced ? `Let “${word}” choose` : `Send “${word}” here`, () => {
    if (isForced) delete hands.force[place];
    else hands.force[place] = e;
    update();
  }).disabled = isOut;
  make(row, 'span', 'hint', 'This one token takes nothing else in this layer: a gate of 100%.');
  if (isTouched()) paintChange(make(panel, 'p', '', `Loss ${number(meanLoss(now), 2)}, `));
}

// What the changes do to the loss.
function paintChange(parent) {
  const [mean, old] = [now, before].map(meanLoss);
  const word = Math.abs(mean - old) < 0.005 ? 'the same' : mean > old ? 'worse' : 'better';
  parent.append(`untouched ${number(old, 2)}: `);
  make(parent, 'b', word, `${signed(mean - old, 2)}, ${word}`);
}

function paintLoss() {
  const mean = meanLoss(now);
  const box = $('loss');
  box.replaceChildren();
  if (idx.length === 1) {
    make(box, 'p', 'soft', 'Write something first.');
  } else {
    make(box, 'span', 'figure', number(mean, 2));
    box.append(' nats per token');
    if (isTouched()) paintChange(make(box, 'p'));
    make(box, 'p', 'hint', 'The loss, the mean surprise: 0 is certainty. Here the model is as ' +
      `unsure as if ${times(Math.exp(mean))} tokens were equally probable each time.`);
  }
  if (ids.length > idx.length) {
    make(box, 'p', 'hint', `It reads the last ${idx.length} of ${ids.length} tokens.`);
  }
  const forced = Object.entries(hands.force).map(([place, e]) => {
    const [layer, t] = place.split('/');
    return `${wordOf(idx[t])} → ${layer}/${e}`;
  });
  const row = $('changes');
  row.replaceChildren();
  for (const text of [...hands.out.map(place => `without ${place}`), ...forced]) {
    make(row, 'span', 'hint', text);
  }
  if (isTouched()) button(row, 'undo', 'Undo all', reset);
  else make(row, 'span', 'hint', 'Nothing is changed yet: click a box in the model, knock it out.');
}

function reset() {
  hands = structuredClone(UNTOUCHED);
  for (const [id, value] of [['top_k', config.top_k], ['temperature', 0]]) {
    $(id).value = value;
    $(id).oninput();                // which updates the page
  }
}

function paintNext() {
  const [prob, old] = [now, before].map(answer => softmax(answer.logits.at(-1)));
  const best = [...prob.keys()].sort((a, b) => prob[b] - prob[a]).slice(0, 8);
  $('next').replaceChildren();
  best.forEach((id, i) => {
    const line = button($('next'), `next${i}`, '', () => {
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

function paintPair() {
  const everywhere = { ...hands, force: {} };            // a forced token is one of the text above
  const [first, second] = ['pair0', 'pair1'].map(box => {
    const idx = readable([EOT, ...encode($(box).value, rank)]);
    const [score, old] = [everywhere, UNTOUCHED].map(hands => -total(read(box, idx, hands).nats));
    $(`${box}-score`).textContent = number(score, 2);
    return { score, old };
  });
  const prefers = gap => Math.abs(gap) < 0.005 ? 'both equally' :
    `the ${gap > 0 ? 'first' : 'second'}, by ${number(Math.abs(gap), 2)} nats: ` +
    `${times(Math.exp(Math.abs(gap)))} times as probable`;
  $('verdict').textContent = `The model prefers ${prefers(first.score - second.score)}.` +
    (isTouched() ? ` Untouched it prefers ${prefers(first.old - second.old)}.` : '');
}

// ---- Sliders ------------------------------------------------------------------------------------

// Its name, its value, and a line that explains it. act(value) -> what to show as the value
function slider(parent, id, name, hint, [min, max, step], value, act) {
  const box = make($(parent), 'div', 'slider');
  make(box, 'label', '', name).htmlFor = id;
  const shown = make(box, 'output');
  const input = make(box, 'input');
  Object.assign(input, { id, type: 'range', min, max, step, value });
  make(box, 'span', 'hint', hint);
  input.oninput = () => { shown.textContent = act(Number(input.value)); };
  shown.textContent = act(value);
}

function makeRouter() {
  const fewest = Math.min(...layers().map(layer => now.routes[layer].gate_NE[0].length));
  slider('router', 'top_k', 'K: how many boxes a token takes', `Trained with ${config.top_k}. ` +
    'With 1 a token takes only its best; with more, weaker ones join in.', [1, fewest, 1],
  config.top_k, value => {
    hands.top_k = value;
    update();
    return value;
  });
  slider('router', 'temperature', 'Router temperature', 'It divides the scores: trained with 1. ' +
    'Cold, the best box gets nearly all; hot, the gates become even.', [-1, 1, 0.05], 0, value => {
    hands.temperature = 10 ** value;
    update();
    return number(hands.temperature, 2);
  });
}

const SIZES = {                     // of the config: those that it has become sliders
  n_block: ['Blocks in a layer', 'More to choose from: more to store, and to attend in.'],
  n_expert: ['Experts', 'More to choose from: more to store.'],
  n_att: ['Attention modules', 'More to choose from: more to store.'],
  n_ffd: ['FFN modules', 'More to choose from: more to store.'],
  top_k: ['K', 'How many of them a token takes: it pays for these.'],
  n_embd: ['Width', 'Of the whole model: most costs grow with its square.'],
};
const OTHER_WIDTHS = ['n_embd_parallel', 'd_att', 'd_ffd'];      // they go along with n_embd

function makeCost() {
  const c = { ...config };
  for (const key in SIZES) {
    if (!(key in config)) continue;
    const value = [config[key]].flat()[0];               // of the first layer, if layers differ
    const step = key === 'n_embd' ? config.n_embd / 4 : 1;
    slider('sliders', `cost-${key}`, ...SIZES[key], [step, 16 * step, step], value, chosen => {
      c[key] = chosen === value ? config[key] : chosen;
      for (const width of OTHER_WIDTHS) c[width] = config[width] * c.n_embd / config.n_embd;
      paintCost(c);
      return chosen;
    });
  }
}

function paintCost(c) {
  const { total, active, attention } = COST[live.model](c);
  const flops = 6 * active + 6 * attention * c.block_size;       // as in tools/flops.py
  $('cost-total').textContent = whole(total);
  $('cost-active').textContent = whole(active);
  $('cost-flops').textContent = whole(flops / 3);
  $('cost-hint').textContent = `A token uses ${percent(active / total)} of the parameters. ` +
    `To train on it takes ${whole(flops)} FLOPs. (At ${c.block_size} tokens of context.)`;
}

// ---- Begin --------------------------------------------------------------------------------------

$('k').textContent = config.top_k;
$('source').textContent = `${live.model}.py of nanopaths, ${whole(live.parameters)} parameters, ` +
  `run ${visible(live.name)}, trained on ${visible(live.data)}.`;
for (const example of document.querySelectorAll('#examples button')) {
  example.onclick = () => {
    $('text').value = example.textContent;
    readText();
  };
}
$('text').value = live.prompt;
$('text').oninput = () => readText();
$('pair0').oninput = $('pair1').oninput = paintPair;
$('go').onclick = () => isWriting ? isWriting = false : goOn();
$('tokens').onkeydown = event => {
  if (event.key === 'ArrowRight') event.target.nextSibling?.focus();
  if (event.key === 'ArrowLeft') event.target.previousSibling?.focus();
};
readText();
makeRouter();
makeCost();
