from __future__ import annotations

from support.jobs import write_job
from support.replies import ok


def test_a_run_gets_its_page_with_every_row_and_number(bagent, fs, job_dir):
    fs.set_script({"r2": [ok("<script>alert(1)</script>")], "*": [ok("fine")]})
    write_job(job_dir, fs.url, 5)
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    done = bagent(["report"])
    assert (done.code, done.out) == (0, "")
    assert "report.html" in done.err
    page = (job_dir / "runs" / "job" / "report.html").read_text()
    assert "<title>job</title>" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("<script>") == 1
    assert "text number 3" in page
    assert bagent(["report", "job", "-o", "out.html"]).code == 0
    assert (job_dir / "out.html").stat().st_size > 5000
    assert bagent(["report", "job", "-o", "missing/out.html"]).code == 74


def test_a_run_in_a_folder_of_another_name_has_both_names_on_its_page(bagent, fs, job_dir):
    write_job(job_dir, fs.url, 1)
    assert bagent(["run", "job.yaml", "--progress", "none", "-o", "run"]).code == 0
    assert bagent(["report", "run"]).code == 0
    assert "<h1>job (run)</h1>" in (job_dir / "run" / "report.html").read_text()
