// The forward pass of moep.py and moduleformer.py in plain JavaScript: their order, their names.
//
// A matrix is a list of rows (Float32Array): x has one row per token, the weight of a linear map
// one per output, as in nn.Linear. A stack of blocks is a list of matrices: qkv[p] is that of
// block p. Weights hang in a tree by their names: 'parallel.0.qkv' is weights.parallel[0].qkv.
//
// `run` is one pass through the model: its config; `past`, how many tokens an earlier pass read;
// join(name, rows), which puts what that pass found for them before the rows of the new ones; and
// `hands`, what the reader of the page changes: { out: ['parallel.0/2'], that choice 2 is knocked
// out; force: {'parallel.0/5': 2}, that token 5 takes only choice 2; top_k; temperature }.
'use strict';

// ---- The idea: each token chooses K of P blocks -------------------------------------------------

// Scores (N rows of E) -> gates (N rows of E), 0 where not chosen. A choice that is knocked out has
// a score of -Infinity; of a token that is forced, all but one have.
function route(run, layer, score_NE, renormalise) {
  const { out, force, top_k, temperature } = run.hands;
  const gate_NE = score_NE.map((score_E, token) => {
    const forced = force[`${layer}/${run.past + token}`];
    const isOpen = e => forced === undefined ? !out.includes(`${layer}/${e}`) : e === forced;
    const prob_E = softmax(score_E.map((s, e) => isOpen(e) ? s / temperature : -Infinity));
    const order_E = [...prob_E.keys()].sort((a, b) => prob_E[b] - prob_E[a]);    // stable
    const choice_K = order_E.slice(0, top_k);
    const total = renormalise ? choice_K.reduce((sum, e) => sum + prob_E[e], 0) : 1;
    const gate_E = new Float32Array(prob_E.length);
    for (const e of choice_K) gate_E[e] = prob_E[e] / total;
    return gate_E;
  });
  run.routes[layer] = {
    score_NE: run.join(`${layer}.score`, score_NE),
    gate_NE: run.join(`${layer}.gate`, gate_NE),
  };
  return gate_NE;
}

// The tokens that take choice e.
function tokensOf(gate_NE, e) {
  return [...gate_NE.keys()].filter(token => gate_NE[token][e] > 0);
}

function parallelLayer(x, w, run, layer) {
  const { n_block, n_head_parallel, swiglu } = run.config;
  const gate_NP = route(run, layer, linear(x, w.router.linear.weight), true);
  const out = x.map(row => row.slice());
  for (let p = 0; p < n_block; p++) {
    // Attention runs for all tokens, as later ones may choose this block.
    const n = layer_norm(x, w.norm_1_gain[p], w.norm_1_bias[p]);
    const y = attend(linear(n, w.qkv[p], w.qkv_bias[p]), n_head_parallel, run, `${layer}.${p}`);
    // The rest runs for the tokens that chose it: R rows.
    const tokens = tokensOf(gate_NP, p);
    const att_RD = linear(tokens.map(t => y[t]), w.proj[p], w.proj_bias[p]);
    const x_RD = add(tokens.map(t => x[t]), att_RD);
    const n_RD = layer_norm(x_RD, w.norm_2_gain[p], w.norm_2_bias[p]);
    const h_RF = activate(linear(n_RD, w.fc[p], w.fc_bias[p]), swiglu);
    const ffn_RD = linear(h_RF, w.down[p], w.down_bias[p]);
    combine(out, add(att_RD, ffn_RD), tokens, gate_NP, p);
  }
  return out;
}

// out[token] += gate * row
function combine(out, rows, tokens, gate_NE, e) {
  tokens.forEach((t, r) => {
    const gate = gate_NE[t][e];
    for (let i = 0; i < rows[r].length; i++) out[t][i] += gate * rows[r][i];
  });
}

