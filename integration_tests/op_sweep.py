"""Every operator of torch's database, for many shardings of its inputs, on 4 ranks against the single device.

    python -m integration_tests.op_sweep                      # all of it; writes docs/op_coverage.md
    python -m integration_tests.op_sweep --only softmax -v    # entries whose name contains it, with what went wrong
    python -m integration_tests.op_sweep --peer               # the same on torch's own DTensor, for the page
    python -m integration_tests.op_sweep --share 1/2          # every second entry; the page takes in all shares

For every entry: all samples, in the widest dtype; samples of even sizes; the in-place form; every other dtype that it
takes.  Tensors are replicated, cut along any dim (the samples' sizes make most cuts uneven, many with empty shards),
cut raggedly, or partial, on a mesh of 4 and of 2 x 2 ranks.  A case is right if the outputs and the gradients of all
inputs are, on every rank, those of the single device.  What is done is kept in `out/`: a sweep that was stopped goes on
where it was, and shares that ran side by side make one sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from integration_tests.op_cases import Answer, Part, sweep_parts
from integration_tests.op_page import Result, moved, page, told
from integration_tests.op_systems import RANKS

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"
FURTHER = ("float32", "bfloat16", "float16", "complex128", "complex64", "int64", "int32", "uint8", "bool")
WIDEST = ("float64", "float32", "complex128", "int64", "bool")
CHUNK = 24  # samples per job: what a hang may cost
ORDER = "lrgiwf"  # verdicts from good to bad: a case is as bad as on its worst rank


def parts_of(options: argparse.Namespace) -> list[Part]:
    """What is tried for every entry."""
    main = Part("main", samples=options.samples or sys.maxsize, cases=options.cases, each=2)
    few = Part("", samples=options.few, each=2)
    wide = [replace(few, name="even", each=3), replace(few, name="inplace", each=4)]
    wanted = [main, *wide, *(replace(few, name=dtype, dtype=dtype, samples=1) for dtype in FURTHER)]
    return [part for part in wanted if not options.parts or part.name in options.parts.split(",")]


def sweep_entry(info: Any, parts: Sequence[Part], *, peer: bool, patience: float) -> Result:
    """All parts of one entry; a job that takes longer than `patience` seconds hangs."""
    variant = info.variant_test_name
    result = Result(f"{info.name}{'.' + variant if variant else ''}")
    start = time.perf_counter()
    taken = {str(d).removeprefix("torch.") for d in info.supported_dtypes("cpu")}
    widest = next((d for d in WIDEST if d in taken), "")
    few = [p for p in parts if p.name != "main" and (not p.dtype or (p.dtype in taken and p.dtype != widest))]
    for part in parts:
        if part.name == "main":
            _sweep_chunks(info.name, variant, part, peer, patience, result)
    answers = _run(info.name, variant, few, peer, patience) if few else []
    if any(answer.samples < 0 for answer in answers):  # one of the parts ends the ranks: which?
        answers = [_run(info.name, variant, [part], peer, patience)[0] for part in few]
    for part, answer in zip(few, answers, strict=True):
        _add(result, part, answer)
    result.seconds = round(time.perf_counter() - start, 1)
    return result


def _sweep_chunks(name: str, variant: str, part: Part, peer: bool, patience: float, result: Result) -> None:
    """A part with many samples, by some of them at a time."""
    begin, hung = 0, 0
    while hung < 2:
        (answer,) = _run(name, variant, [replace(part, start=begin, stop=begin + CHUNK)], peer, patience)
        _add(result, part, answer)
        result.samples = max(result.samples, answer.samples)
        hung += answer.samples < 0
        begin += CHUNK
        if 0 <= answer.samples <= begin:
            break


def _add(result: Result, part: Part, answer: Answer) -> None:
    result.notes += answer.notes[: 8 - len(result.notes)]
    if answer.letters:
        result.parts[part.name] = result.parts.get(part.name, "") + answer.letters


def _run(name: str, variant: str, parts: Sequence[Part], peer: bool, patience: float) -> list[Answer]:
    """One job on all ranks; a hang or a crash is one failed case after those that rank 0 has written down."""
    from shoal_mesh.testing import rank_pool

    with tempfile.NamedTemporaryFile("r") as progress:
        try:
            found = rank_pool(RANKS).run(sweep_parts, name, variant, parts, peer, progress.name, timeout=patience)
        except Exception as error:  # whatever ends a rank is the finding
            text = re.sub(r"\n--- rank [1-9].*", "", str(error), flags=re.DOTALL)
            note = f"{type(error).__name__}: {text[:3000]}"
            return [Answer(-1, progress.read() + "f", [note])] * len(parts)
    return [together(answers) for answers in zip(*found, strict=True)]


def together(answers: Sequence[Answer]) -> Answer:
    """What all ranks found, as the worst of them found it."""
    lengths = {len(a.letters) for a in answers}
    if len(lengths) > 1:
        return Answer(answers[0].samples, "f", [f"the ranks tried {sorted(lengths)} cases"])
    letters = "".join(max(case, key=ORDER.index) for case in zip(*(a.letters for a in answers), strict=True))
    return Answer(answers[0].samples, letters, max(answers, key=lambda a: len(a.notes)).notes)


def kept(file: Path, settings: dict[str, Any]) -> dict[str, Result] | None:
    """The results that a file has of a sweep with the same settings; None if it has another sweep's or is not there."""
    lines = file.read_text().splitlines() if file.exists() else []
    if lines and json.loads(lines[0]) == settings:
        return {r["name"]: Result(**r) for r in map(json.loads, lines[1:])}
    return None


