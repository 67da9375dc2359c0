"""What `python prepare.py toy` writes. The grammar of the stories is in toy.ini."""

import configparser
import operator
import random
import re
from itertools import product
from pathlib import Path

TOYS = ('toy_stories', 'toy_math', 'toy_lingo', 'toy_bytes', 'toy_pauses', 'toy_thoughts',
        'toy_blimp')

parser = configparser.ConfigParser(delimiters=':', interpolation=None)
parser.read_string(Path(__file__).with_name('toy.ini').read_text(encoding='utf-8'))
GRAMMAR = {}                                             # {section: {key: its alternatives}}
for section in parser.sections():
    lines = parser[section].items()
    GRAMMAR[section] = {key: re.split(r' \| |\n', text.strip()) for key, text in lines}
GIRLS, BOYS, WOMEN, MEN = GRAMMAR['people'].values()
WORDS, LIVING, THINGS, PRONOUNS, SCENES, STORY = (
    GRAMMAR[name] for name in ('words', 'living', 'things', 'pronouns', 'scenes', 'story'))
PLACES = list(LIVING)
PRESENT, PLURALS, PAST = (dict(map(str.split, pairs)) for pairs in GRAMMAR['irregular'].values())
PLOTS = [list(steps.values()) for section, steps in GRAMMAR.items() if section.startswith('plot')]


class Dice(random.Random):
    """Choices from random() alone, whose stream is the same on every machine and Python version."""

    def pick(self, items):
        return items[int(self.random() * len(items))]

    def coin(self):
        return int(self.random() < .5)

    def shuffled(self, items):
        items = list(items)
        for i in range(len(items) - 1, 0, -1):
            j = int(self.random() * (i + 1))
            items[i], items[j] = items[j], items[i]
        return items


# ---- Sentences ----------------------------------------------------------------------------------

def inflect(verb, plural, past):
    verb, *rest = verb.split(' ')                        # look at -> looks at
    if verb == 'be':
        verb = ('was', 'were')[plural] if past else ('is', 'are')[plural]
    elif past:
        verb = PAST.get(verb) or verb + ('d' if verb[-1] == 'e' else 'ed')
    elif not plural:
        verb = PRESENT.get(verb) or verb + 's'
    return ' '.join([verb, *rest])


def expand(alternatives, dice, who, past, roles, gender=True):
    """One of the alternatives with its slots filled in. who: {letter: [plural, female]}. A [*slot]
    becomes {right|wrong}, where the wrong form differs in gender or else in number."""
    def fill(match):
        star, slot, letter = match.groups()
        key = slot.lower()
        plural, female = who[letter or 'h']
        people = dict(name=GIRLS if female else BOYS, person=WOMEN if female else MEN)
        classes = WORDS | people | roles | dict(det=WORDS['many' if plural else 'one'])
        word = classes.get(key, key)
        if isinstance(word, list):
            word = dice.pick(word)

        def form(plural, female):
            if key in PRONOUNS:
                return PRONOUNS[key][2 if plural else female]
            if key in ('living', 'thing', 'any', 'odd', 'person'):
                return PLURALS.get(word, word + 's') if plural else word
            if key in ('like', 'move', 'act') or key not in classes:
                return inflect(word, plural, past)
            return word
        text = form(plural, female)
        if star:
            wrong = form(plural, 1 - female) if gender else form(1 - plural, female)
            text = f'{{{text}|{wrong}}}'
        return text[0].upper() + text[1:] if slot[0].isupper() else text
    return re.sub(r'\[(\*?)(\w+)(?:/(\w))?\]', fill, dice.pick(alternatives))


def scene(dice, kind, past, place, test=False):
    """A sentence of one construction, right and wrong. In a test the noun in between misleads."""
    gender = 'gender' in kind
    a = [0 if gender else dice.coin(), dice.coin()]
    b = [dice.coin(), dice.coin()]
    c = [0, dice.coin()]
    if test:
        b = [a[0], 1 - a[1]] if gender else [1 - a[0], a[1]]
        past = past or 'anaphor_number' in kind          # a present verb would tell the number
    past = past and 'present' not in kind
    living, things = LIVING[place], THINGS[place]
    roles = dict(living=living + WOMEN + MEN, thing=things, any=living + things, place=place)
    text = expand(SCENES[kind], dice, dict(a=a, b=b, c=c, h=c), past, roles, gender)
    return [re.sub(r'\{(\w+)\|(\w+)\}', form, text) for form in (r'\1', r'\2')]


# ---- Documents and rows -------------------------------------------------------------------------

