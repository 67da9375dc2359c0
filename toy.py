"""
The toy corpora's grammars, minimal pairs and a classification task over them; `python prepare.py toy` writes them.

Small enough to read, but with agreement that only a model that looks far back gets right. In a template, [slot] is a
word of a class, a role in the story or a verb; it agrees with the hero or, after a slash, with another person of the
sentence: a, b, f (the friend), i (it), t (they). [*slot] marks the word whose right and wrong form make a minimal pair.
"""

import random
import re


GIRLS = 'Mia Anna Lily Sara Emma Rosa Zoe Lucy'.split()
BOYS = 'Tom Ben Max Sam Leo Jack Tim Noah'.split()
WOMEN, MEN = 'girl woman queen sister aunt'.split(), 'boy man king brother uncle'.split()
PLACES = dict(      # who and what one meets where
    park=('dog duck bird child', 'bench kite ball tree boat'), beach=('crab bird child dog', 'shell boat stone bucket'),
    farm=('cow goose mouse pony', 'gate wagon apple leaf box'), garden=('cat mouse bee bird', 'flower leaf basket bench'),
    forest=('fox wolf bear owl', 'tree stone leaf flower'), market=('cat dog goose child', 'apple basket hat cake'),
    castle=('mouse cat pony owl', 'door crown box lamp book'), village=('cat dog mouse child', 'cup box lamp hat'))
PLURALS = dict(child='children', woman='women', man='men', mouse='mice', goose='geese', wolf='wolves', leaf='leaves',
               fox='foxes', box='boxes', bench='benches', pony='ponies')
PAST = {'see': 'saw', 'find': 'found', 'meet': 'met', 'hide': 'hid', 'run': 'ran', 'sleep': 'slept', 'sing': 'sang',
        'hurt': 'hurt', 'go': 'went', 'say': 'said', 'can': 'could', 'give': 'gave', 'make': 'made', 'take': 'took',
        'tell': 'told', 'have': 'had', 'fall': 'fell', 'get': 'got', 'come': 'came', 'sit': 'sat', 'begin': 'began',
        'eat': 'ate', 'hear': 'heard', 'try': 'tried'}
PRONOUNS = dict(he=('he', 'she', 'they'), him=('him', 'her', 'them'), his=('his', 'her', 'their'),
                self=('himself', 'herself', 'themselves'))
ONE, MANY = 'this that one every'.split(), 'these those two many'.split()
ODD = 'child woman man mouse goose wolf leaf'.split()
CLASSES = {key: value.split(',') for key, value in dict(
    feel='happy,sad,tired,hungry,loud,quiet', tint='red,blue,green,yellow,clean,pretty', pet='cat,dog,bird,fox',
    size='big,small,old,little,good,funny', near='near,behind,beside,under', day='sunny,cold,rainy,warm',
    like='see,like,love,find,want', met='saw,liked,helped,followed,met,loved', move='run,sleep,sing,play,jump,wait',
    act='wash,hurt,hide,see,help,look at,laugh at,talk to', toy='ball,kite,hat,book,cup,boat',
    how='all day,again,every day,at the door,in the rain,in the house,at night,with a smile').items()}
SCENES = dict(line.split(': ') for line in '''
determiner_noun_agreement: [Name/c] [like/c] [det/a] [*any/a] [near] the [thing/b].
determiner_noun_agreement_irregular: [Name/c] [like/c] [det/a] [*odd/a] [near] the [thing/b].
determiner_noun_agreement_with_adjective: [Name/c] [like/c] [det/a] [size] [*any/a] [near] the [thing/b].
determiner_noun_agreement_with_adjective_irregular: [Name/c] [like/c] [det/a] [size] [*odd/a] [near] the [thing/b].
subject_verb_agreement: The [size] [living/a] [*be/a] [feel]. | The [size] [thing/a] at the [place] [*be/a] [tint].
subject_verb_agreement_present_tense: The [living/a] [near] the [thing/b] [*move/a] [how].
subject_verb_agreement_prepositional_phrase: The [living/a] [near] the [thing/b] [*be/a] [feel].
subject_verb_agreement_prepositional_phrase_things: The [thing/a] [near] the [thing/b] [*be/a] [tint].
subject_verb_agreement_subject_relative_clause: The [living/a] that [met] the [living/b] [*be/a] [feel].
subject_verb_agreement_object_relative_clause: The [thing/a] that the [person/b] [met] [*be/a] [tint].
anaphor_gender_agreement: [Name/a] [act/a] [*self/a] [how].
anaphor_gender_agreement_with_adjective: The [size] [person/a] [act/a] [*self/a] [how].
anaphor_gender_agreement_prepositional_phrase: The [person/a] [near] the [person/b] [act/a] [*self/a] [how].
anaphor_gender_agreement_relative_clause: The [person/a] who [met] the [person/b] [act/a] [*self/a] [how].
anaphor_number_agreement: The [size] [person/a] [act/a] [*self/a] [how].
anaphor_number_agreement_prepositional_phrase: The [person/a] [near] the [person/b] [act/a] [*self/a] [how].
anaphor_number_agreement_relative_clause: The [person/a] who [met] the [person/b] [act/a] [*self/a] [how].'''[1:].split('\n'))
SUBJECTS = 'The [size] [person/a] [near] the [person/b] [be/a] [feel]. | ' \
    'The [person/a] who [met] the [person/b] [move/a] [how]. | ' \
    'The [person/a] [near] the [person/b] [like/a] the [thing] at the [place].'
