"""The world of the embedded model: small signs and rows of coloured shapes, drawn with Pillow.

A scene is a prompt and the picture it describes, 64 wide and 32 high. Drawing is a pure function
of the scene, so a prompt has exactly one picture. The held-out words and combinations never reach
the scenes that the model is trained on: `random_sign` and `random_shapes` refuse them.
"""

import random
from functools import cache
from itertools import product

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 64, 32
CELL = 16  # pixels a letter takes on a sign: two of the transformer's 8-pixel patches
LETTERS = "ABCDEGHKLMNOPRST"
VOWELS = "AEO"
CONSONANTS = "BCDGHKLMNPRST"

COLOURS = {
    "red": (205, 35, 40),
    "green": (20, 130, 60),
    "blue": (30, 70, 200),
    "yellow": (245, 205, 40),
    "purple": (130, 45, 160),
    "black": (30, 30, 34),
}
LIGHT_COLOURS = ("yellow",)
PAPER = (238, 236, 230)
INK, CHALK = (20, 20, 24), (255, 255, 255)

COUNTS = {1: "a", 2: "two", 3: "three"}
KINDS = ("circle", "square", "triangle")
MAX_OBJECTS = 4
TEST_PAIR_SHARE = 0.25

FIXED_WORDS = (
    ["a", "two", "three", "and", "sign", "that", "says", '"']
    + list(COLOURS)
    + [kind + plural for kind in KINDS for plural in ("", "s")]
)

RESERVED = {word.upper() for word in FIXED_WORDS}  # one token each, so never spelled on a sign

WORDS = """
an at as am be do go he me no on or so to ha oh
cat bat hat mat rat sat pat bad dad had lad mad pad sad bag hag lag nag rag sag tag ban can man pan
ran tan cap gap lap map nap rap tap cab dab gab lab tab bar car tar arm art ark arc ace age ale ape
are ate bed led beg leg peg keg bet get let met net pet set den hen men pen ten gem hem pep rep her
she the cob hob lob mob rob sob cod nod pod rod dog hog log cog bog con son ton cop hop lop mop pop
top cot dot got hot lot not pot rot tot ear eat eel egg ego elm end era gas ham ram dam sea tea pea
oak oar odd orb ore old one all ant ash ask add ago bee see toe hoe doe nor
band hand land sand bank tank rank sank ball call hall tall mall camp lamp damp ramp card hard care
dare hare rare bare cart dart part tart base case lace race pace bake cake lake make rake take boat
coat goat moat road load toad coal goal bone cone tone gone lone bean mean lean bear dear gear hear
near pear tear beat heat meat neat seat deed seed need keep deep seen teen keen heel peel reel bell
cell tell sell belt melt bend lend mend send tend bent cent dent lent rent sent tent best nest pest
rest test head lead read bead deal meal seal real heal cold gold hold told bold cook book hook look
took cool pool tool boot root loot moon noon soon cost lost host most post corn horn born torn more
sore core note rose nose pose hose dose hole mole pole role home dome rope hope cope poke lock rock
sock dock pack back sack rack hack tack deck neck peck star step stop sled slot spot shop shoe snap
slap clap clam crab crop drop grab drag glad plan chat chap then them than tree knot knee mask task
desk date gate late rate mate sale pale tale game name same tame cape tape sage cage page east past
last cast mast salt halt also echo open acre able each loan moan roam soap
""".upper().split()


@cache
def font(size=20):
    """Pillow's own font, so a picture needs no file."""
    return ImageFont.load_default(size)


def sign_prompt(colour, word):
    """`a red sign that says "CAT"`."""
    return f'a {colour} sign that says "{word}"'


def draw_sign(colour, word):
    """A sign that nearly fills the picture, each letter centred in a cell of its own."""
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    draw = ImageDraw.Draw(image)
    draw.rectangle([1, 3, WIDTH - 2, HEIGHT - 4], fill=COLOURS[colour])
    left = (WIDTH - CELL * len(word)) / 2
    for index, letter in enumerate(word):
        draw.text(
            (left + CELL * (index + 0.5), HEIGHT / 2 - 0.5),
            letter,
            font=font(),
            fill=INK if colour in LIGHT_COLOURS else CHALK,
            anchor="mm",
        )
    return image


def shapes_prompt(groups):
    """`two blue circles and a yellow square`, from (count, colour, kind) groups."""
    names = [
        f"{COUNTS[count]} {colour} {kind}{'s' if count > 1 else ''}"
        for count, colour, kind in groups
    ]
    return " and ".join(names)


def draw_shapes(groups):
    """One row of objects, evenly spaced, in the order of the prompt."""
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    draw = ImageDraw.Draw(image)
    objects = [(colour, kind) for count, colour, kind in groups for _ in range(count)]
    for index, (colour, kind) in enumerate(objects):
        centre = WIDTH * (index + 0.5) / len(objects)
        draw_shape(draw, kind, COLOURS[colour], centre, HEIGHT / 2, radius=7)
    return image