def begun(file: Path | None, settings: dict[str, Any]) -> dict[str, Result]:
    """The results of an earlier sweep with the same settings; without one, the file is begun."""
    if file is None:
        return {}
    known = kept(file, settings)
    if known is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings) + "\n")
    return known or {}


def sweep(options: argparse.Namespace, file: Path | None) -> Iterator[Result]:
    """All entries whose name contains `--only`; what `file` has is not run again."""
    from torch.testing._internal.common_methods_invocations import op_db
    from tqdm import tqdm

    parts = parts_of(options)
    settings = {"parts": [asdict(part) for part in parts], "peer": options.peer}
    known = begun(file, settings)
    if not (options.only or options.share):
        for share in sorted(OUT.glob(f"{_stem(options.peer)}.share*.jsonl")):
            known |= kept(share, settings) or {}
    turn, turns = map(int, options.share.split("/")) if options.share else (1, 1)
    wanted = [op for op in op_db if options.only in op.name][turn - 1 :: turns]
    for info in tqdm(wanted, unit="op", disable=None):
        variant = info.variant_test_name
        name = f"{info.name}{'.' + variant if variant else ''}"
        if name not in known:
            known[name] = sweep_entry(info, parts, peer=options.peer, patience=options.patience)
            if file is not None:
                with file.open("a") as done:
                    done.write(json.dumps(asdict(known[name])) + "\n")
            if options.verbose and known[name].tried and not known[name].good:
                _report(known[name])
        yield known[name]


def _stem(peer: bool) -> str:
    return f"op_sweep{'_peer' if peer else ''}"


def _report(result: Result) -> None:
    print(f"{result.name}: {dict(result.counts())}, {', '.join(f'{k} {v}' for k, v in result.parts.items())[:300]}")
    for note in result.notes[:5]:
        print(f"    {note}", flush=True)


def _settings(options: argparse.Namespace) -> str:
    """What was tried, for the page."""
    samples = f"at most {options.samples}" if options.samples else "all"
    tried = {"main": f"{samples} samples in the widest dtype with at least {options.cases} cases together"}
    tried["even"] = f"at most {options.few} samples with sizes that divide evenly"
    tried["inplace"] = f"at most {options.few} samples of the in-place form"
    tried |= dict.fromkeys(FURTHER, "one sample in each other dtype")
    chosen = dict.fromkeys(tried[part.name] for part in parts_of(options))
    return (
        f"For each: {', '.join(chosen)}; on {RANKS} gloo ranks as a mesh of 4 and of 2 x 2. A case lays out each "
        "tensor as one of: replicated, cut along any dim (evenly or not, with empty shards), cut raggedly, partial. It "
        f"is right if outputs and gradients of all inputs are, on every rank, those of a single device. {options.note}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators whose name contains this; no page is written")
    parser.add_argument("--parts", default="", help="only these, with commas: main, even, inplace, or dtypes")
    parser.add_argument("--peer", action="store_true", help="torch's own DTensor instead")
    parser.add_argument("--samples", type=int, default=0, help="samples per operator; all when left out")
    parser.add_argument("--cases", type=int, default=48, help="cases per operator at least; more for many samples")
    parser.add_argument("--few", type=int, default=4, help="samples for even sizes and for in-place forms")
    parser.add_argument("--share", default="", help="K/N: of the entries, every N-th from the K-th; no page is written")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds after which a job hangs")
    parser.add_argument("--keep", type=Path, help="the file of results to go on with, if not the standing one")
    parser.add_argument("--note", default="", help="a sentence for the page about this run")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    share = f".share{options.share.replace('/', '-')}" if options.share else ""
    files = {peer: OUT / f"{_stem(peer)}{share}.jsonl" for peer in (False, True)}
    start = time.perf_counter()
    whole = not options.only
    results = list(sweep(options, options.keep or (files[options.peer] if whole else None)))
    print(f"{told(results)}. {moved(results)}; {time.perf_counter() - start:.0f} s")
    if whole and not options.peer and not share:
        other = files[True].read_text().splitlines()[1:] if files[True].exists() else []
        settings = _settings(options)
        left_out = ("-v", "--keep", str(options.keep), "--note", options.note)
        told_as = [arg for arg in sys.argv[1:] if arg not in left_out]
        command = " ".join(["nox -s op_sweep", *(["--", *told_as] if told_as else [])])
        text = page(results, settings, command, [Result(**json.loads(line)) for line in other])
        (ROOT / "docs" / "op_coverage.md").write_text(text)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