OPENING = 'Once upon a time there [be] [a_hero] named [hero]. | One [day] day [hero] [go] to the [place]. | ' \
    '[Hero] [love] the [place]. Every day [he] [play] there. | It [be/i] a [day] day, and [hero] [be] at the [place].'
LOOKING = '[Hero] [look] around. | There [be/i] so much to see! | [He] [sit] down and [look] at the [place].'
PLOTS = '''        # each of four steps, with alternatives
[Hero] [have] a [color] [toy], but now it [be/i] gone. | [Hero] [want] to play, but [he] [can] not find [his] [toy].
[He] [look] under the bed and behind the door. | "Where is my [toy]?" [ask] [hero]. | [He] [ask] [friend] for help.
[Friend] [find/f] it [near] the [gate]. | "Look!" [say/f] [friend]. "Your [toy] is [near] the [gate]."
"Thank you!" [say] [hero]. "You are a good friend." | [Hero] [be] so happy that [he] [jump] up and down.
One day [hero] [hear] a sound. A little [pet] [be/i] in a hole. | [Hero] [see] a little [pet]. It [be/i] lost and cold.
"Do not be afraid," [say] [hero]. "[I] can help you." | [He] [want] to help, but the hole [be/i] too deep.
[Friend] [have/f] a long rope. Together they [help/t] the [pet]. | [He] [give] the [pet] some milk and a warm bed.
The [pet] [be/i] safe. It [follow/i] [hero] home. | From that day on, [hero] and the [pet] [be/t] good friends.
[Hero] [want] to make a cake for [friend]. | It [be/i] a big day for [friend], and [hero] [have] an idea: a cake!
But there [be/i] no milk in the house. | But the cake [fall/i] on the floor. "Oh no!" [say] [hero].
So [he] [go] to the market and [get] some more. | [He] [begin] again, and [he] [be] very careful.
[Friend] [eat/f] the cake and [smile/f]. "This is the best cake!" | They all [eat/t] the cake and [sing/t] a song.
[Hero] [see] [friend] under a tree. [Friend] [be/f] sad. | [Friend] [sit/f] alone and [look/f] at the ground.
"What is wrong?" [ask] [hero]. "My [toy] is broken," [say/f] [friend]. | "[I] will help you," [say] [hero].
[Hero] [take] the [toy] and [look] at it. Then [he] [help] [friend]. | [Hero] [give] [friend] a new [color] [toy].
[Friend] [be/f] happy again, and they [play/t] all day. | "Now we can play," [say] [hero], and [friend] [smile/f].
[Hero] [can] not sleep. There [be/i] a sound in the dark. | At night [hero] [see] something big behind the door.
[He] [hide] [self] under the bed and [wait]. | "Who is there?" [ask] [hero], but no one [answer/i].
Then [friend] [come/f] with a lamp. It [be/i] only a [pet]! | [He] [tell] [friend], and they [look/t]: a [pet]!
[Hero] [laugh] at [self]. The dark [be/i] not so bad. | Soon [he] [sleep], and the [pet] [sleep/i] too.
[Hero] [want] to run faster than [friend]. | [Hero] and [friend] [run/t] to the old tree every day.
But [he] [fall] and [hurt] [self]. | But [friend] [be/f] always faster, and [hero] [be] sad.
[Friend] [come/f] back to help. "Are you okay?" [ask/f] [friend]. | "Do not be sad," [say/f] [friend]. "Try again!"
In the end they [go/t] home together. | [He] [try] again and again, and one day [he] [be] the best.'''.split('\n')[1:]
ENDING = '[Hero] [be] happy, and [he] [laugh] at [self]. | Then [hero] [go] home. [He] [be] tired but happy. | ' \
    'And that night [hero] [sleep] well. | [Hero] [smile] to [self]. It [be/i] a good day. | ' \
    '[Hero] [tell] [his] mother about it, and she [smile/i].'


