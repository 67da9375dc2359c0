"""Runs of train.py one after the other in the same processes, for torchrun: starting them takes longest.
python tests/train_many.py '[["config/moep.py", "--shard"], ...]'"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train                                             # noqa: E402

torch.set_num_threads(1)
begin, end = dist.init_process_group, dist.destroy_process_group
with mock.patch.object(dist, 'init_process_group', lambda *args, **kwargs: None), \
        mock.patch.object(dist, 'destroy_process_group', lambda: None):
    begin('gloo')
    for argv in json.loads(sys.argv[1]):
        sys.argv = ['train.py', *argv]
        train.main()
end()
