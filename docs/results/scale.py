"""
A large model on one GPU: speed, memory beside the formula of tools/scale.py, and whether it learns.

    python docs/results/scale.py scale.json config/paper/moduleformer/molm_4b_k2.py --data=babylm \
        --checkpoint_activations --batch_size=16 --gradient_accumulation_steps=1 --max_iters=100 \
        --warmup_iters=10 --schedule=constant --eval_tokens=65536 --out_dir=out/molm_4b

Any setting of train.py can be given. The checkpoint, 50 GB, is not written.
"""

import json
import statistics
import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # noqa: E402
from plumbing.folder import RunFolder  # noqa: E402
from plumbing.machine import Machine  # noqa: E402
from plumbing.models import sketch  # noqa: E402
from plumbing.settings import read_settings  # noqa: E402
from tools import measure, scale  # noqa: E402
from tools.flops import training_flops  # noqa: E402


def main():
    file, argv = Path(sys.argv[1]), sys.argv[2:]
    s, module, keys = read_settings(argv)
    model = sketch(module, keys)
    T = s.seq_len or model.config.block_size
    formula = scale.memory(model, s, T, world=1)
    machine = Machine(s.device, s.dtype)
    rate = measure.matrix_rate(machine)
    sys.argv = ['train.py', *argv, '--log_interval=1', '--overwrite']
    with mock.patch.object(RunFolder, 'save', lambda *args, **kwargs: None):
        train.main()
    peak = torch.cuda.max_memory_allocated() if machine.cuda else 0
    log = [json.loads(line) for line in open(Path(s.out_dir, 'log.jsonl'))]
    steps = [record for record in log if 'loss' in record]
    val = [record['val'] for record in log if 'val' in record]
    speed = statistics.median(record['tokens_per_s'] for record in steps[len(steps) // 2:])
    total, active = model.count_params()
    work = training_flops(model.config, active, T + 2 * s.memory)    # half of T, and all of the memory
    predicted = sum(formula.values())
    found = dict(
        device=torch.cuda.get_device_name() if machine.cuda else 'cpu', torch=torch.__version__, command=argv,
        total=total, active=active, tokens_per_s=speed, share=work * speed / rate, matrix_rate=rate,
        gib=peak / 2 ** 30, formula_gib=predicted / 2 ** 30, formula=formula, val=val,
        losses=[round(record['loss'], 4) for record in steps])
    file.write_text(json.dumps(found) + '\n', encoding='utf-8')
    losses = found['losses']
    print(f'loss      {losses[0]:.3f} at first, {statistics.mean(losses[-10:]):.3f} in the last ten steps')
    print(f'speed     {speed:,.0f} tokens/s, {100 * found["share"]:.1f}% of {rate / 1e12:.0f} TFLOP/s')
    print(f'memory    {found["gib"]:.1f} GiB; by the formula {found["formula_gib"]:.1f} GiB, '
          f'{100 * (predicted / peak - 1) if peak else 0:+.1f}%')


if __name__ == '__main__':
    main()
