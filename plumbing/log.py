"""A run's log.jsonl: a JSON object per line."""

import json
import os
import time
from pathlib import Path

from plumbing.cli import UserError, reading


class Log:
    """The log of a run that trains. A resumed run drops the lines that were written after its last
    checkpoint. The file is locked until the run ends, so that of two runs that start together only
    one writes. Of several processes, the first one writes."""

    def __init__(self, out, machine, ckpt, overwrite):
        self.began = time.monotonic() - (ckpt['log']['seconds'] if ckpt else 0)
        self.file = open(os.devnull, 'w')
        if machine.rank > 0:
            return
        out.mkdir(parents=True, exist_ok=True)
        self.file = open(out / 'log.jsonl', 'a', encoding='utf-8')
        try:
            import fcntl                                 # Windows has none
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except OSError:
            raise UserError(f'another run is writing to {out}: set another --out_dir') from None
        for old in out.glob('ckpt*.pt') if overwrite else []:
            old.unlink()
        self.file.truncate(min(ckpt['log']['bytes'], self.file.tell()) if ckpt else 0)
        self.file.seek(0, os.SEEK_END)

    def write(self, it, **record):
        seconds = round(time.monotonic() - self.began, 3)
        record = dict(iter=it, seconds=seconds, **record)
        self.file.write(json.dumps(record, default=str) + '\n')
        self.file.flush()

    def place(self):
        """What a checkpoint keeps, so that a resumed run can go on from here."""
        return dict(bytes=self.file.tell(), seconds=time.monotonic() - self.began)


def read_log(folder):
    """The lines of a run's log, except one that a training run has not finished writing."""
    path = Path(folder, 'log.jsonl')
    with reading(path):
        lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith('\n')]
