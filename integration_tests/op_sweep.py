"""Every operator of torch's database, for many shardings of its inputs, on 4 ranks.

They are compared with the single device.

    # all of it; writes docs/op_coverage.md
    python -m integration_tests.op_sweep
    # entries whose name contains it, with what went wrong
    python -m integration_tests.op_sweep --only softmax -v
    # every second entry; the page takes in all shares
    python -m integration_tests.op_sweep --share 1/2
    # a seventh of the cases
    python -m integration_tests.op_sweep --sample
    # the same on torch's own DTensor, for the page
    python -m integration_tests.op_sweep --sample --peer

For every entry: all samples, in the widest dtype; one of them with every combination of placements;
samples of even sizes; the in-place form; every other dtype that it takes. Tensors are replicated,
sharded along any dim (the samples' sizes make most shardings uneven, many with empty shards),
sharded raggedly, or partial, on a mesh of 4 and of 2 x 2 ranks. A case is right if the outputs and
the gradients of all inputs are, on every rank, those of the single device. What is done is kept in
`out/`: a sweep that was stopped goes on where it was, and shares that ran side by side make one
sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from integration_tests.op_cases import Answer, Part, dtype_of, sweep_part
from integration_tests.op_page import Result, described, moved, page
from integration_tests.op_systems import RANKS

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"
FURTHER = (
    "float32",
    "bfloat16",
    "float16",
    "complex128",
    "complex64",
    "int64",
    "int32",
    "uint8",
    "bool",
)
CHUNK = 24  # samples per job
# hangs or crashes, after which the rest of a part is left out
GIVEN_UP = 4
# verdicts from good to bad: a case is as bad as on its worst rank
ORDER = "lrgiwf"


def parts_of(sample: bool) -> list[Part]:
    """What is tried for every entry."""
    if sample:
        return [
            Part("main", samples=3, cases=9, each=2),
            Part("even", samples=1, each=3),
            Part("inplace", samples=1, each=4),
        ]
    return [
        Part("main", cases=24, each=1),
        Part("every", every=128),
        Part("even", samples=2, each=3),
        Part("inplace", samples=2, each=4),
        *(Part(dtype, dtype=dtype, samples=1, each=1) for dtype in FURTHER),
    ]


def sweep_entry(info: Any, parts: Sequence[Part], *, peer: bool, patience: float) -> Result:
    """All parts of one entry; a case that takes longer than `patience` seconds hangs."""
    variant = info.variant_test_name
    result = Result(f"{info.name}{'.' + variant if variant else ''}")
    start = time.perf_counter()
    widest = dtype_of(info, Part("main"))
    for part in parts:
        if not part.dtype or dtype_of(info, part) not in (None, widest):
            _sweep_part(info, part, peer, patience, result)
    result.seconds = round(time.perf_counter() - start, 1)
    return result


def _sweep_part(info: Any, part: Part, peer: bool, patience: float, result: Result) -> None:
    """A part, by some of its samples at a time.

    After a case that ended the ranks it goes on, but not for ever.
    """
    begin = skip = ended = 0
    letters = ""
    while ended < GIVEN_UP:
        answer = _run(
            info, replace(part, start=begin, stop=begin + CHUNK, skip=skip), peer, patience
        )
        letters += answer.letters
        result.notes += answer.notes[: 8 - len(result.notes)]
        if answer.samples < 0:
            ended, skip = ended + 1, skip + len(answer.letters)
            continue
        if part.name == "main":
            result.samples = answer.samples
        begin, skip = begin + CHUNK, 0
        if answer.samples <= begin:
            break
    if letters:
        result.parts[part.name] = letters


def _run(info: Any, part: Part, peer: bool, patience: float) -> Answer:
    """One job on all ranks; if it ends a rank, what rank 0 had written down and one failed case."""
    from shoal_mesh.testing import rank_pool

    with tempfile.NamedTemporaryFile("r") as progress:
        try:
            found = rank_pool(RANKS).run(
                sweep_part,
                *(info.name, info.variant_test_name, part),
                peer=peer,
                patience=patience,
                progress=progress.name,
                timeout=None,  # each case has its own
            )
        except Exception as error:  # whatever ends a rank is the finding
            *lines, case = progress.read().split("\n")
            letters = "".join(line[-1] for line in lines)
            text = re.sub(r"\n--- rank [1-9].*", "", str(error), flags=re.DOTALL)
            note = f"{case or 'no case'} {type(error).__name__}: {text[:3000]}"
            return Answer(-1, f"{letters}f", [note])
    return together(found)


def together(answers: Sequence[Answer]) -> Answer:
    """What all ranks found, as the worst of them found it."""
    lengths = {len(a.letters) for a in answers}
    if len(lengths) > 1:
        return Answer(answers[0].samples, "f", [f"the ranks tried {sorted(lengths)} cases"])
    letters = "".join(
        max(case, key=ORDER.index) for case in zip(*(a.letters for a in answers), strict=True)
    )
    return Answer(answers[0].samples, letters, max(answers, key=lambda a: len(a.notes)).notes)


def code_of(peer: bool) -> str:
    """What tells one state of the system under test from another.

    It is a digest of its sources, or torch's version.
    """
    if peer:
        import torch

        return str(torch.__version__)
    digest = hashlib.sha256()
    for package in ("mesh", "dtensor"):
        for file in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def stored(peer: bool, sample: bool) -> dict[str, Result]:
    """The results of all earlier sweeps and shares of that kind, by the name of the entry."""
    found: dict[str, Result] = {}
    for file in sorted(OUT.glob(f"{_stem(peer, sample)}*.jsonl")):
        lines = file.read_text().splitlines()
        if file.stem.partition(".")[0] == _stem(peer, sample) and json.loads(lines[0]) == _settings(
            sample
        ):
            found |= {r["name"]: Result(**r) for r in map(json.loads, lines[1:])}
    return found


def _stem(peer: bool, sample: bool) -> str:
    return f"op_sweep{'_peer' if peer else ''}{'_sample' if sample else ''}"


def _settings(sample: bool) -> list[dict[str, Any]]:
    return [asdict(part) for part in parts_of(sample)]


def sweep(options: argparse.Namespace, file: Path) -> Iterator[Result]:
    """All entries whose name contains `--only`.

    Of a whole sweep, what was right, or wrong with this code, is kept.
    """
    from torch.testing._internal.common_methods_invocations import op_db
    from tqdm import tqdm

    known, code = {}, code_of(options.peer)
    if not options.only:
        found = stored(options.peer, options.sample)
        known = {name: r for name, r in found.items() if r.good or not r.tried or r.code == code}
    if not options.only and not (
        file.exists()
        and json.loads(file.read_text().partition("\n")[0]) == _settings(options.sample)
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_settings(options.sample)) + "\n")
    turn, turns = map(int, options.share.split("/")) if options.share else (1, 1)
    wanted = [op for op in op_db if options.only in op.name][turn - 1 :: turns]
    for info in tqdm(wanted, unit="op", disable=None):
        variant = info.variant_test_name
        name = f"{info.name}{'.' + variant if variant else ''}"
        if name not in known:
            known[name] = sweep_entry(
                info, parts_of(options.sample), peer=options.peer, patience=options.patience
            )
            known[name].code = code
            if not options.only:
                with file.open("a") as done:
                    done.write(json.dumps(asdict(known[name])) + "\n")
            if options.verbose and known[name].tried and not known[name].good:
                _report(known[name])
        yield known[name]


def _report(result: Result) -> None:
    print(
        f"{result.name}: {dict(result.counts())}, "
        f"{', '.join(f'{k} {v}' for k, v in result.parts.items())[:300]}"
    )
    for note in result.notes[:5]:
        print(f"    {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="operators whose name contains this; nothing is stored"
    )
    parser.add_argument("--sample", action="store_true", help="a seventh of the cases")
    parser.add_argument("--peer", action="store_true", help="torch's own DTensor instead")
    parser.add_argument(
        "--share",
        default="",
        help="K/N: of the entries, every N-th from the K-th; no page is written",
    )
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds after which a case hangs"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print what is not right")
    options = parser.parse_args()
    share = f".share{options.share.replace('/', '-')}" if options.share else ""
    start = time.perf_counter()
    results = list(sweep(options, OUT / f"{_stem(options.peer, options.sample)}{share}.jsonl"))
    print(f"{described(results)}. {moved(results)}; {time.perf_counter() - start:.0f} s")
    if not (options.only or options.sample or options.peer or share):
        ours, theirs = ([*stored(peer, True).values()] for peer in (False, True))
        (ROOT / "docs" / "op_coverage.md").write_text(page(results, ours, theirs, code_of(False)))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
