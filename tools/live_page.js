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
  shrink: ['expert', 'fewer numbers per token'],
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
  element.style.setProperty('--colour', `oklch(var(--light) .125 ${HUES[e % HUES.length]})`);
}

const number = (value, digits) => value.toFixed(digits).replace('-', '−');
const percent = part => part < 0.0005 ? '<0.1%' : number(100 * part, part < 0.0995 ? 1 : 0) + '%';
const signed = (value, digits) => (value < 0 ? '' : '+') + number(value, digits);
const whole = value => Math.round(value).toLocaleString('en');
const kindOf = layer => KINDS[layer.split('.').at(-1)] || ['block', 'small Transformers'];
const nameOf = (layer, e) => `${kindOf(layer)[0]} ${e} of ${layer}`;
const placesOf = layer => Object.keys(now.routes[layer].gate_NE[0]).map(e => `${layer}/${e}`);
const meanLoss = answer => total(answer.nats) / (idx.length - 1);
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
  return visible(decode([tokens[id]])).replace(/^ (?=\S)/, '').replaceAll(' ', '␣');
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

// A space at the end is the beginning of the next word.
const textOf = box => $(box).value.replace(/ +$/, '');
const idsOf = box => [EOT, ...encode(textOf(box), rank)];

// The text has changed. A token stays forced if all up to it is the same as before.
function readText(newIds = idsOf('text')) {
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
  paintLoss($('loss'));
  paintChanges();
  paintNext();
  paintPair();
  if (focused && document.activeElement.id !== focused) $(focused)?.focus({ preventScroll: true });
}

function knockOut(place) {
  hands.out = [...hands.out, place];
  const [layer, e] = place.split('/');
  for (const token in hands.force) {
    if (token.startsWith(`${layer}/`) && hands.force[token] === Number(e)) delete hands.force[token];
  }
  update();
}

// A layer's boxes that are left.
const left = layer => placesOf(layer).filter(place => !hands.out.includes(place));

// Knock out one more box: that without which harm(hands) is largest -> which, if there is one.
function knockOutWorst(harm) {
  const places = layers().map(left).filter(places => places.length > 1).flat();
  const harms = places.map(place => harm({ ...hands, out: [...hands.out, place] }));
  picked = places[harms.indexOf(Math.max(...harms))];
  if (picked) knockOut(picked);
  return picked;
}

function challenge() {
  for (const box of ['pair0', 'pair1']) $(box).value = $(box).defaultValue;
  reset();
  edit('The dogs near the tree');
  while (lead(hands) > 0 && knockOutWorst(hands => -lead(hands)));
  picked = null;
  paint();
}

// Write a token at the end of the text.
function write(id) {
  readText([...ids, id]);
  $('text').value = decode(ids.slice(1).map(id => tokens[id]));
}

let writing;                        // the timer of "Go on", while it writes

function stop() {
  writing = clearInterval(writing);
  $('go').textContent = 'Go on';
}

function goOn() {
  if (writing) return stop();
  $('go').textContent = 'Stop';
  let n = 0;
  writing = setInterval(() => {
    let rest = Math.random();
    const id = softmax(now.logits.at(-1)).findIndex(prob => (rest -= prob) < 0);
    if (!tokens[id] || n++ === 20) return stop();        // the end of the text
    write(id);
  }, 70);
}

function edit(text) {
  stop();
  $('text').value = text;
  readText();
}

// ---- Painting -----------------------------------------------------------------------------------

function paintTokens() {
  const [layer, e] = picked && !hands.out.includes(picked) ? picked.split('/') : [];
  $('tokens').replaceChildren();
  const missing = ids.length - idx.length;
  $('missing').textContent = missing ? `The model no longer sees the first ${missing} tokens.` : '';
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
  $('machine-token').textContent = t ? 'Before it read this token, the model gave it a ' +
    `probability of ${percent(Math.exp(-now.nats[t]))}: a loss of ${number(now.nats[t], 2)} nats.` :
    'Every text begins with this token.';
  const machine = $('machine');
  machine.replaceChildren();
  make(machine, 'div', 'whole token', wordOf(idx[t]));
  let above = [1];
  const ordinary = text => {                             // MoEP's first and last layers
    ribbons(machine, above, [1]);
    above = [1];
    make(machine, 'div', 'whole', text);
  };
  if (live.model === 'moep') ordinary('an ordinary layer, the same for every token');
  for (const layer of layers()) {
    const { score_NE, gate_NE } = now.routes[layer];
    ribbons(machine, above, gate_NE[t]);
    above = gate_NE[t];
    const title = make(machine, 'p', 'title');
    make(title, 'b', '', layer);
    make(title, 'span', '', kindOf(layer)[1]);
    const row = make(machine, 'div', gate_NE[t].length > 4 ? 'layer many' : 'layer');
    gate_NE[t].forEach((gate, e) => paintBox(row, layer, e, gate, score_NE[t][e]));
    if (picked?.startsWith(`${layer}/`)) paintPanel(layer, Number(picked.split('/')[1]));
  }
  if (live.model === 'moep') ordinary('an ordinary layer, then the guess for the next token');
}