def story(dice):
    """An opening, what is to be seen, a small trouble and its end. The hero may be two children."""
    plural = dice.pick([0, 0, 0, 1, 1])
    past = dice.coin()
    place = dice.pick(PLACES)
    first, second, friend = dice.shuffled(BOYS + GIRLS)[:3]
    female = int(first in GIRLS)
    a_hero = 'a little girl' if female else 'a little boy'
    roles = dict(hero=first, a_hero=a_hero, i='I', friend=friend, place=place)
    if plural:
        roles.update(hero=f'{first} and {second}', a_hero='two little children', i='we')
    for key in ('toy', 'pet', 'near'):
        roles[key] = dice.pick(WORDS[key])
    roles['color'] = dice.pick(WORDS['tint'][:4])
    roles['gate'] = dice.pick(THINGS[place])
    who = dict(h=[plural, female], f=[0, 0], i=[0, 0], t=[1, 0])
    plot = dice.pick(PLOTS)

    def tell(alternatives):
        return expand(alternatives, dice, who, past, roles)
    often = [kind for kind in SCENES if 'anaphor' in kind]       # gender needs the most examples
    kinds = dice.shuffled(kind for kind in [*SCENES, *often] if not (past and 'present' in kind))
    seen = [scene(dice, kind, past, place)[0] for kind in kinds[:11]]
    two_at_the_start = dice.random() < .4
    start = [tell(STORY['opening'])]
    if two_at_the_start:
        start = dice.shuffled([*start, seen.pop()])
    steps = [tell(step) for step in plot]
    looking, ending = tell(STORY['looking']), tell(STORY['ending'])
    return ' '.join([*start, looking, *seen[:6], *steps, *seen[6:], ending])


def problem(dice):
    """A question, and on the next line a worked solution that ends in 'The answer is N.'"""
    he = dice.pick(['He', 'She'])
    things = dice.pick(['apples', 'books', 'shells', 'hats', 'cups', 'flowers'])
    name = dice.pick(BOYS if he == 'He' else GIRLS)
    other = dice.pick(GIRLS if he == 'He' else BOYS)
    a, b, c, d = (2 + int(dice.random() * n) for n in (19, 19, 8, 8))
    boxes = dice.pick(['boxes', 'baskets'])
    many = f'How many {things}'
    ask = f'{many} does {name} have'
    has = f'{name} has {a + b} {things}'
    question, *steps = dice.pick([
        (f'{name} has {a} {things}. {he} gets {b} more. {ask} now?', (a, '+', b)),
        (f'{name} has {a} {things} and {other} has {b}. {many} do they have together?',
         (a, '+', b)),
        (f'{other} has {a} {things}. {name} has {c} more than {other}. {ask}?', (a, '+', c)),
        (f'{has}. {he} gives {a} of them to {other}. {ask} now?', (a + b, '-', a)),
        (f'{has} and {other} has {a}. How many more {things} does {name} have?', (a + b, '-', a)),
        (f'There are {c} {boxes} with {d} {things} in each. {many} are there?', (c, '*', d)),
        (f'{name} has {c} {boxes} of {d} {things} and finds {b} more. {ask}?',
         (c, '*', d), (c * d, '+', b)),
        (f'{has}. {he} loses {a} and then gets {c}. {ask} now?', (a + b, '-', a), (b, '+', c)),
        (f'{other} has {a} {things}. {name} has {c} times as many, and {b} more. {ask}?',
         (a, '*', c), (a * c, '+', b))])
    signs = {'+': operator.add, '-': operator.sub, '*': operator.mul}
    worked = ''
    for x, sign, y in steps:
        result = signs[sign](x, y)
        worked += f'{x} {sign} {y} = {result}. '
    return f'{question}\n{worked}The answer is {result}.'


STEMS = Dice('lingo').shuffled(map(''.join, product('zvkpmt', 'aiu', 'rlnv', 'aou', 'kztm')))


def lingo(dice):
    """A made-up language: subject, object, verb. Subjects end in -o, objects in -u, and so do the
    adjectives after them; the plural adds -z. Verbs end in -ek, or in -ezek if the subject is in
    the plural. 'vai' at the end makes a question."""
    nouns, adjectives, verbs = STEMS[:50], STEMS[50:70], STEMS[70:100]

    def phrase(noun, ending):
        adjective = f' {dice.pick(adjectives)}{ending}' if dice.random() < .5 else ''
        return noun + ending + adjective
    sentences = []
    topic, many = dice.pick(nouns), dice.pick(['', 'z'])
    for _ in range(4 + int(dice.random() * 5)):
        if dice.random() < .4:
            topic, many = dice.pick(nouns), dice.pick(['', 'z'])
        words = [phrase(topic, 'o' + many), dice.pick(verbs) + ('ezek' if many else 'ek')]
        if dice.random() < .8:
            words.insert(1, phrase(dice.pick(nouns), dice.pick(['u', 'uz'])))
        sentences.append(' '.join(words).capitalize() + dice.pick(['.', '.', '.', ' vai?']))
    return ' '.join(sentences)


def minimal_pairs(kind, seen, length, n=200):
    """Rows as BLiMP has them, of sentences not `seen`. Good and bad have equally many tokens."""
    terms = dict(d='determiner_noun_agreement', s='subject_verb_agreement', a='anaphor_agreement')
    dice = Dice(kind)
    rows = {}
    while len(rows) < n:
        good, bad = scene(dice, kind, dice.coin(), dice.pick(PLACES), test=True)
        same_length = all(length(start + good) == length(start + bad) for start in ('', ' '))
        if good not in seen and same_length:
            rows.setdefault(good, dict(
                sentence_good=good, sentence_bad=bad, field='morphology',
                linguistics_term=terms[kind[0]], UID=kind, simple_LM_method=True,
                one_prefix_method=False, two_prefix_method=False, lexically_identical=False,
                pairID=str(len(rows))))
    return list(rows.values())