function moe(x, w, run, layer) {
  const { n_expert, swiglu } = run.config;
  const gate_NE = route(run, layer, linear(x, w.router.linear.weight), true);
  if (swiglu) x = layer_norm(x);
  const out = x.map(() => new Float32Array(w.down[0].length));
  for (let e = 0; e < n_expert; e++) {
    const tokens = tokensOf(gate_NE, e);
    let h_RF = tokens.map(t => x[t]);
    if (swiglu) h_RF = activate(linear(h_RF, w.fc[e], w.fc_bias[e]), true);
    combine(out, linear(h_RF, w.down[e], w.down_bias[e]), tokens, gate_NE, e);
  }
  return out;
}

// ---- GPT-2's own parts --------------------------------------------------------------------------

// Causal attention. qkv: rows of queries, keys and values of H heads.
function attend(qkv, H, run, name) {
  const seen = run.join(name, qkv);
  const D = qkv[0].length / 3;
  const d = D / H;
  return qkv.map((query, i) => {
    const y = new Float32Array(D);
    for (let first = 0; first < D; first += d) {
      const score = new Float32Array(run.past + i + 1);
      for (let s = 0; s < score.length; s++) {
        score[s] = dot(query, first, seen[s], D + first, d) / Math.sqrt(d);
      }
      softmax(score).forEach((p, s) => addPart(y, first, p, seen[s], 2 * D + first, d));
    }
    return y;
  });
}

function activate(h, swiglu) {
  if (!swiglu) return h.map(row => each(row, gelu));
  return h.map(row => {
    const up = row.subarray(row.length / 2);
    return each(row.subarray(0, up.length), (gate, i) => gate / (1 + Math.exp(-gate)) * up[i]);
  });
}

function gelu(z) {                  // its approximation by tanh
  return z / (1 + Math.exp(-2 * Math.sqrt(2 / Math.PI) * (z + 0.044715 * z * z * z)));
}

function block(x, w, run, layer) {
  const { n_head, swiglu } = run.config;
  const y = attend(linear(norm(x, w.norm_1), w.qkv.weight, w.qkv.bias), n_head, run, layer);
  x = add(x, linear(y, w.proj.weight, w.proj.bias));
  const h = activate(linear(norm(x, w.norm_2), w.fc.weight, w.fc.bias), swiglu);
  return add(x, linear(h, w.down.weight, w.down.bias));
}

// ---- The model ----------------------------------------------------------------------------------

function moep(idx, w, run) {
  let x = add(idx.map(id => w.wte.weight[id]), w.wpe.weight.slice(run.past));
  for (const i in w.first) x = block(x, w.first[i], run, `first.${i}`);
  x = moe(x, w.shrink, run, 'shrink');
  for (const i in w.parallel) x = parallelLayer(x, w.parallel[i], run, `parallel.${i}`);
  x = moe(x, w.grow, run, 'grow');
  for (const i in w.last) x = block(x, w.last[i], run, `last.${i}`);
  return linear(norm(x, w.norm_f), w.wte.weight);
}

// ---- ModuleFormer: pools of modules, stick-breaking attention -----------------------------------

// A query walks back in time with a stick of length 1; each key breaks off sigmoid(z) of what is
// left. q: R rows; kv: a row of keys and values for each token.
function breakStick(q, tokens, kv, H, past) {
  const D = q.length ? q[0].length : 0;
  const d = D / H;
  return q.map((query, r) => {
    const y = new Float32Array(D);
    for (let first = 0; first < D; first += d) {
      let left = 1;
      for (let s = past + tokens[r]; s >= 0; s--) {
        const z = dot(query, first, kv[s], first, d) / Math.sqrt(d);
        const p = left / (1 + Math.exp(-z));
        addPart(y, first, p, kv[s], kv[s].length - D + first, d);
        left -= p;
      }
    }
    return y;
  });
}

function pool(x, w, run, layer, module) {
  const hidden = linear(x, w.router.B.weight).map(row => each(row, h => Math.max(0, h)));
  const gate_NE = route(run, layer, linear(hidden, w.router.A.weight), false);
  const out = x.map(row => new Float32Array(row.length));
  for (let e = 0; e < gate_NE[0].length; e++) {
    const tokens = tokensOf(gate_NE, e);
    combine(out, module(tokens.map(t => x[t]), tokens, e), tokens, gate_NE, e);
  }
  return out;
}