def draw_shape(draw, kind, fill, x, y, radius):
    """One circle, square or triangle about (x, y)."""
    box = [x - radius, y - radius, x + radius - 1, y + radius - 1]
    if kind == "circle":
        draw.ellipse(box, fill=fill)
    elif kind == "square":
        draw.rectangle(box, fill=fill)
    else:
        draw.polygon([(x, box[1]), (box[2], box[3]), (box[0], box[3])], fill=fill)


def all_shapes():
    """Every scene of one or two groups: at most 4 objects, two groups differ in kind and colour."""
    singles = list(product(COUNTS, COLOURS, KINDS))
    pairs = [
        (first, second)
        for first, second in product(singles, singles)
        if first[0] + second[0] <= MAX_OBJECTS and first[1] != second[1] and first[2] != second[2]
    ]
    return [(single,) for single in singles] + pairs


@cache
def split_shapes(seed=0):
    """(train, test) scenes; a quarter of the two-group scenes is held out, no single group is."""
    scenes = all_shapes()
    pairs = [scene for scene in scenes if len(scene) == 2]
    held_out = set(random.Random(seed).sample(pairs, int(TEST_PAIR_SHARE * len(pairs))))
    train = [scene for scene in scenes if scene not in held_out]
    return train, sorted(held_out)


@cache
def split_words(seed=0, num_test=80):
    """(train, test) words; disjoint."""
    words = sorted(set(WORDS) - RESERVED)
    shuffled = random.Random(seed).sample(words, len(words))
    return sorted(shuffled[num_test:]), sorted(shuffled[:num_test])


def random_word(rng):
    """A train word, a pronounceable string, or any letters; 2 to 4 of them, never a test word."""
    train, test = split_words()
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(train)
    length = rng.choice((2, 3, 3, 4, 4, 4))
    letters = [LETTERS] * length
    if kind < 0.65:
        first = rng.random() < 0.8
        letters = [CONSONANTS if (i % 2 == 0) == first else VOWELS for i in range(length)]
    word = "".join(rng.choice(choices) for choices in letters)
    return random_word(rng) if word in test or word in RESERVED else word


def change_letter(rng, word):
    """The word with one letter changed; never a test word."""
    index = rng.randrange(len(word))
    changed = word[:index] + rng.choice(LETTERS.replace(word[index], "")) + word[index + 1 :]
    refused = changed in split_words()[1] or changed in RESERVED
    return change_letter(rng, word) if refused else changed


def misspell(rng, prompt, share):
    """The sign's prompt with about this share of its letters wrong; never a test word."""
    head, word, _ = prompt.split('"')
    letters = [rng.choice(LETTERS) if rng.random() < share else letter for letter in word]
    wrong = "".join(letters)
    refused = wrong != word and (wrong in split_words()[1] or wrong in RESERVED)
    return misspell(rng, prompt, share) if refused else f'{head}"{wrong}"'


def misdescribe(rng, prompt, share):
    """The shapes' prompt with about this share of its attributes wrong; never a test scene."""
    choices = (list(COUNTS), list(COLOURS), KINDS)
    wrong = tuple(
        tuple(
            rng.choice(values) if rng.random() < share else value
            for value, values in zip(group, choices, strict=True)
        )
        for group in parse_shapes(prompt)
    )
    refused = wrong not in split_shapes()[0]
    return misdescribe(rng, prompt, share) if refused else shapes_prompt(wrong)


def random_sign(rng):
    """(prompt, picture) of a sign that training may see."""
    colour, word = rng.choice(list(COLOURS)), random_word(rng)
    return sign_prompt(colour, word), draw_sign(colour, word)


def random_shapes(rng):
    """(prompt, picture) of a row of shapes that training may see; one group a third of the time."""
    train, _ = split_shapes()
    num_groups = 1 if rng.random() < 1 / 3 else 2
    groups = rng.choice(train)
    while len(groups) != num_groups:
        groups = rng.choice(train)
    return shapes_prompt(groups), draw_shapes(groups)


def parse_shapes(prompt):
    """The (count, colour, kind) groups that `shapes_prompt` turned into this prompt."""
    counts = {name: count for count, name in COUNTS.items()}
    groups = [group.split() for group in prompt.split(" and ")]
    return [(counts[name], colour, kind.removesuffix("s")) for name, colour, kind in groups]


def draw(prompt):
    """The one picture of a prompt of this world."""
    if '"' in prompt:
        return draw_sign(prompt.split()[1], prompt.split('"')[1])
    return draw_shapes(parse_shapes(prompt))