class Dice(random.Random):
    """Choices from random() alone, whose stream is the same on every machine and Python version, for ever."""
    def pick(self, items):
        return items[int(self.random() * len(items))]

    def shuffled(self, items):
        items = list(items)
        for i in range(len(items) - 1, 0, -1):
            j = int(self.random() * (i + 1))
            items[i], items[j] = items[j], items[i]
        return items


def inflect(word, plural, past):
    word, *rest = word.split(' ')
    if word == 'be':
        word = ('was', 'were')[plural] if past else ('is', 'are')[plural]
    elif past:
        word = PAST.get(word) or word + ('d' if word[-1] == 'e' else 'ed')
    elif not plural and word != 'can':
        word = {'have': 'has', 'try': 'tries'}.get(word) or word + ('es' if word in ('go', 'do', 'wash') else 's')
    return ' '.join([word, *rest])


def expand(template, dice, who, past, roles, flip=1):
    """One of a template's alternatives, filled in. who: {key: [plural, female]}; flip: which of them goes wrong."""
    def slot(match):
        star, key, (plural, female) = match[1], match[2].lower(), who[match[3] or 'h']
        people = dict(name=(BOYS, GIRLS)[female], person=(MEN, WOMEN)[female], det=(ONE, MANY)[plural])
        words = CLASSES | people | roles
        word = words.get(key, key)
        word = dice.pick(word) if isinstance(word, list) else word
        def form(plural, female):
            if key in PRONOUNS:
                return PRONOUNS[key][2 if plural else female]
            if key in ('living', 'thing', 'any', 'odd', 'person'):
                return PLURALS.get(word, word + 's') if plural else word
            return inflect(word, plural, past) if key in ('like', 'move', 'act') or key not in words else word
        text = form(plural, female)
        if star:
            text = '{%s|%s}' % (text, form(plural ^ (flip == 0), female ^ (flip == 1)))
        return text[0].upper() + text[1:] if match[2][0].isupper() else text
    return re.sub(r'\[(\*?)(\w+)(?:/(\w))?\]', slot, dice.pick(template.split(' | ')))


def scene(dice, kind, past, place, test=False):
    """A sentence of one construction, its {right|wrong} word marked. In a test the noun in between misleads."""
    coin, flip = lambda: int(dice.random() < .5), int('gender' in kind)
    a, b, c = [0 if flip else coin(), coin()], [coin(), coin()], [0, coin()]
    if test:
        b = [a[0], 1 - a[1]] if flip else [1 - a[0], a[1]]
        past = past or 'anaphor_number' in kind             # in the present tense the verb gives the number away
    past = past and 'present' not in kind
    living, things = (words.split() for words in PLACES[place])
    roles = dict(living=living + WOMEN + MEN, thing=things, any=living + things, odd=ODD, place=place)
    return expand(SCENES[kind], dice, dict(a=a, b=b, c=c, h=c), past, roles, flip)


