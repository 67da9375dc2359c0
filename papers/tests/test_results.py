"""README.md and docs/: tables, links and commands. papers/: every plot can be drawn."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields

import pytest

from common import ROOT
from plumbing.settings import Settings, import_model
from tools.surgery import list_surgeries

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
MODELS = ['moep', 'papaformer', 'moduleformer', 'selfmoe', 'stlm', 'stlm_depth', 'arena.dense',
          'arena.moduleformer_routers']
each_page = pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)


def test_tables_are_those_of_the_results():
    done = subprocess.run([sys.executable, '-m', 'papers.tables', '--check'], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def anchors(page):
    """The headings as GitHub spells them in links"""
    text = re.sub('```.*?```', '', page.read_text(encoding='utf-8'), flags=re.DOTALL)
    seen = Counter()
    for title in re.findall('^#+ (.*)', text, re.MULTILINE):
        title = re.sub(r'\]\(.*?\)', '', title.lower())  # a link's text, not its target
        name = re.sub(r'[^\w -]', '', title).strip().replace(' ', '-')
        yield f'{name}-{seen[name]}' if seen[name] else name
        seen[name] += 1


@each_page
def test_links_lead_somewhere(page):
    for link in re.findall(r'\]\(([^)\s]+)\)', page.read_text(encoding='utf-8')):
        if '://' not in link:
            path, _, anchor = link.partition('#')
            target = page.parent / path if path else page
            assert target.exists() and (not anchor or anchor in anchors(target)), link


def commands(page):
    """The arguments of every `python ...` and `torchrun ...`, in blocks and in the text"""
    text = page.read_text(encoding='utf-8').replace('\\\n', ' ')
    blocks = [code for language, code in re.findall(r'```(\w*)\n(.*?)```', text, re.DOTALL)
              if language != 'python']
    prose = re.sub('```.*?```', '', text, flags=re.DOTALL)
    codes = [code.replace('\n', ' ') for code in re.findall('`([^`]+)`', prose)]
    for line in '\n'.join(blocks + codes).splitlines():
        for command in re.split(r'&&|[;|]', line.split(' # ')[0]):
            if match := re.search(r'(?:^|[ /])(?:python3?|torchrun)\s+(.+)', command):
                yield re.sub(r'^(--\S+ )+', '', match[1]).split()    # the options of torchrun


def script_of(words):
    """The file that a command runs; None if it is not ours"""
    if words[0] != '-m':
        return words[0] if words[0].endswith('.py') else None
    path = words[1].replace('.', '/')
    path = f'{path}/__main__.py' if (ROOT / path).is_dir() else f'{path}.py'
    return path if words[1].split('.')[0] in ('tools', 'papers', 'arena', 'lab') else None


def options(script):
    sources = [ROOT / script] + [ROOT / 'papers/common.py'] * script.startswith('papers')
    names = {'help'}
    for source in sources:
        names |= {*re.findall(r"'--([\w-]+)'", source.read_text(encoding='utf-8'))}
    if script == 'tools/surgery.py':
        names |= {*re.findall(r'--([\w-]+)', list_surgeries())}
    if script in ('train.py', 'tools/bench.py', 'tools/surgery.py'):
        owners = [Settings, *(import_model(name).Config for name in MODELS)]
        names |= {field.name for owner in owners for field in fields(owner)}
    return names


def exists(path):
    """Whether there is such a file; * and words in capitals stand for anything"""
    return any(ROOT.glob(re.sub(r'\b[A-Z]+\b|\$\w+|\{.*?\}', '*', path)))


@each_page
def test_commands_name_what_exists(page):
    """Scripts, modules, configs, surgeries and options"""
    for words in commands(page):
        script = script_of(words)
        if script:
            configs = [word for word in words if word.startswith('config/')]
            missing = [path for path in [script, *configs] if not exists(path)]
            if script == 'tools/surgery.py' and len(words) > 2:
                missing += {words[2]} - {*list_surgeries().split(), 'NAME', '--help'}
            if not missing:
                given = re.findall(r'(?:^|[ "])--([\w-]+)', ' '.join(words))
                missing = {*given} - options(script)
            assert not missing, f"{missing} in: python {' '.join(words)}"


@pytest.mark.slow
def test_plots_are_drawn():
    pytest.importorskip('matplotlib')
    from papers import plots
    for name, draw in plots.PLOTS.items():
        figure = draw()
        assert all(axis.has_data() for axis in figure.axes)
        assert (ROOT / 'docs' / f'{name}.png').exists()
        plots.plt.close(figure)
