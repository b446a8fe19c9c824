"""`stepfs report`: a page whose numbers are those of `ls` and of numpy, that holds no markup of others, and that fits every screen."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from harness import BIN, FAILURE, empty_cache, objects, open_files, run, run_json, wait_until
from series import save_walk, walk
from test_diff_merge import PEAK

pytestmark = pytest.mark.stepfs

STATES = 6
CHROMIUM = shutil.which("chromium")
NAMES = {"html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "p", "dl", "div", "dt", "dd", "small", "data", "ul", "li",
         "strong", "main", "figure", "figcaption", "svg", "desc", "line", "text", "path", "table", "thead", "tbody", "tr", "th", "td",
         "time", "footer", "tfoot", "bdi", "span"}


class Page(HTMLParser):
    """The parts of a page that tests look at."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.stack = set(), set(), []
        self.texts, self.marks, self.rows, self.data, self.name = {}, {}, [], [], ""
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        self.attributes |= set(attributes)
        if tag == "meta":
            return
        self.stack.append((tag, attributes))
        figure = [of.get("id") for tag, of in self.stack if tag == "figure"]
        if tag == "tr" and figure == ["table"]:
            self.rows.append([])
        elif tag == "td" and figure == ["table"]:
            self.rows[-1].append("")
        elif tag == "td":
            self.marks.setdefault((*figure, attributes["class"]), []).append(attributes["title"])
        elif tag == "data":
            self.data.append(int(attributes["value"]))

    def handle_endtag(self, tag):
        assert self.stack.pop()[0] == tag, tag

    def handle_data(self, text):
        for _, attributes in self.stack:
            if "id" in attributes:
                self.texts[attributes["id"]] = self.texts.get(attributes["id"], "") + text
        tags = [tag for tag, _ in self.stack]
        if "td" in tags:
            self.rows[-1][-1] += text
        figure = [attributes.get("id") for tag, attributes in self.stack if tag == "figure"]
        if tags[-2:] == ["path", "title"]:
            place = self.marks.setdefault((figure[0], self.stack[-2][1]["class"]), [])
            # Texts come in pieces, at most one title per mark.
            place.append(text)

    def all_marks(self, figure):
        return [text for (of, _), texts in self.marks.items() if of == figure for text in texts]

    def updates(self):
        """{(tensor, before, after): the words of a cell}."""
        found = (re.fullmatch(r"(.*), (\d+) to (\d+): (.*)", text) for text in self.all_marks("updates"))
        return {(cell[1], int(cell[2]), int(cell[3])): cell[4] for cell in found}


def report(place, out, **options):
    done = run("report", place, "-o", out, **options)
    assert done.stderr == "" and re.search(r"\d+ checkpoints?, ", done.stdout)
    return Page(out)


def with_loss(state, path):
    torch.save({**state, "loss": 3.0 - 0.1 * state["step"], "best_val_loss": 1.0}, path)


def share(value):
    percent = 100 * value
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2f}%" if percent >= 0.01 else f"{percent:.1e}%"


def expected(folder, names):
    """The words of each cell, by numpy in double precision."""
    models = [{k: v.double().numpy() for k, v in torch.load(folder / name)["model"].items()} for name in names]
    cells = {}
    for at, (a, b) in enumerate(zip(models, models[1:]), 1):
        for name in a:
            cells[f"model/{name}", at, at + 1] = share(np.linalg.norm(b[name] - a[name]) / np.linalg.norm(a[name]))
    return cells