def story(dice):
    """Opening, what is to be seen, a small trouble and its end. The hero is a girl, a boy or two children."""
    plural, past, place = dice.pick([0, 0, 0, 1, 1]), dice.random() < .5, dice.pick(list(PLACES))
    first, second, friend = dice.shuffled(BOYS + GIRLS)[:3]
    female = int(first in GIRLS)
    kind = 'two little children' if plural else 'a little girl' if female else 'a little boy'
    roles = dict(hero=f'{first} and {second}' if plural else first, friend=friend, place=place, a_hero=kind,
                 i='we' if plural else 'I', **{key: dice.pick(CLASSES[key]) for key in ('toy', 'pet', 'near')},
                 color=dice.pick(CLASSES['tint'][:4]), gate=dice.pick(PLACES[place][1].split()))
    who = dict(h=[plural, female], f=[0, 0], i=[0, 0], t=[1, 0])
    first_step = 4 * int(dice.random() * (len(PLOTS) // 4))
    tell = lambda template: expand(template, dice, who, past, roles)
    often = [kind for kind in SCENES if 'anaphor' in kind]       # gender takes the most examples to learn
    kinds = dice.shuffled(kind for kind in [*SCENES, *often] if not (past and 'present' in kind))
    seen = [re.sub(r'\{(\w+)\|\w+\}', r'\1', scene(dice, kind, past, place)) for kind in kinds[:11]]
    start = dice.shuffled([tell(OPENING), seen.pop()]) if dice.random() < .4 else [tell(OPENING)]
    plot = [tell(step) for step in PLOTS[first_step:first_step + 4]]
    return ' '.join([*start, tell(LOOKING), *seen[:6], *plot, *seen[6:], tell(ENDING)])


def problem(dice):
    """A question, and on the next line a worked solution that ends in 'The answer is N.'"""
    girl, things = dice.pick([0, 1]), dice.pick('apples books shells hats cups flowers'.split())
    name, other, he = dice.pick((BOYS, GIRLS)[girl]), dice.pick((GIRLS, BOYS)[girl]), ('He', 'She')[girl]
    a, b, c, d = (2 + int(dice.random() * n) for n in (19, 19, 8, 8))
    ask, boxes = f'How many {things} does {name} have', dice.pick(['boxes', 'baskets'])
    question, *steps = dice.pick([
        (f'{name} has {a} {things}. {he} gets {b} more. {ask} now?', (a, '+', b)),
        (f'{name} has {a} {things} and {other} has {b}. How many {things} do they have together?', (a, '+', b)),
        (f'{other} has {a} {things}. {name} has {c} more than {other}. {ask}?', (a, '+', c)),
        (f'{name} has {a + b} {things}. {he} gives {a} of them to {other}. {ask} now?', (a + b, '-', a)),
        (f'{name} has {a + b} {things} and {other} has {a}. How many more {things} does {name} have?', (a + b, '-', a)),
        (f'There are {c} {boxes} with {d} {things} in each. How many {things} are there?', (c, '*', d)),
        (f'{name} has {c} {boxes} of {d} {things} and finds {b} more. {ask}?', (c, '*', d), (c * d, '+', b)),
        (f'{name} has {a + b} {things}. {he} loses {a} and then gets {c}. {ask} now?', (a + b, '-', a), (b, '+', c)),
        (f'{other} has {a} {things}. {name} has {c} times as many, and {b} more. {ask}?', (a, '*', c), (a * c, '+', b))])
    results = [x + y if sign == '+' else x - y if sign == '-' else x * y for x, sign, y in steps]
    worked = ' '.join(f'{x} {sign} {y} = {result}.' for (x, sign, y), result in zip(steps, results))
    return f'{question}\n{worked} The answer is {results[-1]}.'


STEMS = Dice('lingo').shuffled(
    a + b + c + d + e for a in 'zvkpmt' for b in 'aiu' for c in 'rlnv' for d in 'aou' for e in 'kztm')


def lingo(dice):
    """A second language: subject, object, verb. Nouns and the adjectives after them end in -o or -u (subject, object),
    -oz or -uz if there are many; verbs in -ek, -ezek after many; 'vai' at the end asks. Stems: see above."""
    nouns, adjectives, verbs = STEMS[:50], STEMS[50:70], STEMS[70:100]
    phrase = lambda word, end: word + end + (f' {dice.pick(adjectives)}{end}' if dice.random() < .5 else '')
    lines, topic, many = [], dice.pick(nouns), dice.pick(['', 'z'])
    for _ in range(4 + int(dice.random() * 5)):
        if dice.random() < .4:
            topic, many = dice.pick(nouns), dice.pick(['', 'z'])
        words = [phrase(topic, 'o' + many), dice.pick(verbs) + ('ezek' if many else 'ek')]
        if dice.random() < .8:
            words.insert(1, phrase(dice.pick(nouns), dice.pick(['u', 'uz'])))
        lines.append(' '.join(words).capitalize() + dice.pick(['.', '.', '.', ' vai?']))
    return ' '.join(lines)


def minimal_pairs(kind, seen, length, n=200):
    """Rows as BLiMP writes them, of sentences not `seen`; `length` (in tokens) is the same for good and bad."""
    dice, rows = Dice(kind), {}
    term = {'d': 'determiner_noun_agreement', 's': 'subject_verb_agreement', 'a': 'anaphor_agreement'}[kind[0]]
    while len(rows) < n:
        marked = scene(dice, kind, dice.random() < .5, dice.pick(list(PLACES)), test=True)
        good, bad = (re.sub(r'\{(\w+)\|(\w+)\}', form, marked) for form in (r'\1', r'\2'))
        if good not in seen and length(good) == length(bad) and length(' ' + good) == length(' ' + bad):
            rows.setdefault(good, dict(
                sentence_good=good, sentence_bad=bad, field='morphology', linguistics_term=term, UID=kind,
                simple_LM_method=True, one_prefix_method=False, two_prefix_method=False, lexically_identical=False,
                pairID=str(len(rows))))
    return list(rows.values())


def subject_rows(n):
    """Rows of a classification task: does the sentence tell of men and boys (label 0) or of women and girls (1)? The
    others in it are of the other kind, so that counting words does not help."""
    dice, rows = Dice('toy_glue'), {}
    while len(rows) < n:
        label, place = len(rows) % 2, dice.pick(list(PLACES))
        many, others, past = (int(dice.random() < .5) for _ in range(3))
        roles = dict(thing=PLACES[place][1].split(), place=place)
        sentence = expand(SUBJECTS, dice, dict(a=[many, label], b=[others, 1 - label], h=[0, 0]), past, roles)
        rows.setdefault(sentence, dict(sentence=sentence, label=label))
    return list(rows.values())
