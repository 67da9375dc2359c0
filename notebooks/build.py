"""
Make notebooks/tour.ipynb from docs/tour.md.

    python notebooks/build.py                                                    # cells without outputs
    jupyter nbconvert --to notebook --execute --inplace notebooks/tour.ipynb     # with outputs
    jupyter nbconvert --coalesce-streams notebooks/tour.ipynb                    # one output per cell

Blocks of Python and of shell commands become cells; the rest of the page becomes text between them.
Left out are the blocks of expected output and the pictures, which the cells themselves produce. A block
marked `sh minutes` stays text: it would run too long.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / 'docs' / 'tour.md'
NOTEBOOK = HERE / 'tour.ipynb'

SETUP = '''\
# On a hosted notebook, write the address here that nanopaths is cloned from. In a copy of nanopaths,
# leave it empty.
REPOSITORY = ''

import os
import subprocess
import sys
from pathlib import Path

found = [folder for folder in ('.', '..', 'nanopaths') if Path(folder, 'train.py').exists()]
if found:
    os.chdir(found[0])
elif REPOSITORY:
    subprocess.run(['git', 'clone', REPOSITORY, 'nanopaths'], check=True)
    os.chdir('nanopaths')
    subprocess.run([sys.executable, '-m', 'pip', 'install', '-r', 'requirements.txt'], check=True)
else:
    raise ValueError('nanopaths is not here: set REPOSITORY, above, to its address')
sys.path.insert(0, os.getcwd())
os.environ['PATH'] = os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']   # for %%bash
'''


def split(page):
    """-> [(kind, text)]: 'prose', or what stands behind the ``` of a block ('sh', 'python', 'text')."""
    parts = []
    kind, lines = 'prose', []
    for line in page.splitlines():
        if not line.startswith('```'):
            lines.append(line)
            continue
        parts.append((kind, '\n'.join(lines).strip('\n')))
        kind = line[3:] if kind == 'prose' else 'prose'
        lines = []
    parts.append((kind, '\n'.join(lines).strip('\n')))
    return [(kind, text) for kind, text in parts if text]


def as_text(prose):
    """Prose for the notebook: no pictures, and links that start from notebooks/."""
    prose = re.sub(r'^!\[.*\n*', '', prose, flags=re.MULTILINE)
    return re.sub(r'\]\((?!#|\.\./|\w+://)', '](../docs/', prose)


def cells(page):
    """-> [(cell type, source)]: the page up to its first section, the setup, the sections"""
    intro, mark, sections = page.partition('\n## ')
    found = [('markdown', as_text(intro.strip())), ('code', SETUP.strip())]
    for kind, text in split(mark + sections):
        if kind == 'prose':
            found.append(('markdown', as_text(text)))
        elif kind == 'python':
            found.append(('code', text))
        elif kind == 'sh':
            found.append(('code', f'%%bash -e\n{text}'))
        elif kind != 'text':
            language = kind.split()[0]
            found.append(('markdown', f'```{language}\n{text}\n```'))
    return found


def notebook(page):
    made = []
    for number, (kind, source) in enumerate(cells(page)):
        cell = dict(cell_type=kind, id=f'cell-{number}', metadata={}, source=source.splitlines(True))
        if kind == 'code':
            cell |= dict(execution_count=None, outputs=[])
        made.append(cell)
    kernel = dict(display_name='Python 3', language='python', name='python3')
    return dict(cells=made, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)


if __name__ == '__main__':
    made = notebook(PAGE.read_text(encoding='utf-8'))
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
    print(f"{NOTEBOOK.name}: {len(made['cells'])} cells")