function moduleformer(idx, w, run) {
  const exact_gelu = z => z / 2 * (1 + erf(z / Math.SQRT2));
  let x = idx.map(id => w.wte.weight[id]);
  for (const i in w.blocks) {
    const { norm_1, norm_2, att, ffd } = w.blocks[i];
    let n = norm(x, norm_1);
    const kv = run.join(`kv.${i}`, att.kv ? linear(n, att.kv.weight) : n);   // identity_kv: both
    x = add(x, pool(n, att, run, `blocks.${i}.att`, (x_RD, tokens, e) => {
      const q = linear(x_RD, att.q.weight[e]);
      const y = breakStick(q, tokens, kv, run.config.n_head, run.past);
      return linear(y, att.o.weight[e]);
    }));
    n = norm(x, norm_2);
    x = add(x, pool(n, ffd, run, `blocks.${i}.ffd`, (x_RD, tokens, e) => {
      const h_RF = linear(x_RD, ffd.fc.weight[e]).map(row => each(row, exact_gelu));
      return linear(h_RF, ffd.down.weight[e]);
    }));
  }
  return linear(norm(x, w.norm_f), w.head.weight);
}

// ---- Arithmetic ---------------------------------------------------------------------------------

// x @ w.T + b. Four tokens and two outputs at a time: it is quicker to read a number only once.
function linear(x, w, b) {
  const y = x.map(() => new Float32Array(w.length));
  for (let t = 0; t < x.length; t += 4) {
    const four = [t, t + 1, t + 2, t + 3].map(i => Math.min(i, x.length - 1));
    const [x0, x1, x2, x3] = four.map(i => x[i]);
    const [y0, y1, y2, y3] = four.map(i => y[i]);
    for (let o = 0; o < w.length; o += 2) {
      const next = Math.min(o + 1, w.length - 1);
      const wa = w[o], wb = w[next];
      let a0 = b ? b[o] : 0, a1 = a0, a2 = a0, a3 = a0;
      let b0 = b ? b[next] : 0, b1 = b0, b2 = b0, b3 = b0;
      for (let i = 0; i < wa.length; i++) {
        const va = wa[i], vb = wb[i], v0 = x0[i], v1 = x1[i], v2 = x2[i], v3 = x3[i];
        a0 += va * v0; a1 += va * v1; a2 += va * v2; a3 += va * v3;
        b0 += vb * v0; b1 += vb * v1; b2 += vb * v2; b3 += vb * v3;
      }
      y0[o] = a0; y1[o] = a1; y2[o] = a2; y3[o] = a3;
      y0[next] = b0; y1[next] = b1; y2[next] = b2; y3[next] = b3;
    }
  }
  return y;
}

// A row of f(value, i). Several times as fast as the row's own map.
function each(row, f) {
  const y = new Float32Array(row.length);
  for (let i = 0; i < row.length; i++) y[i] = f(row[i], i);
  return y;
}

function add(a, b) {
  return a.map((row, t) => each(row, (value, i) => value + b[t][i]));
}

function dot(a, i, b, j, n) {
  let sum = 0;
  for (let k = 0; k < n; k++) sum += a[i + k] * b[j + k];
  return sum;
}

function addPart(y, i, p, v, j, n) {
  for (let k = 0; k < n; k++) y[i + k] += p * v[j + k];
}

function softmax(score) {
  const most = score.reduce((a, b) => Math.max(a, b));
  const exp = each(score, s => Math.exp(s - most));
  const sum = total(exp);
  return each(exp, e => e / sum);
}

function layer_norm(x, gain, bias) {
  return x.map(row => {
    const mean = total(row) / row.length;
    const centred = each(row, v => v - mean);
    const scale = 1 / Math.sqrt(dot(centred, 0, centred, 0, row.length) / row.length + 1e-5);
    if (!gain) return each(centred, v => v * scale);
    return each(centred, (v, i) => v * scale * gain[i] + bias[i]);
  });
}

function cross_entropy(row, id) {   // -log softmax(row)[id]
  let sum = 0;
  for (let i = 0; i < row.length; i++) sum += Math.exp(row[i] - row[id]);
  return Math.log(sum);
}

