"""
Stick-breaking attention on a GPU: the kernels of stick_kernels.py beside moduleformer.py's blocks of
queries, plain and compiled, and torch's softmax attention. Speed, and memory against length.

    python docs/results/stick.py stick.json              # one GPU, alone; a minute and a half
"""

import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import stick_kernels  # noqa: E402
from moduleformer import StickBreaking  # noqa: E402

SHAPES = {                                               # B, H, T, K queries per token, past keys, d
    '32 x 8 x 512 x 64': (32, 8, 512, 1, 0, 64),
    'small.py: 32 x 4 x 512 x 64, K = 2': (32, 4, 512, 2, 0, 64),
    'the same, 512 keys of an earlier segment': (32, 4, 512, 2, 512, 64),
    '32 x 4 x 512 x 128': (32, 4, 512, 1, 0, 128),
    '2 x 8 x 8,192 x 64': (2, 8, 8192, 1, 0, 64)}


def make(shape, bias=0.0):
    """Queries, keys and values. bias is added to every logit: at 0 a random query has used up its stick
    after some 150 keys, and the kernels skip the rest; at -5 it passes most keys by, as in a trained
    model, and reads all of them."""
    B, H, T, K, past, d = shape
    torch.manual_seed(0)
    q = torch.randn(B, T, K, H, d, device='cuda')
    kv = torch.randn(B, past + T, 2, H, d, device='cuda')
    if bias:
        q[..., 0] = bias * d ** 0.5
        kv[:, :, 0, :, 0] = 1.0
    k, v = kv.bfloat16().unbind(2)
    tensors = q.bfloat16().permute(0, 3, 1, 2, 4), k.transpose(1, 2), v.transpose(1, 2)
    return [x.detach().requires_grad_() for x in tensors]


def softmax(q, k, v):
    B, H, T, K, d = q.shape
    k, v = (x.repeat_interleave(K, 1) for x in (k, v))
    q = q.permute(0, 1, 3, 2, 4).reshape(B, H * K, T, d)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.view(B, H, K, T, d).permute(0, 1, 3, 2, 4)


def milliseconds(function, tensors):
    """Of forward and backward: a CUDA graph of one call, replayed; the median of three."""
    grad = torch.randn_like(function(*tensors))
    work = lambda: torch.autograd.grad(function(*tensors), tensors, grad)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()  # noqa: F841

    def timed(n):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(n):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / n
    n = max(3, int(50 / timed(2)))
    return statistics.median(timed(n) for _ in range(3))


def memory(T):
    """Bytes per token that forward and backward take beyond their inputs."""
    tensors = make((1, 8, T, 1, 0, 64), bias=-5.0)
    grad = torch.randn_like(tensors[0])
    torch.autograd.grad(stick_kernels.stick_breaking(*tensors), tensors, grad)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(stick_kernels.stick_breaking(*tensors), tensors, grad)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / T


def main():
    blocks = lambda q, k, v: StickBreaking.apply(q, k, v, 128)
    rows = []
    for name, shape in SHAPES.items():
        kernel = stick_kernels.stick_breaking
        forms = {'kernel': (kernel, 0.0), 'kernel, trained': (kernel, -5.0), 'blocks': (blocks, 0.0),
                 'blocks, compiled': (torch.compile(blocks), 0.0), 'softmax': (softmax, 0.0)}
        if shape[4]:                                     # past keys: is_causal means another mask
            del forms['softmax']
        for form, (function, bias) in forms.items():
            ms = milliseconds(function, make(shape, bias))
            rate = 1000 * shape[0] * shape[2] / ms
            rows.append(dict(shape=name, form=form, ms=ms, tokens_per_s=rate))
            print(f'{name:45}{form:18}{ms:8.3f} ms{rate / 1e6:8.2f}M tokens/s', flush=True)
            torch.cuda.empty_cache()
    bytes_per_token = {T: memory(T) for T in (2048, 8192, 32768)}
    print('bytes per token', bytes_per_token)
    found = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, rows=rows,
                 bytes_per_token=bytes_per_token)
    Path(sys.argv[1]).write_text(json.dumps(found) + '\n', encoding='utf-8')


if __name__ == '__main__':
    main()
