"""The verifier of mathematics: ordinary answers a second, and what answers that would compute for ever cost.

    python -m experiments.benchmarks.verifier [--pairs=10000 --endless=64 --json=FILE]

Half of the ordinary answers are right; a quarter each are integers and decimals, fractions and pairs, roots and multiples of pi,
polynomials. Then 64 answers that no computer finishes lie among 1,000 ordinary ones, whose verdicts must stay what they were without them.

On 2 cores of an AMD EPYC: 10,000 ordinary answers in 22.1 s (453 a second); 64 endless ones among 1,000 in 30.8 s; none misjudged.
"""

import argparse
import random
import time

from cispo_jax.rewards.math import judge, verify_math
from experiments.benchmarks import timing

ENDLESS = (
    r"2003^{2002^{2001}}", r"(10^9)!", r"10^{10^{10}}", r"\sum_{n=1}^{10^{8}} \sin(n)", r"(x+y+z+w)^{300}", r"\int_0^1 e^{x^{x^x}} dx",
    r"\prod_{n=1}^{10^7} (n+x)", r"((9!)!)!", r"\binom{10^{12}}{5 \cdot 10^{11}}", r"\sqrt{2}^{\sqrt{2}^{\sqrt{2}^{10^{9}}}}",
    r"(x+1)^{100000}", r"\sin(10^{10^{10}})", r"\lfloor e^{10^{7}} \rfloor", r"\gcd(10^{10^8}, 6)", r"\int \int e^{\sin(x^x)} dx dx",
    r"\zeta(10^{9})",
)  # fmt: skip


def ordinary(rng: random.Random) -> tuple[str, str, bool]:
    """Gold, answer, and whether it is right."""
    a, b, c = rng.randrange(-50, 999), rng.randrange(2, 99), rng.randrange(2, 50)
    right = rng.random() < 0.5
    off = 0 if right else rng.randrange(1, 5)
    pairs = (
        (f"{a}", f"{a + off}"),
        (f"{a / 4}", f"{(a + off) / 4}"),
        (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a + off}}}{{{b}}}"),
        (f"({a}, {b})", f"({a + off},{b})"),
        (rf"{b}\sqrt{{{c}}}", rf"\sqrt{{{b * b * c + off}}}"),
        (rf"\frac{{{b}\pi}}{{{c}}}", rf"{b + off}\pi/{c}"),
        (rf"{a}x^2+{b}x", rf"x({a}x+{b + off})"),
        (rf"\frac{{{a}+\sqrt{{{b}}}}}{{{c}}}", rf"\frac{{{a + off}}}{{{c}}} + \frac{{\sqrt{{{b}}}}}{{{c}}}"),
    )
    return *rng.choice(pairs), right


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--json", default="", help="file for the figures")
    parser.add_argument("--endless", type=int, default=64)
    args = parser.parse_args(argv)
    rng = random.Random(0)
    pairs = [ordinary(rng) for _ in range(args.pairs)]
    judged = lambda answer, gold: verify_math(rf"Thus, the answer is \boxed{{{answer}}}.", gold)

    start = time.monotonic()
    wrong = sum(judged(answer, gold) is not right for gold, answer, right in pairs)
    seconds = time.monotonic() - start
    print(f"{len(pairs):,} ordinary answers: {seconds:.1f} s, {len(pairs) / seconds:,.0f} a second; {wrong} misjudged")

    among = [(gold, answer, right) for gold, answer, right in pairs[:1000]]
    among += [("9", ENDLESS[i % len(ENDLESS)], False) for i in range(args.endless)]
    rng.shuffle(among)
    start = time.monotonic()
    misjudged = sum(judged(answer, gold) is not right for gold, answer, right in among)
    mixed = time.monotonic() - start
    print(
        f"{args.endless} endless ones among {len(among) - args.endless:,}: {mixed:.1f} s; {misjudged} misjudged; "
        f"{judge.counts[judge.LATE]} stopped"
    )
    figures = {
        "pairs": len(pairs),
        "seconds": seconds,
        "misjudged": wrong,
        "mixed_seconds": mixed,
        "mixed_misjudged": misjudged,
    }
    timing.write(args.json, {"figures": figures})


if __name__ == "__main__":
    main()
