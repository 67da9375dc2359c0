"""A page in a real browser, for the tests of tools that write one."""

import html
import json
import re
import shutil
import subprocess

import pytest

BROWSER = shutil.which('chromium') or shutil.which('google-chrome')
in_a_browser = pytest.mark.skipif(not BROWSER, reason='there is no browser')


def browse(page, script, folder):
    """Open the page with a script at its end -> what this returns; the console."""
    path = folder / 'browsed.html'
    path.write_text(f"""{page}<script>(async () => {{ {script} }})().then(
        seen => {{ document.body.textContent = JSON.stringify(seen); }});</script>""", 'utf-8')
    done = subprocess.run(
        [BROWSER, '--headless=new', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr',
         f'--user-data-dir={folder}/profile', '--virtual-time-budget=60000', '--dump-dom',
         f'file://{path}'], capture_output=True, text=True, encoding='utf-8', timeout=300)
    body = re.search(r'<body>(.*)</body>', done.stdout, re.DOTALL).group(1)
    console = [line for line in done.stderr.splitlines() if 'CONSOLE' in line]
    return json.loads(html.unescape(body)), console