function total(row) {
  let sum = 0;
  for (let i = 0; i < row.length; i++) sum += row[i];
  return sum;
}

function norm(x, ln) {
  return layer_norm(x, ln.weight, ln.bias);
}

function erf(z) {                   // Abramowitz and Stegun 7.1.26, within 1.5e-7
  const t = 1 / (1 + 0.3275911 * Math.abs(z));
  const poly = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t
    + 0.254829592) * t;
  return Math.sign(z) * (1 - poly * Math.exp(-z * z));
}

// ---- The run that the page holds ----------------------------------------------------------------

const MODELS = { moep, moduleformer };
const POWERS = Array.from({ length: 32 }, (_, exponent) => 2 ** (exponent - 25));

// The model's answer to token ids, at most block_size: logits; routes {layer: {score_NE, gate_NE}};
// nats, the loss of each token but the first. `known` is an earlier answer with the same hands:
// what it says about tokens that both begin with is not computed again.
function forward(live, idx, hands, known) {
  let past = 0;
  while (known && past < idx.length - 1 && idx[past] === known.idx[past]) past++;
  const rows = {};
  const join = (name, fresh) => {
    rows[name] = past ? [...known.rows[name].slice(0, past), ...fresh] : fresh;
    return rows[name];
  };
  const run = { config: live.config, hands, past, join, routes: {} };
  const logits = join('logits', MODELS[live.model](idx.slice(past), live.weights, run));
  const loss = (id, i) => past + i ? cross_entropy(logits[past + i - 1], id) : 0;
  const nats = join('nats', idx.slice(past).map(loss));
  return { idx, rows, logits, routes: run.routes, nats };
}

// float16 numbers in base64, one tensor after the other -> the tree of weights.
function unpackWeights(base64, shapes) {
  const letters = atob(base64);
  const values = new Float32Array(letters.length / 2);
  for (let i = 0; i < values.length; i++) {
    const half = letters.charCodeAt(2 * i) + 256 * letters.charCodeAt(2 * i + 1);
    const exponent = half >> 10 & 31, fraction = half & 1023;
    const size = exponent ? POWERS[exponent] * (1024 + fraction) : POWERS[1] * fraction;
    values[i] = half >> 15 ? -size : size;
  }
  let first = 0;
  const nest = ([n, ...rest]) => {
    if (rest.length) return Array.from({ length: n }, () => nest(rest));
    first += n;
    return values.subarray(first - n, first);
  };
  const weights = {};
  for (const [name, shape] of shapes) {
    const path = name.split('.');
    const leaf = path.pop();
    path.reduce((tree, key) => tree[key] ??= {}, weights)[leaf] = nest(shape);
  }
  return weights;
}

// ---- The tokenizer: byte-level BPE, as tiktoken does it -----------------------------------------

const PATTERN = new RegExp([
  "'(?:[sdmt]|ll|ve|re)", ' ?\\p{L}+', ' ?\\p{N}+', ' ?[^\\p{White_Space}\\p{L}\\p{N}]+',
  '\\p{White_Space}+(?!\\P{White_Space})', '\\p{White_Space}+'].join('|'), 'gu');

// rank: a Map from a token's bytes, written as a string of characters 0 to 255, to its id
function encode(text, rank) {
  return (text.match(PATTERN) || []).flatMap(piece => {
    const parts = Array.from(new TextEncoder().encode(piece), byte => String.fromCharCode(byte));
    const whole = rank.get(parts.join(''));
    if (whole !== undefined) return [whole];
    while (parts.length > 1) {                          // merge the pair of the lowest rank
      const ranks = parts.slice(1).map((part, i) => rank.get(parts[i] + part) ?? Infinity);
      const best = ranks.indexOf(Math.min(...ranks));
      if (ranks[best] === Infinity) break;
      parts.splice(best, 2, parts[best] + parts[best + 1]);
    }
    return parts.map(part => rank.get(part));
  });
}

function decode(tokens) {
  const bytes = Uint8Array.from(tokens.join(''), letter => letter.charCodeAt(0));
  return new TextDecoder('utf-8', { ignoreBOM: true }).decode(bytes);
}