function paintBox(row, layer, e, gate, score) {
  const place = `${layer}/${e}`;
  const isOut = hands.out.includes(place);
  const box = button(row, place, '', () => {
    picked = picked === place ? null : place;
    paint();
  });
  colour(box, e);
  box.style.setProperty('--gate', 100 * gate + '%');
  if (gate > 0) box.classList.add('on');
  if (isOut) box.classList.add('out');
  box.setAttribute('aria-expanded', picked === place);
  const shown = number(score / hands.temperature, 1);
  box.setAttribute('aria-label', `${nameOf(layer, e)}, ` +
    (isOut ? 'knocked out' : `gate ${percent(gate)}, score ${shown}`));
  make(box, 'small', 'kind', `${kindOf(layer)[0]} `);
  make(box, 'small', '', e);
  make(box, 'b', '', isOut ? 'out' : gate > 0 ? percent(gate) : '·');
  if (isOut) return;
  make(box, 'small', 'kind', 'score ');
  make(box, 'small', '', shown);
}

// From the choices above to one stem, and from it to those below.
function ribbons(parent, above, below) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', '0 0 100 64');
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('aria-hidden', true);
  for (const [gates, start, end] of [[above, 0, 20], [below, 64, 44], [[1], 20, 44]]) {
    gates.forEach((gate, e) => {
      if (!gate) return;
      const x = 100 * (e + 0.5) / gates.length;
      const path = document.createElementNS(svg.namespaceURI, 'path');
      path.setAttribute('d', `M${x} ${start}C${x} ${end} 50 ${start} 50 ${end}`);
      path.setAttribute('stroke-width', 1 + 8 * gate);
      if (gates.length > 1) colour(path, e);
      svg.append(path);
    });
  }
  parent.append(svg);
}

// What can be done with the box that was clicked, below its layer.
function paintPanel(layer, e) {
  const panel = make($('machine'), 'div');
  panel.id = 'panel';
  const { gate_NE } = now.routes[layer];
  const mine = tokensOf(gate_NE, e).map(t => `${wordOf(idx[t])} ${percent(gate_NE[t][e])}`);
  const others = mine.length < idx.length ? ', the others are pale in the text' : '';
  make(panel, 'b', '', nameOf(layer, e));
  make(panel, 'p', 'hint', mine.length ?
    `${mine.length} of ${idx.length} tokens take it${others}: ${mine.join(' · ')}` :
    'No token takes it.');
  const isOut = hands.out.includes(picked);
  const isLast = !isOut && left(layer).length === 1;
  let row = make(panel, 'div', 'row');
  button(row, 'knock', isOut ? 'Put it back' : 'Knock it out', () => {
    if (!isOut) return knockOut(picked);
    hands.out = hands.out.filter(place => place !== picked);
    update();
  }).disabled = isLast;
  make(row, 'span', 'hint', isLast ? 'The last one of a layer stays.' :
    'Out: its score is −∞, and tokens take their next best box.');

  const place = `${layer}/${looked}`;
  const word = wordOf(idx[looked]);
  const isForced = hands.force[place] === e;
  row = make(panel, 'div', 'row');
  button(row, 'force', isForced ? `Let “${word}” choose` : `Send “${word}” here`, () => {
    if (isForced) delete hands.force[place];
    else hands.force[place] = e;
    update();
  }).disabled = isOut;
  make(row, 'span', 'hint', 'Sent here, this one token takes nothing else in this layer: a gate ' +
    'of 100%, until you change the text up to it.');
  paintLoss(make(panel, 'p'));
}

function paintLoss(parent) {
  const [mean, old] = [now, before].map(meanLoss);
  parent.hidden = $('find-text').disabled = idx.length === 1;
  parent.textContent = `Loss of this text: ${number(mean, 2)} nats per token`;
  if (!isTouched()) return;
  const word = Math.abs(mean - old) < 0.005 ? 'the same' : mean > old ? 'worse' : 'better';
  parent.append(`, untouched ${number(old, 2)}: `);
  make(parent, 'b', word, `${signed(mean - old, 2)}, ${word}`);
}

function paintChanges() {
  const changes = hands.out.map(place => `without ${nameOf(...place.split('/'))}`);
  for (const [place, e] of Object.entries(hands.force)) {
    const [layer, t] = place.split('/');
    changes.push(`“${wordOf(idx[t])}” sent to ${nameOf(layer, e)}`);
  }
  if (hands.top_k !== config.top_k) changes.push(`K = ${hands.top_k}`);
  if (hands.temperature !== 1) changes.push(`temperature ${hands.temperature}`);
  $('changes').replaceChildren();
  if (!changes.length) return;
  make($('changes'), 'span', '', changes.join(', '));
  button($('changes'), 'undo', 'Undo all', reset);
}

