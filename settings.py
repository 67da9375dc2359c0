"""
The settings of a training run, and the model file that they name: `read_settings(argv)` is all that train.py asks for.
"""

import importlib
import inspect
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import configurator
from errors import UserError


@dataclass
class Settings:
    model: str = 'moep'                    # the model file, without .py
    out_dir: str = ''                      # the run's folder; out/<name of the config> if not given
    seed: int = 42                         # of weights, dropout and data order (the order is the same for all models)
    # what is read
    data: str | dict = 'toy_stories'       # a folder of data_dir, or {folder: (from, to) or (from, to, passes per epoch)}
    data_dir: str = 'data'                 # where prepare.py put them
    seq_len: int | None = None             # tokens per chunk; the model's block_size if not given
    stride: int | None = None              # tokens between the starts of chunks; seq_len if not given
    stream: bool = False                   # every row of the batch reads on where it stopped, instead of shuffled chunks
    memory: int = 0                        # with stream: so many past keys and values, detached, extend the context (moduleformer)
    epoch_words: float | None = None       # an epoch ends after this many words; after all chunks if not given
    # how long
    epochs: float = 1.0                    # passes over the chunks, each in a new order and newly cut
    max_iters: int | None = None           # steps; if given, epochs do not count; 0: print the plan and stop (after a surgery: save)
    batch_size: int = 16                   # chunks per micro-batch
    gradient_accumulation_steps: int = 1   # micro-batches per step, in each process
    # optimiser
    learning_rate: float = 1e-3            # of AdamW, at its highest
    min_lr: float = 0.0                    # the floor of cosine and linear
    schedule: str = 'cosine'               # cosine | linear | constant, all after the warm-up
    warmup_iters: int = 0                  # steps of linear warm-up
    warmup_lr: float = 0.0                 # the rate that the warm-up starts from
    weight_decay: float = 0.1              # on matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0                 # largest gradient norm; 0: no clipping
    dropout_schedule: str = 'constant'     # constant | early | late | linear | triangle, of a model that has set_dropout
    dropout_phase: float = 0.5             # early: dropout until this part of the run; late: from there on
    aux_weights: dict = field(default_factory=dict)   # {name of an auxiliary loss: its weight}
    # what is written
    log_interval: int = 10                 # steps between lines of the log
    eval_interval: int = 500               # steps between evaluations on val.bin (also at the start and the end)
    eval_data: str | list | None = None    # folders whose val.bin is scored; those of data if not given
    eval_tokens: int | None = None         # score at most so many val tokens per data set; all if not given
    save_interval: int = 500               # steps between checkpoints
    checkpoint_words: list = field(default_factory=list)   # also keep the weights at these numbers of words
    sample_tokens: int = 120               # length of the text sample at the end
    # how it starts
    resume: bool = False                   # go on from out_dir's checkpoint (from the beginning if there is none yet)
    overwrite: bool = False                # start anew though out_dir holds a run
    init_from: str | list | None = None    # start from this run's weights; a list of runs for a surgery that takes several
    surgery: str | None = None             # a function of the model's file, or file.function, that rebuilds the model
    surgery_args: dict = field(default_factory=dict)
    surgery_batches: int = 8               # batches of val.bin handed to a surgery that asks for `batches`
    # the machine
    device: str = 'auto'                   # cuda, mps or cpu, whichever is there
    dtype: str = 'auto'                    # bfloat16 autocast on cuda, float32 elsewhere
    compile: bool | None = None            # torch.compile; if not given, on cuda for runs of at least 200 steps
    graph: bool = True                     # a step as one CUDA graph where possible: one GPU, no memory, no float32 experts


def read_settings(argv, usage=''):
    """-> Settings, the model's module, and the keys given for the model's own Config."""
    if '-h' in argv or '--help' in argv:
        argv = [arg for arg in argv if arg not in ('-h', '--help')]
        module = import_model(configurator.read_command(argv).get('model', Settings.model))
        print(usage.strip())
        for owner in (Settings, module.Config):          # as they stand in the source, comments included
            print(f'\n{owner.__name__}, in {inspect.getmodule(owner).__name__}.py:')
            print('\n'.join(line for line in inspect.getsource(owner).splitlines() if re.match(r'    (\w+: |#)', line)))
        sys.exit(0)
    values = configurator.read_command(argv)
    module = import_model(values.get('model', Settings.model))
    given, model_keys = configurator.sort_keys(values, Settings, module.Config)
    s = Settings(**given)
    s.out_dir = s.out_dir or f'out/{s.model}'
    check_ranges(s)
    return s, module, model_keys


def check_ranges(s):
    positive = ('batch_size', 'gradient_accumulation_steps', 'log_interval', 'eval_interval', 'save_interval', 'epochs',
                'seq_len', 'stride', 'epoch_words', 'eval_tokens')
    for key, value in asdict(s).items():
        if isinstance(value, (int, float)) and (value < 0 or (value == 0 and key in positive)):
            raise UserError(f"{key} = {value} must be {'more than' if key in positive else 'at least'} 0")
    if not all(isinstance(value, (int, float)) for value in [*s.checkpoint_words, *s.aux_weights.values()]):
        raise UserError('checkpoint_words and the weights in aux_weights must be numbers')
    schedules, dropouts = ('cosine', 'linear', 'constant'), ('constant', 'early', 'late', 'linear', 'triangle')
    for wrong, message in ((s.schedule not in schedules, f"schedule is '{s.schedule}'; it can be {', '.join(schedules)}"),
                           (s.dropout_schedule not in dropouts, f"dropout_schedule is '{s.dropout_schedule}'; "
                            f"it can be {', '.join(dropouts)}"),
                           (s.beta1 >= 1 or s.beta2 >= 1, 'beta1 and beta2 must be less than 1'),
                           (s.memory and not s.stream, 'memory needs contiguous text: set stream=True'),
                           (s.stream and (s.stride or s.epoch_words), 'a stream has no stride and no epoch_words'),
                           (s.resume and s.overwrite, 'resume goes on with a run, overwrite starts it anew: choose one'),
                           (s.surgery_args and not s.surgery, 'surgery_args without a surgery')):
        if wrong:
            raise UserError(message)


def import_model(name):
    files = Path(__file__).resolve().parent.glob('*.py')
    names = [p.stem for p in files if '\nConfig, Model =' in p.read_text(encoding='utf-8')]
    if name not in names:
        lacks = (Path(__file__).resolve().parent / f'{name}.py').exists()
        raise UserError(f"{name}.py lacks the line 'Config, Model = ...' at its end" if lacks else
                        f"there is no model file {name}.py; there are: {', '.join(sorted(names))}")
    return importlib.import_module(name)


def make_config(module, keys):
    try:
        return module.Config(**keys)
    except (TypeError, ValueError) as e:
        raise UserError(f'{module.__name__}: {e}') from None