@pytest.fixture
def saved(mount):
    """A series in a mount, of which one file is cut short, one is pinned and one is the best; and the same as plain files."""
    plain, run_ = mount.base / "plain", mount / "run"
    plain.mkdir()
    run_.mkdir()
    names = save_walk(plain, STATES, save=with_loss)
    for at, name in enumerate(names):
        shutil.copyfile(plain / name, run_ / name)
        # While it is the newest: an older one may be released at any moment.
        if at == 1:
            run("pin", run_ / name)
        if at == 3:
            os.symlink(name, run_ / "best.pt")
    whole = (plain / names[0]).read_bytes()
    (run_ / "step_0007.pt").write_bytes(whole[: len(whole) // 2])
    # An hour from each save to the next.
    start = time.time() - 3600 * 8
    for at, name in enumerate([*names, "step_0007.pt"]):
        os.utime(run_ / name, (start + 3600 * at,) * 2)
    mount.sync()
    return mount, run_, plain, names


def test_the_page_has_the_numbers_of_ls(saved):
    mount, folder, _, names = saved
    page = report(folder, mount.base / "run.html")
    files = run_json("ls", folder, "--json")
    assert page.data[:2] == [sum(f["stored_bytes"] for f in files), sum(f["logical_bytes"] for f in files)]
    assert page.data[2:] == [n for f in files for n in (f["logical_bytes"], f["stored_bytes"])]
    rows = [row for row in page.rows if row]
    assert [(row[0], row[5]) for row in rows] == [(str(f["step"]), os.path.basename(f["path"])) for f in files]
    words = [re.split(r"\s{2,}", line.strip())[-2] for line in run("ls", folder).stdout.splitlines()[1:-1]]
    assert [row[4] for row in rows] == words and "CUT SHORT" in words and "pinned, exact" in words
    assert page.texts["count"] == str(len(files)) == "7" and page.texts["problems"] == "1"
    newest = run("latest", folder, check=True).stdout.strip()
    assert page.texts["newest"].startswith(os.path.basename(newest)) and newest.endswith(names[-1])
    best = run("best", folder).stdout.strip()
    assert page.texts["best"].startswith(os.path.basename(best)) and best.endswith(names[3])
    assert page.texts["problem-list"].startswith("CUT SHORT step_0007.pt: ")
    # A mark for each file in its lane, and for each error.
    lossy = [f for f in files if f["error_updates"]]
    lanes = {mark: len(texts) for (figure, mark), texts in page.marks.items() if figure == "timeline"}
    assert lanes == {"m0": 3, "m1": len(lossy), "m2": 1, "m3": 1, "m4": 1} and len(lossy) == 3
    assert len(page.all_marks("errors")) == len(lossy)
    assert [text.split(": ")[-1] for text in page.all_marks("errors")] == [w for w in words if w.endswith(("update", "updates"))]
    sums = np.cumsum([f["logical_bytes"] for f in sorted(files, key=lambda f: f["modified_ns"])])
    assert len(page.all_marks("sizes")) == 2 * len(sums)
    assert page.all_marks("losses") == [f"loss in the files: {3.0 - 0.1 * at:.4f}" for at in range(1, STATES + 1)]
    pace = re.search(r"The disk has .* free, ([\d.]+) MiB less each day. Room: ", page.texts["sizes"])
    assert float(pace[1]) == pytest.approx(sum(f["stored_bytes"] for f in files[:-1]) / 6 * 24 / 2**20, rel=.01)
    assert "hours since" in page.texts["sizes"]


def test_the_heat_map_has_numpys_numbers(saved):
    mount, folder, plain, names = saved
    page = report(plain, mount.base / "plain.html")
    assert page.updates() == expected(plain, names)
    assert page.texts["problems"] == "0" and page.data[0] == sum((plain / name).stat().st_size for name in names)
    # Released files as they are read, in the mount and without it.
    in_mount = report(folder, mount.base / "mount.html").updates()
    assert in_mount == expected(folder, names) != expected(plain, names)
    assert report(f"{mount.store}:run", mount.base / "store.html").updates() == in_mount
    mount.umount()
    whole = report(mount.store, mount.base / "whole.html")
    assert whole.updates() == in_mount and whole.texts["problems"] == "1"


def test_a_name_is_never_markup(tmp_path):
    folder = tmp_path / "<script>"
    folder.mkdir()
    for at, state in enumerate(walk(3, shapes={'</title><script>alert("&")</script>': (64, 32), "w\x1b[2J": (64, 32)}), 1):
        torch.save(state, folder / f"step_{at}<img src=x onerror=alert(1)>.pt")
    torch.save(state, os.fsdecode(os.fsencode(folder) + b"/step_4\xff\"'.pt"))
    (folder / "step_5<script>.pt").write_bytes((folder / "step_1<img src=x onerror=alert(1)>.pt").read_bytes()[:30_000])
    page = report(folder, tmp_path / "run.html")
    assert page.tags <= NAMES, page.tags - NAMES
    assert not any(name.startswith("on") or name in ("src", "href", "style") for name in page.attributes), page.attributes
    assert page.text.count("<style>") == 1 and "\x1b" not in page.text and "url(" not in page.text and "://" not in page.text
    assert sum("<img" in row[5] for row in page.rows if row) == 3
    assert any("<script>" in text for text in page.all_marks("updates"))


def test_many_checkpoints_are_sampled_evenly(tmp_path):
    for at in range(100):
        torch.save({"model": {"w.weight": torch.full((8, 8), 1.0 + at)}, "step": at}, tmp_path / f"step_{at}.pt")
    page = report(tmp_path, tmp_path / "run.html")
    assert "Only 49 of 100 checkpoints are compared, evenly spaced." in page.texts["updates"]
    cells = page.updates()
    steps = sorted({at for _, *both in cells for at in both})
    assert len(cells) == 48 and steps[0] == 0 and steps[-1] == 99 and set(np.diff(steps)) == {2, 3}
    assert all(words == share((b - a) / (1 + a)) for (_, a, b), words in cells.items())


def test_a_loss_comes_from_names_and_from_trainers_log(tmp_path):
    for at in (1, 2, 3):
        (tmp_path / f"checkpoint-{10 * at}").mkdir()
        torch.save({"w.weight": torch.ones(8, 8)}, tmp_path / f"checkpoint-{10 * at}/pytorch_model.bin")
        log = [{"loss": 4.0 - n, "step": 5 * n} for n in range(1, 2 * at + 1)] + [{"eval_loss": 1.5, "step": 10 * at}, {"loss": "x"}]
        (tmp_path / f"checkpoint-{10 * at}/trainer_state.json").write_text(json.dumps({"log_history": log}).replace("0.0,", "NaN,"))
    page = report(tmp_path, tmp_path / "run.html")
    assert page.all_marks("losses") == ["eval_loss in Trainer's log: 1.5000"] + [
        f"loss in Trainer's log: {4.0 - n:.4f}" for n in range(1, 7) if n != 4]
    assert [*page.updates().values()] == ["same"] * 2
    named = tmp_path / "named"
    named.mkdir()
    for at in (1, 2):
        torch.save({"w.weight": torch.ones(8, 8)}, named / f"epoch={at}-val_loss=0.{at}5.ckpt")
    assert report(named, tmp_path / "named.html").all_marks("losses") == ["loss in the names: 0.1500", "loss in the names: 0.2500"]
    plain = tmp_path / "plain"
    plain.mkdir()
    torch.save({"w.weight": torch.ones(8, 8)}, plain / "step_1.pt")
    page = report(plain, tmp_path / "plain.html")
    assert 'id="losses"' not in page.text and 'id="updates"' not in page.text and 'id="errors"' not in page.text


def test_a_run_that_diverged_shows_it(tmp_path):
    """The words are those of `stepfs diff`: no cell says less than it."""
    zero, nan = torch.zeros(8, 8), torch.full((8, 8), torch.nan)
    part = torch.ones(8, 8)
    part[1:] = torch.nan
    weights = [(zero, zero, torch.ones(8, 8)), (zero, torch.ones(8, 8), 2 * torch.ones(8, 8)), (zero, 2 * torch.ones(8, 8), part), (zero, nan, nan)]
    for at, (frozen, lora, w) in enumerate(weights, 1):
        torch.save({"frozen.weight": frozen.clone(), "lora_B.weight": lora.clone(), "w.weight": w.clone()}, tmp_path / f"step_{at}.pt")
    page = report(tmp_path, tmp_path / "run.html")
    assert page.updates() == {
        **{("frozen.weight", at, at + 1): "same" for at in (1, 2, 3)},
        ("lora_B.weight", 1, 2): "changed from zero", ("lora_B.weight", 2, 3): "100%", ("lora_B.weight", 3, 4): "not finite: 0 before, 64 after",
        ("w.weight", 1, 2): "100%", ("w.weight", 2, 3): "not finite: 0 before, 56 after", ("w.weight", 3, 4): "not finite: 56 before, 64 after"}
    assert {mark: len(texts) for (figure, mark), texts in page.marks.items() if figure == "updates"} == {
        "same": 3, "zero": 1, "h6": 2, "nan": 3}
    for words in ("NaN or infinity before or after", "changed from zero", "no change"):
        assert words in page.texts["updates"], words
    assert "not in both" not in page.text
    for at in (1, 2, 3):
        for row in run_json("diff", tmp_path / f"step_{at}.pt", tmp_path / f"step_{at + 1}.pt", "--json")["tensors"]:
            words = page.updates()[row["tensor"], at, at + 1]
            counts = "not finite: {} before, {} after".format(*row["not_finite"])
            told = counts if any(row["not_finite"]) else "same" if row["changed"] == 0 else share(row["relative"]) if row["rms"] else "changed from zero"
            assert words == told, row


def test_a_damaged_checkpoint_costs_its_own_cells(mount):
    names = save_walk(mount.dir, 5)
    mount.sync()
    mount.require_released(*names[:-1])
    whole = report(mount.dir, mount.base / "whole.html").updates()
    number = mount.entry(names[-2])["object"]
    [path] = [path for path in objects(mount.store) if path.name.split(".")[0].endswith(number[2:])]
    mount.umount()
    empty_cache(mount.store)
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(64))
    in_store = report(mount.store, mount.base / "store.html")
    mount.mount()
    for page in (report(mount.dir, mount.base / "mount.html"), in_store):
        assert f"Not read: {names[-2]}: " in page.texts["updates"]
        others = {cell: words for cell, words in whole.items() if 4 not in cell[1:]}
        assert {cell: words for cell, words in page.updates().items() if cell in whole and 4 not in cell[1:]} == others


def test_nothing_is_overwritten_and_nothing_is_left(saved):
    mount, folder, plain, _ = saved
    out = mount.base / "run.html"
    (mount.base / "empty").mkdir()
    for place, words in [(mount.base / "empty", "no checkpoint is below"), (plain / "step_0001.pt", "is a file"),
                         (mount.base / "none", "no such file")]:
        done = run("report", place, "-o", out, check=False)
        assert done.returncode == FAILURE and words in done.stderr and not list(mount.base.glob("*.html*")), done.stderr
    out.write_text("mine")
    done = run("report", plain, "-o", out, check=False)
    assert done.returncode == FAILURE and "exists; name a new file" in done.stderr and out.read_text() == "mine"


def sparse(path, count, tensors=1):
    """A file of safetensors with `count` floats of 0 in these many tensors, which take no room."""
    own = count // tensors
    entry = lambda at: {"dtype": "F32", "shape": [own], "data_offsets": [4 * own * at, 4 * own * (at + 1)]}
    head = json.dumps({f"model.layers.{at}.self_attn.q_proj.weight": entry(at) for at in range(tensors)}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head)
    os.truncate(path, 8 + len(head) + 4 * count)


@pytest.mark.parametrize("files, count, tensors, most", [(6, 25_000_000, 1, 60_000), (16, 40_000, 10_000, 110_000)])
def test_memory_stays_small(tmp_path, files, count, tensors, most):
    """Files of 100 MB are never in memory as a whole, nor are all names of many files."""
    for at in range(files):
        sparse(tmp_path / f"step_{at}.safetensors", count, tensors)
    done = subprocess.run([sys.executable, "-c", PEAK, BIN, "report", ".", "-o", "run.html"], cwd=tmp_path, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) < most, done.stdout + done.stderr


def test_a_large_log_of_trainer_takes_no_more_than_its_text(tmp_path):
    """Values that are no losses take many times the room of their text, if they are kept."""
    (tmp_path / "checkpoint-1").mkdir()
    torch.save({"w.weight": torch.ones(8, 8)}, tmp_path / "checkpoint-1/pytorch_model.bin")
    log = f'{{"log_history": [{{"loss": [{"[]," * (5 << 20)}[]], "step": 1}}, null, {{"loss": 2.5, "step": 1}}]}}'
    (tmp_path / "checkpoint-1/trainer_state.json").write_text(log)
    done = subprocess.run([sys.executable, "-c", PEAK, BIN, "report", ".", "-o", "run.html"], cwd=tmp_path, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) < 80_000, done.stdout + done.stderr
    assert Page(tmp_path / "run.html").all_marks("losses") == ["loss in Trainer's log: 2.5000"]


def test_an_interrupt_leaves_nothing(tmp_path):
    for at in range(8):
        sparse(tmp_path / f"step_{at}.safetensors", 100_000_000)
    before = sorted(tmp_path.iterdir())
    working = subprocess.Popen([BIN, "report", tmp_path, "-o", tmp_path / "run.html"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # It compares the first two now.
    opened = lambda: [path for path in open_files(working.pid) if path.endswith(".safetensors")]
    wait_until(lambda: len(opened()) == 2, 30, "two files are open")
    working.send_signal(signal.SIGINT)
    out, error = working.communicate(timeout=60)
    assert working.returncode == 130 and out == b"" and b"interrupted" in error
    assert sorted(tmp_path.iterdir()) == before


# Shows a page in a frame of a given width, and writes its measures into the title.
FRAME = """<!doctype html><body style="margin:0"><iframe id=f style="border:0;width:%dpx;height:900px" srcdoc="%s"></iframe><script>
document.getElementById("f").onload = function () {
  const d = this.contentDocument, text = [...d.querySelectorAll("svg.chart text, table.heat th, p, td, li")];
  const size = (e) => { const s = e.ownerSVGElement, box = s && s.getBoundingClientRect();
    return parseFloat(getComputedStyle(e).fontSize) * (s ? box.width / s.viewBox.baseVal.width : 1); };
  const within = [...d.querySelectorAll("svg.chart")].every((s) => { const box = s.getBoundingClientRect();
    return [...s.querySelectorAll("text")].every((t) => { const b = t.getBoundingClientRect();
      return b.left >= box.left - 1 && b.right <= box.right + 1 && b.bottom <= box.bottom + 1; }); });
  document.title = JSON.stringify({wide: d.documentElement.scrollWidth, text: Math.min(...text.map(size)), within: within,
    back: getComputedStyle(d.body).backgroundColor, mark: getComputedStyle(d.querySelector(".m0")).fill});
};</script>"""


def measured(page, width, scheme, folder):
    """The measures of a page in a window of this width. `scheme`: 0 is dark, 1 is light."""
    frame = folder / f"{width}-{scheme}.html"
    frame.write_text(FRAME % (width, page.text.replace("&", "&amp;").replace('"', "&quot;")))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", f"--user-data-dir={folder}/profile-{width}-{scheme}",
         f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={max(width, 600)},900", "--virtual-time-budget=3000",
         "--dump-dom", f"file://{frame}"], capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert found, done.stderr
    return json.loads(found[1])


@pytest.mark.nightly
@pytest.mark.skipif(not CHROMIUM, reason="`scripts/setup.sh nightly` installs chromium")
def test_a_page_fits_every_screen(saved):
    mount, folder, _, _ = saved
    page = report(folder, mount.base / "run.html")
    found = {(width, scheme): measured(page, width, scheme, mount.base) for width in (390, 1400) for scheme in (0, 1)}
    for (width, scheme), measures in found.items():
        assert measures["wide"] <= width, "nothing is wider than the screen"
        assert measures["text"] >= 11, "text of every chart can be read"
        assert measures["within"], "no label of a chart is cut off"
    for name in ("back", "mark"):
        assert found[390, 0][name] == found[1400, 0][name] != found[390, 1][name] == found[1400, 1][name]