function reset() {
  hands = structuredClone(UNTOUCHED);
  $('top_k').value = config.top_k;
  $('temperature').value = 1;
  turnRouter();
}

function paintNext() {
  const [prob, old] = [now, before].map(answer => softmax(answer.logits.at(-1)));
  const best = [...prob.keys()].sort((a, b) => prob[b] - prob[a]).slice(0, 8);
  $('next').replaceChildren();
  best.forEach((id, i) => {
    const line = button($('next'), `next${i}`, '', () => {
      stop();
      write(id);
    });
    line.disabled = id === EOT;
    make(line, 'b', '', id === EOT ? '⟨end⟩' : wordOf(id));
    const track = make(line, 'span', 'track');
    make(track, 'i').style.width = 100 * prob[id] + '%';
    if (isTouched()) make(track, 'u').style.left = 100 * old[id] + '%';
    const change = 100 * (prob[id] - old[id]);
    const shown = Math.abs(change) < 0.05 ? '' : ` (${signed(change, 1)})`;
    make(line, 'small', '', percent(prob[id]) + shown);
  });
}

function scoreOf(box, hands) {
  const everywhere = { ...hands, force: {} };            // a forced token is one of the text above
  return -total(read(box, readable(idsOf(box)), everywhere).nats);
}

const lead = hands => scoreOf('pair0', hands) - scoreOf('pair1', hands);

function prefers(lead) {
  const ratio = Math.exp(Math.abs(lead));
  if (ratio < 1.05) return 'prefers neither.';
  const shown = ratio > 1e6 ? 'over a million' : ratio < 10 ? number(ratio, 1) : whole(ratio);
  return `prefers the ${lead > 0 ? 'first' : 'second'}: ${shown} times as probable.`;
}

function paintPair() {
  for (const box of ['pair0', 'pair1']) {
    $(`${box}-score`).textContent = number(scoreOf(box, hands), 2);
  }
  const [length, other] = ['pair0', 'pair1'].map(box => idsOf(box).length);
  let verdict = `The model ${prefers(lead(hands))}`;
  if (isTouched()) verdict += ` Untouched, it ${prefers(lead(UNTOUCHED))}`;
  if (length !== other) verdict += ' But they differ in length, and each token lowers the sum.';
  $('find-pair').disabled = Math.min(length, other) === 1;
  $('verdict').textContent = Math.min(length, other) > 1 ? verdict : 'Write two sentences.';
}

// ---- Sliders ------------------------------------------------------------------------------------

// The value of a slider, which is also shown above it.
function valueOf(id) {
  $(`${id}-shown`).textContent = $(id).value;
  return Number($(id).value);
}

function turnRouter() {
  hands.top_k = valueOf('top_k');
  hands.temperature = valueOf('temperature');
  update();
}

// ---- Begin --------------------------------------------------------------------------------------

for (const place of document.querySelectorAll('.k')) place.textContent = config.top_k;
if (live.model !== 'moep') {
  $('worked').textContent = 'Gates are a softmax over all boxes, so those of the chosen sum to less than 100%.';
}
$('source').textContent =
  `${live.model}.py of nanopaths, run ${visible(live.name)}, trained on ${visible(live.data)}.`;
$('readme').href = live.readme;
$('paper').href = live.paper;
for (const example of document.querySelectorAll('#examples button')) {
  example.onclick = () => edit(example.textContent);
}
$('text').oninput = () => edit($('text').value);
$('challenge').onclick = challenge;
$('pair0').oninput = $('pair1').oninput = paintPair;
$('go').onclick = goOn;
$('find-text').onclick = () => knockOutWorst(hands => total(forward(live, idx, hands).nats));
$('find-pair').onclick = () => knockOutWorst(hands => -lead(hands));
$('tokens').onkeydown = event => {
  const { previousSibling, nextSibling, parentNode } = event.target;
  const goal = { ArrowLeft: previousSibling, ArrowRight: nextSibling,
    Home: parentNode.firstChild, End: parentNode.lastChild }[event.key];
  if (!goal) return;
  event.preventDefault();
  goal.focus();
};
document.onkeydown = event => {
  if (event.key !== 'Escape' || !picked) return;
  if ($('panel').contains(event.target)) $(picked).focus();
  picked = null;
  paint();
};
edit(live.prompt);

$('top_k').max = Math.min(...layers().map(layer => placesOf(layer).length));
$('top_k').value = config.top_k;
$('top_k').oninput = $('temperature').oninput = turnRouter;
turnRouter();
